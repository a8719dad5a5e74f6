"""A launch of very many points asks, before they are composed."""

import os
import pty
import subprocess
import sys

import pytest

from inpaint_bench import launch


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
