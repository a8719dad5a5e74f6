"""Whose sweep a directory is. That of another user is data: it is read, and nothing in it is executed, used to connect
to a machine, or written.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import LEDGER, SWEEP


def other_owner(folder: Path) -> str | None:
    """Return the user whose sweep this is; None if the directory and both of its records are the caller's own.

    root has no sweeps but its own either: what a user's record names would run as root.
    """
    # stat: the path may lead through a link of the caller's own. lstat: a link among the records is as good as a file.
    owners = [folder.stat().st_uid]
    for name in (SWEEP, LEDGER):
        try:
            owners.append((folder / name).lstat().st_uid)
        except FileNotFoundError:
            continue
    others = [uid for uid in owners if uid != os.geteuid()]
    return _name(others[0]) if others else None


def check_own(folder: Path, consequence: str) -> None:
    """Raise UserError where the sweep is another user's; `consequence` says what that user has to do."""
    if owner := other_owner(folder):
        raise UserError(f"{folder}: this sweep, or a record in it, belongs to user {owner}; {consequence}")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
