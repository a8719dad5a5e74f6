"""A file system that is soon full."""

from __future__ import annotations

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
