"""The last word of a run on a disk that took everything else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import Reason, Status
from inpaint_bench.run.manifest import ManifestFile

from .small_disk import small_disk_on
from .support import bench, compose


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """On a file system of 256 KiB."""
    mount = tmp_path / "disk"
    with small_disk_on(mount):
        yield mount


def begun(run_dir: Path) -> ManifestFile:
    return ManifestFile.start(run_dir, bench(), compose(), [])


def test_is_on_disk_with_its_reason_and_the_room_for_it_is_given_back(run_dir: Path) -> None:
    manifest = begun(run_dir)
    ballast = run_dir / "ballast"
    ballast.write_bytes(b"0" * shutil.disk_usage(run_dir).free)
    with pytest.raises(OSError, match="No space left"):
        manifest.update(batch=3)
    manifest.finish(Status.FAILED, Reason.APP_ERROR, "OSError: [Errno 28] No space left on device")
    left = read_json(run_dir / "manifest.json")
    assert (left["status"], left["reason"]) == ("failed", "app_error")
    assert "No space left" in left["message"]
    assert sorted(file.name for file in run_dir.iterdir()) == ["ballast", "manifest.json"]


def test_leaves_no_reserve_where_there_was_room_all_along(run_dir: Path) -> None:
    manifest = begun(run_dir)
    assert {file.name for file in run_dir.iterdir()} == {"manifest.json", ".reserve"}
    manifest.finish(Status.COMPLETED)
    assert [file.name for file in run_dir.iterdir()] == ["manifest.json"]
