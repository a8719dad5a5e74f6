"""A copy of a dataset's files on the node's own disk or in its memory.

What is promised: a copy appears whole or not at all; processes of one user on one node share it (the second
waits for the first and copies nothing); the last one that closes it removes it. A process that is killed leaves
the copy behind, whole, for the next run, which removes it when it ends; batch systems clear the rest.

The copy lies below $TMPDIR (/tmp without it) or /dev/shm. Memory there counts against the job's own limit,
which the check of free space does not see.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.errors import UserError

from . import layout
from .layout import Entry
from .lock import Lock

SHARED_MEMORY = Path("/dev/shm")
COPIERS = 8


@dataclass(frozen=True, kw_only=True)
class Facts:
    """How staging went, for the run's manifest."""

    where: str
    path: str
    bytes: int  # of the dataset's files
    copied: bool  # False: another process had done it
    stage_s: float

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.bytes, "copied": self.copied, "stage_s": self.stage_s}


class Staged:
    """The copy at `root`, held until `close` (or the end of the process that made this object)."""

    def __init__(self, root: Path, facts: Facts, lock: Lock) -> None:
        self.root, self.facts = root, facts
        self.close = weakref.finalize(self, _let_go, root, lock, os.getpid())


def stage(source: Path, entries: list[Entry], where: str) -> Staged:
    """Copy `entries` of the dataset at `source` to `where` (tmp or shm), unless they are there.

    Raises UserError where they do not fit.
    """
    began = time.monotonic()
    content = json.dumps([one.as_dict() for one in entries]).encode()
    base = _base(where)
    target = base / hashlib.sha256(content).hexdigest()[:16]
    lock = Lock(base / f"{target.name}.lock")
    copied = False
    # Changing from one kind of holding to the other lets go in between: look again each time.
    while not (lock.take(shared=True) and _is_whole(target, entries)):
        lock.take()
        if _is_whole(target, entries):
            continue
        try:
            _copy(source, entries, target, where)
        except BaseException:
            lock.release(remove=True)
            raise
        copied = True
    facts = Facts(
        where=where,
        path=str(target),
        bytes=sum(one.bytes for one in entries),
        copied=copied,
        stage_s=round(time.monotonic() - began, 3),
    )
    return Staged(target, facts, lock)


def _base(where: str) -> Path:
    parent = SHARED_MEMORY if where == "shm" else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise UserError(f"recipe.stage_to={where}: this machine has no {parent}")
    base = parent / f"inpaint_bench-{os.getuid()}"
    try:
        base.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"recipe.stage_to={where}: {base} cannot be made ({error.strerror})") from None
    if base.stat().st_uid != os.getuid():
        raise UserError(f"recipe.stage_to={where}: {base} belongs to someone else")
    return base


def _is_whole(target: Path, entries: list[Entry]) -> bool:
    try:
        layout.check_sizes(target, entries)
    except UserError:
        return False
    return True


def _copy(source: Path, entries: list[Entry], target: Path, where: str) -> None:
    partial = target.with_name(f"{target.name}.partial")
    for left_over in (partial, target):
        shutil.rmtree(left_over, ignore_errors=True)
    need, free = sum(one.bytes for one in entries), shutil.disk_usage(target.parent).free
    if need > free:
        raise _does_not_fit(where, target.parent, need, free)
    try:
        for folder in sorted({(partial / one.path).parent for one in entries}):
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(COPIERS, thread_name_prefix="stage") as pool:
            copies = [pool.submit(shutil.copyfile, source / one.path, partial / one.path) for one in entries]
            for copy in copies:
                copy.result()
        layout.check_sizes(partial, entries)
        partial.rename(target)
    except OSError as error:
        raise _does_not_fit(where, target.parent, need, free, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _does_not_fit(where: str, base: Path, need: int, free: int, error: OSError | None = None) -> UserError:
    why = f" ({error})" if error else ""
    return UserError(
        f"recipe.stage_to={where}: the data needs {need / 1e6:,.1f} MB on {base}, {free / 1e6:,.1f} MB are free{why}"
    )


def _let_go(target: Path, lock: Lock, owner: int) -> None:
    """Remove the copy unless others hold it. In a forked process: nothing, the copy is its parent's."""
    if os.getpid() != owner:
        return
    if lock.take(wait=False):
        shutil.rmtree(target, ignore_errors=True)
        lock.release(remove=True)
    else:
        lock.release()
