"""The final status of a run on a full disk."""

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


def start(run_dir: Path) -> ManifestFile:
    return ManifestFile.start(run_dir, bench(), compose(), [])


def test_final_status_is_written_on_a_full_disk_and_the_reserve_removed(run_dir: Path) -> None:
    manifest = start(run_dir)
    ballast = run_dir / "ballast"
    ballast.write_bytes(b"0" * shutil.disk_usage(run_dir).free)
    with pytest.raises(OSError, match="No space left"):
        manifest.update(batch=3)
    manifest.finish(Status.FAILED, Reason.APP_ERROR, "OSError: [Errno 28] No space left on device")
    left = read_json(run_dir / "manifest.json")
    assert (left["status"], left["reason"]) == ("failed", "app_error")
    assert "No space left" in left["message"]
    assert sorted(file.name for file in run_dir.iterdir()) == ["ballast", "manifest.json"]


def test_reserve_is_removed_at_the_end(run_dir: Path) -> None:
    manifest = start(run_dir)
    assert {file.name for file in run_dir.iterdir()} == {"manifest.json", ".reserve"}
    manifest.finish(Status.COMPLETED)
    assert [file.name for file in run_dir.iterdir()] == ["manifest.json"]
