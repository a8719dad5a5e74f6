"""One submitter at a time, on file systems with flock and without."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time

import pytest

from launchers.sweep.ledger import BusyError, Ledger

HOLD = "import sys; sys.path[:0] = {path!r}; from launchers.sweep.ledger import Ledger; from pathlib import Path\n"
HOLD += "with Ledger(Path({folder!r})).lock(): print('held', flush=True); input()"
NO_FLOCK = "import fcntl\ndef flock(*_): raise OSError({number}, 'no locks')\nfcntl.flock = flock\n"


@pytest.fixture(params=["flock", errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=str)
def no_flock(request, monkeypatch):
    """Code that takes flock away from a process; empty for a file system that has it."""
    if request.param == "flock":
        return ""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return NO_FLOCK.format(number=request.param)


@pytest.mark.usefixtures("no_flock")
def test_second_holder_is_refused_while_the_first_holds_the_lock(tmp_path):
    assert not Ledger(tmp_path).is_locked()
    with Ledger(tmp_path).lock():
        assert Ledger(tmp_path).is_locked()
        with pytest.raises(BusyError, match="wait for it"), Ledger(tmp_path).lock(timeout_s=0):
            pass
    assert not Ledger(tmp_path).is_locked()
    with Ledger(tmp_path).lock(timeout_s=0):
        assert Ledger(tmp_path).is_locked()


@pytest.mark.usefixtures("no_flock")
def test_only_one_of_many_is_inside(tmp_path):
    inside, counts = [], []

    def enter():
        with Ledger(tmp_path).lock(timeout_s=60):
            inside.append(1)
            counts.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 8


@pytest.mark.usefixtures("no_flock")
def test_busy_check_does_not_block_the_lock_holder(tmp_path):
    done, acquired = threading.Event(), 0

    def check():
        while not done.is_set():
            Ledger(tmp_path).is_locked()
            time.sleep(0.001)

    checker = threading.Thread(target=check)
    checker.start()
    try:
        for _ in range(20):
            with Ledger(tmp_path).lock(timeout_s=20):
                acquired += 1
    finally:
        done.set()
        checker.join()
    assert acquired == 20


def test_lock_of_a_killed_process_is_free_again(no_flock, tmp_path):
    code = no_flock + HOLD.format(path=sys.path, folder=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    assert Ledger(tmp_path).is_locked()
    with pytest.raises(BusyError), Ledger(tmp_path).lock(timeout_s=0):
        pass
    holder.kill()
    holder.communicate()
    with Ledger(tmp_path).lock(timeout_s=20):
        assert Ledger(tmp_path).is_locked()
    assert not Ledger(tmp_path).is_locked()


def test_sbatch_that_outlives_its_command_keeps_the_lock(tmp_path):
    """Else `rerun` would submit what sbatch is about to submit."""
    inside = "import subprocess; subprocess.Popen(['sleep', '8'], close_fds=False)"
    hold = HOLD.replace("print(", f"exec({inside!r}); print(").format(path=sys.path, folder=str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    with pytest.raises(BusyError), Ledger(tmp_path).lock(timeout_s=0):
        pass
    with Ledger(tmp_path).lock(timeout_s=60):
        assert Ledger(tmp_path).is_locked()
    holder.stdin.close()


def test_sweep_without_a_lock_file_is_not_locked_and_none_is_made(tmp_path):
    assert not Ledger(tmp_path).is_locked()
    assert not list(tmp_path.iterdir())
