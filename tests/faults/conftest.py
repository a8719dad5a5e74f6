"""Causes the faults of the matrix once, for all modules that check its results."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.bed import Bed

from .matrix import Matrix, cause_faults
from .support import ROOT


@pytest.fixture(scope="package")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a file system of 24 MiB: room for the code and some parts."""
    mount = tmp_path_factory.mktemp("disk")
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)]).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="package")
def matrix(testbed: Bed, tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield cause_faults(Matrix(folder, testbed), disk)
