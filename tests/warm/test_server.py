"""A program that the fork server runs starts, hears and ends as one that an interpreter of its own runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .server import ROOT


def start(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "tests.warm.program", *map(str, arguments)]
    path = f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"
    environment = os.environ | {"MINE": "1", "PYTHONPATH": path} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=cwd)


def test_has_the_arguments_folder_environment_and_streams_of_its_client_and_torch(tmp_path: Path) -> None:
    process = start("exit", 3, cwd=tmp_path)
    out, err = process.communicate()
    loaded, pid, *others = out.split()
    assert (loaded, others) == ("True", [str(tmp_path), "1", "exit", "3"])
    assert int(pid) != process.pid
    assert (err, process.returncode) == ("to stderr\n", 3)


def test_error_is_told_with_a_traceback() -> None:
    process = start("raise")
    assert process.communicate()[1].splitlines()[-1] == "ValueError: of the program"
    assert process.returncode == 1


def test_signal_that_ends_it_ends_its_client() -> None:
    process = start("die")
    process.communicate()
    assert process.returncode == -signal.SIGSEGV


def test_signals_reach_it() -> None:
    process = start("wait")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)][1] == "ready\n"
    process.send_signal(signal.SIGUSR1)
    process.communicate()
    assert process.returncode == 7


def test_is_killed_with_its_client() -> None:
    process = start("wait")
    assert process.stdout is not None
    pid = int(process.stdout.readline().split()[1])
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("values", [{"OMP_NUM_THREADS": "3"}, {"INPAINT_BENCH_TESTS_WARM": "/nonexistent"}])
def test_other_libraries_or_no_server_leave_it_to_its_own_interpreter(values: dict[str, str]) -> None:
    process = start("exit", 3, **values)
    out, _ = process.communicate()
    assert out.split()[:2] == ["False", str(process.pid)]
    assert process.returncode == 3


@pytest.mark.usefixtures("real_processes")
def test_real_processes_are_their_own() -> None:
    process = start("exit", 0)
    assert process.communicate()[0].split()[:2] == ["False", str(process.pid)]
