"""Directories that only the user can enter, because their files are executed.

submitit hands a job over as a pickle, and whoever can replace that file runs code as the user.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from inpaint_bench.core.errors import UserError


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
