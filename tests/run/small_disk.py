"""A file system that is soon full or takes no files, and folders that root may not write either."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_on(mount: Path, kib: int = 256, access: str = "rw") -> Iterator[None]:
    """A file system of this size on a folder that this makes."""
    mount.mkdir(parents=True)
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("needs root")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k,{access}", "tmpfs", str(mount)], check=False
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@contextmanager
def permissions_count() -> Iterator[None]:
    """Let permissions of files count for root too: take CAP_DAC_OVERRIDE from this thread (capset(2))."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: 32 capabilities, then the others
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~(1 << 1)
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0
