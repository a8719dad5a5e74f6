"""One submitter at a time from a sweep directory, which several machines may share.

`flock` where the file system has it: the kernel lets go of it when its holder dies. Elsewhere a symbolic link that only
one can make, and that names its maker: one of this machine that is gone is passed over; of one of another machine only
a person can say so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inpaint_bench.core.errors import UserError

LOOK_S = 0.2  # between two looks at the lock
GLANCE_S = 1.0  # who only looks whether somebody holds it is in the way for less
BUSY = "is submitting from this sweep or running its points"
NAME = ".lock"
MAKER = ".lock.maker"

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class BusyError(UserError):
    """Another command holds the sweep's lock."""


@contextmanager
def held(folder: Path, *, patience_s: float = GLANCE_S) -> Iterator[None]:
    """Raises BusyError when the time is over and another command still holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    with (folder / NAME).open("w") as handle:
        while (got := _flock(handle.fileno(), fcntl.LOCK_EX)) is False:
            _wait(folder, end)
        if got:
            yield
            return
    while not _make(folder / MAKER):
        _wait(folder, end)
    try:
        yield
    finally:
        (folder / MAKER).unlink(missing_ok=True)


def busy(folder: Path) -> bool:
    """Somebody holds it, as far as one may see."""
    try:
        with (folder / NAME).open("r") as handle:
            got = _flock(handle.fileno(), fcntl.LOCK_SH)
    except OSError:  # nobody ever held it, or it is a sweep that one may only read
        return False
    if got is not None:
        return not got
    maker = _maker(folder / MAKER)
    return maker is not None and not _gone(maker)


def _flock(handle: int, how: int) -> bool | None:
    """None where this file system knows no locks."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _wait(folder: Path, end: float) -> None:
    if time.monotonic() < end:
        time.sleep(LOOK_S)
        return
    maker = _maker(folder / MAKER)
    if maker is None or _host(maker) == socket.gethostname():
        raise BusyError(f"{folder}: another command {BUSY} here; wait for it")
    raise BusyError(
        f"{folder}: another command {BUSY} on {_host(maker)}; wait for it, or remove {folder / MAKER} if it is gone"
    )


def _make(link: Path) -> bool:
    """Whether we are the one now."""
    me = f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"
    with suppress(FileExistsError):
        link.symlink_to(me)
        return True
    maker = _maker(link)
    if maker is None or not _gone(maker):
        return False
    aside = link.with_name(f"{link.name}.{os.getpid()}")
    with suppress(FileNotFoundError):  # another was quicker to put the dead one aside
        link.rename(aside)
        if str(aside.readlink()) != maker:  # no dead one any more: back with it
            aside.rename(link)
            return False
        aside.unlink()
    return _make(link)


def _maker(link: Path) -> str | None:
    try:
        return str(link.readlink())
    except OSError:
        return None


def _host(maker: str) -> str:
    return maker.partition(":")[0]


def _gone(maker: str) -> bool:
    """A process of this machine that does not run any more; of another machine nobody knows."""
    host, pid, started = [*maker.split(":"), "", ""][:3]
    return host == socket.gethostname() and pid.isdigit() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Clock ticks from boot to its start, which tells it from a later process of that id; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
