"""A launch of very many points asks, before they are composed."""

import os
import pty
import subprocess
import sys
import time

import pytest

from inpaint_bench import launch


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        (["seed=range(0,1001)"], "1,001 points (1,001 values of seed)"),
        (["batch=1,2,3", "seed=range(0,400)"], "1,200 points (400 values of seed)"),
        (["batch=1,2", "repeats=501"], "1,002 points (2 values of batch)"),
        (["seed=range(0,10000000000)"], "1,000,000 points"),
        (["seed=1,2,3", "max_points=2"], "3 points (3 values of seed)"),
    ],
)
def test_more_points_than_allowed_are_refused_at_once_without_a_terminal(overrides, count, tmp_path, capsys):
    start = time.monotonic()
    assert launch.main(["-m", "gpu=a40", *overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {count}")
    assert "max_points=" in error
    assert time.monotonic() - start < 60
    assert not (tmp_path / "sweep").exists()


def test_max_points_allows_more(tmp_path, capsys):
    overrides = ["gpu=a40", "batch=1,2,3", "max_points=3", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    assert launch.main(["-m", *overrides]) == 0
    assert "3 points" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "shown"), [("y\n", 0, "nothing was submitted"), ("\n", 2, "nothing was launched")]
)
def test_a_person_at_a_terminal_is_asked(answer, code, shown, tmp_path):
    person, terminal = pty.openpty()
    overrides = ["gpu=a40", "batch=1,2,3", "max_points=2", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
    command = [sys.executable, "-m", "inpaint_bench.launch", "-m", *overrides]
    os.write(person, answer.encode())
    with subprocess.Popen(command, stdin=terminal, stderr=terminal, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=300)
    os.close(terminal)
    text = out.decode() + os.read(person, 65536).decode()
    os.close(person)
    assert process.returncode == code
    assert "This launches 3 points" in text
    assert shown in text
