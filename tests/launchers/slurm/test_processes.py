"""Commands that do not end: the wait for them does."""

import subprocess
import sys
import time

import pytest

from launchers.slurm.processes import run_bounded


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 600",
        "sleep 600",  # the shell is killed, and what it called holds its output open
        "trap '' TERM INT; sleep 600",
        "setsid sleep 60 & exec sleep 600",  # leaves the process group
        "while true; do echo much; sleep 0.01; done",
    ],
)
def test_a_command_that_hangs_is_given_up(script):
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded(["sh", "-c", script], timeout_s=0.5)
    assert time.monotonic() - start < 60


def test_output_exit_code_and_input_are_passed_on():
    done = run_bounded([sys.executable, "-c", "import sys; print(input()); sys.exit(3)"], timeout_s=60, stdin=b"x\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"x\n", b"")
