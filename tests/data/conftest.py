"""A small prepared dataset, and a disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def facades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of 60 facades of 32 px in every format; tests must not change it."""
    from .support import prepared  # loads torch, which `make quick` does without

    return prepared(tmp_path_factory.mktemp("facades") / "set", "data.num_images=60")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a tmpfs of so many kilobytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def mount(kilobytes: int) -> Path:
        nonlocal mounted
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place], capture_output=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
        mounted = True
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", place], check=True)
