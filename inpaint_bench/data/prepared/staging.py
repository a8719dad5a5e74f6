"""Copies of a dataset on the node's local disk or in its memory.

A copy appears complete or not at all. Processes of one user on one node share it: the second one waits for the copy
and copies nothing, and the last one that closes it removes it. A killed process leaves its copy for the next run, which
removes it when it ends; batch systems clear the rest.

The copy lies below $TMPDIR (/tmp without it) or /dev/shm. Memory there counts against the job's own limit, which the
check of free space does not see.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from inpaint_bench.core.errors import UserError

from . import layout
from .layout import Entry

SHARED_MEMORY = Path("/dev/shm")
COPY_THREADS = 8
CLOSE_TIMEOUT_S = 10.0


class StagedDataset:
    """The copy at `root`, in use until `close` or the end of the process that made this object."""

    def __init__(self, root: Path, facts: dict[str, Any], users_fd: int) -> None:
        self.root = root
        self.facts = facts  # for the run's manifest
        self.close = weakref.finalize(self, _stop_using, root, users_fd, os.getpid())


def stage(source: Path, entries: Sequence[Entry], where: str) -> StagedDataset:
    """Copy `entries` of the dataset at `source` to tmp or shm, unless they are there. Raises UserError for no space."""
    start = time.monotonic()
    base = _user_folder(where)
    # Named by a hash of its entries: another dataset, or another format of this one, is another copy.
    target = base / hashlib.sha256(msgspec.json.encode(entries)).hexdigest()[:16]
    # Two locks: this one is held only while the copy is made or removed, the shared one on the copy's folder for as
    # long as the copy is in use. With one lock for both, a process could wait for the end of another's training.
    with FileLock(_lock_path(target)):
        copied = bool(layout.find_damaged(target, entries))  # or missing
        if copied:
            _copy(source, entries, target, where)
        users_fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(users_fd, fcntl.LOCK_SH)
    facts = {
        "effective": where,
        "path": str(target),
        "bytes": sum(entry.bytes for entry in entries),
        "copied": copied,  # False: another process had done it
        "stage_s": round(time.monotonic() - start, 3),
    }
    return StagedDataset(target, facts, users_fd)


def _stop_using(target: Path, users_fd: int, owner_pid: int) -> None:
    """Remove the copy unless other processes use it. Do nothing in a forked process: its parent owns the copy."""
    if os.getpid() != owner_pid:
        return
    # Not without a timeout: the garbage collector may call this inside `stage`, which then holds the lock itself.
    with suppress(BlockingIOError, Timeout), FileLock(_lock_path(target), timeout=CLOSE_TIMEOUT_S):
        # Fails while another process holds its shared lock: then the last of them removes the copy.
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(target, ignore_errors=True)
    os.close(users_fd)


def _lock_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")  # empty, and never removed: others may be waiting for it


def _user_folder(where: str) -> Path:
    parent = SHARED_MEMORY if where == "shm" else Path(tempfile.gettempdir())
    if not parent.is_dir():
        raise UserError(f"recipe.stage_to={where}: this machine has no {parent}")
    folder = parent / f"inpaint_bench-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"recipe.stage_to={where}: {folder} cannot be made ({error.strerror})") from None
    # /tmp and /dev/shm are writable for all users: another user may have created this folder first.
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"recipe.stage_to={where}: {folder} belongs to another user")
    return folder


def _copy(source: Path, entries: Sequence[Entry], target: Path, where: str) -> None:
    partial = target.with_name(f"{target.name}.partial")
    for remains in (partial, target):  # left by a killed process
        shutil.rmtree(remains, ignore_errors=True)
    needed, free = sum(entry.bytes for entry in entries), shutil.disk_usage(target.parent).free
    size = f"the data needs {needed / 1e6:,.1f} MB on {target.parent}, {free / 1e6:,.1f} MB are free"
    if needed > free:
        raise UserError(f"recipe.stage_to={where}: {size}")
    try:
        for folder in {(partial / entry.path).parent for entry in entries}:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="stage") as pool:
            copies = [pool.submit(shutil.copyfile, source / entry.path, partial / entry.path) for entry in entries]
            for copy in copies:
                copy.result()
        layout.check_sizes(partial, entries)
        # The name appears only now, when all files are complete.
        partial.rename(target)
    except OSError as error:
        raise UserError(f"recipe.stage_to={where}: {size} ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
