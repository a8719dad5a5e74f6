"""Child processes that do not end: the wait for them does."""

import subprocess
import sys
import time

import pytest

from inpaint_bench.core import child


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
        child.run(["sh", "-c", script], timeout_s=0.5)
    assert time.monotonic() - start < 60


def test_output_exit_code_and_input_are_passed_on():
    done = child.run([sys.executable, "-c", "import sys; print(input()); sys.exit(3)"], timeout_s=60, stdin=b"x\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"x\n", b"")


def test_a_module_that_hangs_is_killed_with_what_it_started(tmp_path):
    hangs = "import subprocess; print('started', flush=True); subprocess.run(['sleep', '600'])"
    beside = child.Child("timeit", "-n", "1", "-r", "1", hangs, log=tmp_path / "log", read_output=True)
    assert beside.process.stdout.readline() == b"started\n"
    assert beside.end(0.1) == (b"", False)  # returns: nobody holds its output open


def test_a_module_reads_to_the_end_of_its_input(tmp_path):
    beside = child.Child("json.tool", "--compact", log=tmp_path / "log", read_output=True)
    text = b"[" + b"1," * 100_000 + b"1]"  # more than a pipe holds, either way
    beside.send(text)
    assert beside.end(60) == (text + b"\n", True)
    assert beside.process.returncode == 0
