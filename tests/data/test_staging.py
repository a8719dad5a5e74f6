"""Staged copies: made once, shared between processes, complete or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inpaint_bench.core.errors import UserError
from inpaint_bench.data import prepared
from inpaint_bench.data.prepared_source import stage

from .support import FORMATS, open_prepared


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files of the node."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def copies(node: Path) -> list[Path]:
    """Return everything that staging left on the node, except the empty lock files."""
    return [path for path in node.glob("*/*") if path.suffix != ".lock" or path.stat().st_size]


def test_second_user_shares_the_copy_and_the_last_one_removes_it(facades: Path, node: Path) -> None:
    first, second = open_prepared(facades, "memmap", "tmp"), open_prepared(facades, "memmap", "tmp")
    assert (first.staging["copied"], second.staging["copied"]) == (True, False)
    assert first.staging["path"] == second.staging["path"]
    assert first.staging["bytes"] == (facades / "pixels.npy").stat().st_size
    assert first.staging["path"].startswith(str(node))
    first.close()
    assert np.array_equal(second.pixels(5), open_prepared(facades).pixels(5))
    second.close()
    second.close()
    assert not copies(node)


@pytest.mark.parametrize("format", FORMATS)
def test_images_are_read_from_the_copy(facades: Path, format: str) -> None:
    staged = open_prepared(facades, format, "tmp")
    assert staged.staging["effective"] == "tmp"
    assert np.array_equal(staged.pixels(9), open_prepared(facades).pixels(9))
    if format == "webdataset":
        assert all(str(path).startswith(staged.staging["path"]) for path in staged.shards(np.arange(len(staged))))
    staged.close()


def test_concurrent_processes_copy_once(facades: Path, node: Path) -> None:
    code = (
        "import sys; from tests.data.support import open_prepared; from pathlib import Path;"
        "source = open_prepared(Path(sys.argv[1]), 'files', 'tmp');"
        "print(source.staging['copied'], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(facades)]
    environment = {**os.environ, "TMPDIR": str(node)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    copied = [process.stdout.readline().strip() for process in processes if process.stdout]
    assert sorted(copied) == ["False", "True"]
    processes[0].kill()  # it cannot clean up; the other one does
    for process in processes:
        process.communicate(timeout=60)
    assert not copies(node)


def test_no_user_waits_for_the_end_of_another_one(facades: Path, node: Path) -> None:
    """Regression: with one lock for copying and for using, a process waited until another's training had ended.

    It had seen that there was no copy, and asked for the exclusive lock when the other one had already made the copy.
    """
    manifest = prepared.read_manifest(facades)
    assert manifest is not None
    entries = prepared.list_entries(manifest, "files")
    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            users = [pool.submit(stage, facades, entries, "tmp") for _ in range(8)]
            staged = [user.result(timeout=60) for user in users]
        assert sum(copy.facts["copied"] for copy in staged) == 1
        for copy in staged:
            copy.close()
        assert not copies(node)


def test_data_that_does_not_fit_is_refused_with_needed_and_free_space(
    facades: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk(100)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with pytest.raises(UserError, match=r"recipe\.stage_to=tmp: the data needs 0\.2 MB on .*, 0\.1 MB are free"):
        open_prepared(facades, "memmap", "tmp")
    assert not copies(disk)


def test_damaged_copy_of_a_killed_process_is_replaced(facades: Path) -> None:
    first = open_prepared(facades, "memmap", "tmp")
    root = Path(first.staging["path"])
    first.close()
    root.mkdir()
    (root / "pixels.npy").write_bytes(b"half")
    second = open_prepared(facades, "memmap", "tmp")
    assert (second.staging["copied"], Path(second.staging["path"])) == (True, root)
    assert np.array_equal(second.pixels(5), open_prepared(facades).pixels(5))
    second.close()
