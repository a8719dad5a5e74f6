"""Whose a sweep directory is, and directories in which only the user can write.

The sweep of another user is data: it is read, and nothing in it is executed, used to connect to a machine, or written.
"""

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import try_twice
from inpaint_bench.core.schema import LEDGER, SWEEP

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def other_owner(folder: Path) -> str | None:
    """Return the user whose sweep this is; None if the directory and both of its records are the caller's own.

    root has no sweeps but its own either: what a user's record names would run as root.
    """
    # stat: the path may lead through a link of the caller's own. lstat: a link among the records is as good as a file.
    owners = [try_twice(folder.stat).st_uid]
    for name in (SWEEP, LEDGER):
        with suppress(FileNotFoundError):
            owners.append(try_twice((folder / name).lstat).st_uid)
    others = [uid for uid in owners if uid != os.geteuid()]
    if not others:
        return None
    try:
        return pwd.getpwuid(others[0]).pw_name
    except KeyError:
        return str(others[0])


def check_own(folder: Path, consequence: str) -> None:
    """Raise UserError if the sweep is another user's; `consequence` says what that user has to do."""
    if owner := other_owner(folder):
        raise UserError(f"{folder}: this sweep, or a record in it, belongs to user {owner}; {consequence}")


def make(folder: Path) -> Path:
    """Create a folder that only the user can enter. Raises UserError for one that `check` refuses."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check(folder)
    return folder


def check(folder: Path, forbidden: int = _OTHERS_WRITE) -> None:
    """Raise UserError unless a folder is the user's own and no link, and its mode has none of the `forbidden` bits."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{folder}: must be a directory and no link; jobs run what lies there")
    if status.st_uid != os.geteuid():
        raise UserError(f"{folder}: belongs to user {status.st_uid} and not to you; jobs run what lies there")
    if status.st_mode & forbidden:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise UserError(f"{folder}: {mode} lets others in; check what lies there, then `chmod 700` it")
