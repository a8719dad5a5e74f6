"""One submitter at a time from a sweep directory, which several machines may share."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from filelock import SoftFileLock, Timeout

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import open_plain

from . import private_dirs

TIMEOUT_S = 1.0  # longer than `is_locked` can be in the way
POLL_S = 0.2
BUSY = "is submitting from this sweep or running its points"
LOCK = ".lock"
SOFT_LOCK = ".lock.owner"

_FLOCK_MISSING = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class BusyError(UserError):
    """Another command holds the sweep's lock."""


@contextmanager
def sweep_lock(folder: Path, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Hold the sweep's lock. Raises BusyError if another command still holds it after `timeout_s`.

    A child process that inherits descriptors (sbatch) keeps the lock when this process is killed: until it has ended,
    nobody knows what it submits. Raises UserError for a folder that `private_dirs.check` refuses.
    """
    private_dirs.make(folder.resolve())
    try:
        # Without the file `_shared_flock` could not find out whether the file system has flock.
        handle = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT, mode=0o644)
    except OSError as error:
        raise UserError(f"{folder / LOCK}: {error.strerror}, so the sweep cannot be locked") from None
    with ExitStack() as stack:
        stack.callback(os.close, handle)  # and no unlock, which would also take it from a child
        if _shared_flock(folder) is None:
            stack.enter_context(_existence_lock(folder, timeout_s))
        else:
            _wait_for_flock(handle, folder, timeout_s)
        yield


def _wait_for_flock(handle: int, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BusyError(f"{folder}: another command {BUSY}; wait for it") from None
            time.sleep(POLL_S)
        else:
            os.set_inheritable(handle, True)
            return


def _existence_lock(folder: Path, timeout_s: float) -> AbstractContextManager[object]:
    """Take the lock of a file system without flock."""
    try:
        # It outlives a holder that is killed; filelock removes it only on the holder's own host.
        return SoftFileLock(folder / SOFT_LOCK).acquire(timeout=timeout_s, poll_interval=POLL_S)
    except Timeout:
        advice = f"wait for it, or remove {folder / SOFT_LOCK} if no command is running on any machine"
        raise BusyError(f"{folder}: another command {BUSY}; {advice}") from None


def is_locked(folder: Path) -> bool:
    """Return whether a command holds the sweep's lock. False also for a sweep that this user may only read."""
    free = _shared_flock(folder)
    if free is None:
        # Whether this lock is free can only be found out by taking it for a moment.
        try:
            with SoftFileLock(folder / SOFT_LOCK, timeout=0):
                free = True
        except Timeout:
            free = False
    return not free


def _shared_flock(folder: Path) -> bool | None:
    """Try a shared lock for a moment: False if a command holds the lock, None if the file system has no flock."""
    try:
        with os.fdopen(open_plain(folder / LOCK)) as handle:
            # Shared, so that two commands that only ask do not take each other for the holder.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _FLOCK_MISSING:
            return None
    return True  # free, never locked, or not readable
