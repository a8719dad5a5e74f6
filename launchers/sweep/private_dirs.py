"""Whose a sweep directory is, and directories in which only the user can write, because their files are executed.

submitit hands a job over as a pickle, and whoever can replace that file, or the code beside it, runs code as the user.
The sweep of another user is data: it is read, and nothing in it is executed, used to connect to a machine, or written.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import try_twice
from inpaint_bench.core.schema import LEDGER, SWEEP

log = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
    """Raise UserError where the sweep is another user's; `consequence` says what that user has to do."""
    if owner := other_owner(folder):
        raise UserError(f"{folder}: this sweep, or a record in it, belongs to user {owner}; {consequence}")


def make_sweep(folder: Path) -> None:
    """Create a sweep directory in which nobody else can write, whatever umask and default ACLs say.

    One that exists loses the permission of others to write. Of missing parents, those that others can write into get
    the sticky bit: they stay shared, and users cannot rename each other's files there.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
        if path != folder and mode & _OTHERS_WRITE:
            path.chmod(mode | stat.S_ISVTX)
    status = folder.stat()
    # With the sticky bit others can add files, and replace none: /tmp stays as it is.
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & _OTHERS_WRITE:
        if folder not in missing:
            log.warning(f"{folder}: others could write there until now (mode {stat.S_IMODE(status.st_mode):04o})")
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    try:
        # Else what is created in it would be open to those whom the default ACL of a parent names.
        os.removexattr(folder, "system.posix_acl_default")
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise


def hide(folder: Path) -> None:
    """Let nobody else read a sweep directory and its records, nor what this process creates from now on."""
    folder.chmod(0o700)
    for path in folder.iterdir():
        if not path.is_symlink() and path.is_file():
            path.chmod(0o600)
    os.umask(0o077)


def umask(folder: Path) -> int:
    """Return the umask for files of a sweep: others never write, and read only where they can enter its directory."""
    return _OTHERS if not folder.stat().st_mode & _OTHERS else _OTHERS_WRITE


@contextmanager
def restricted_umask(folder: Path) -> Iterator[None]:
    """Create files for a sweep in the block with its umask, or a stricter one of the user."""
    before = os.umask(_OTHERS)
    os.umask(before | umask(folder))
    try:
        yield
    finally:
        os.umask(before)


def who_can_replace(folder: Path) -> str | None:
    """Return a sentence on who can put another directory in place of this one; None if nobody can, as far as is known.

    Permissions of file systems that do not show them as modes and owners are not seen.
    """
    for parent in folder.resolve().parents:
        status = parent.stat()
        owner = status.st_uid
        if owner not in (0, os.geteuid()):
            return f"{parent} belongs to user {owner}, who can replace what is in it"
        if status.st_mode & stat.S_ISVTX or not status.st_mode & _OTHERS_WRITE:
            continue
        mode = f"{parent} has mode {stat.S_IMODE(status.st_mode):04o}"
        if status.st_mode & stat.S_IWOTH:
            return f"{mode}: every user of this machine can replace what is in it"
        if not _is_private_group(status.st_gid):
            return f"{mode}: its group can replace what is in it"
    return None


def _is_private_group(gid: int) -> bool:
    """Return whether a group has the user as its only member, by the custom that it then has the user's name."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def make(folder: Path) -> Path:
    """Create `folder` and its parent with mode 0700. Raises UserError where one exists that others can enter."""
    for directory in (folder.parent, folder):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Raise UserError unless `folder` and its parent are directories, no links, that only the user can enter."""
    # The parent too: who can write there can put another folder in place of this one.
    for directory in (folder.parent, folder):
        try:
            # lstat, because the target of a link can change after this check.
            status = directory.lstat()
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise UserError(f"{directory}: must be a directory and no link; jobs are loaded from it")
        if status.st_uid != os.geteuid():
            raise UserError(f"{directory}: belongs to user {status.st_uid} and not to you; jobs are loaded from it")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise UserError(
                f"{directory}: mode {mode:04o} lets others in, and jobs are loaded from it; check what lies there, "
                "then `chmod 700` it"
            )
