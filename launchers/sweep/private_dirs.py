"""Folders whose pickles are executed when they are loaded: ours alone, where they are written and where they are read.

submitit hands a job over as a pickle, and whoever can replace that file runs code as us.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from inpaint_bench.core.errors import UserError


def make(folder: Path) -> Path:
    """`folder` and the folder around it, of mode 0700. Raises UserError where one is there and is not ours alone."""
    for one in (folder.parent, folder):
        one.mkdir(parents=True, exist_ok=True, mode=0o700)
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Raises UserError unless `folder` and the folder around it are real ones that nobody else can enter."""
    for one in (folder.parent, folder):
        try:
            found = one.lstat()
        except OSError as error:
            raise UserError(f"{one}: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode):
            raise UserError(f"{one}: must be a folder and no link; jobs are loaded from it")
        if found.st_uid != os.geteuid():
            raise UserError(f"{one}: belongs to user {found.st_uid} and not to you; jobs are loaded from it")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise UserError(
                f"{one}: mode {mode:04o} lets others in, and jobs are loaded from it; see what lies there, "
                "then `chmod 700` it"
            )
