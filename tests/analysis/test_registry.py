"""Publishing into a folder of datasets, and pulling from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from analysis import merge, registry
from analysis.registry import Registry
from analysis.report import report
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError

from .build import write_run

OLD = {"driver": "570.172.08"}


def dataset(folder: Path, run_id: str, **changes: Any) -> Path:
    write_run(folder / f"runs-{run_id}", run_id, **changes)
    merge.merge([folder / f"runs-{run_id}"], folder / run_id)
    return folder / run_id


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_pull_keeps_what_is_whole_and_comparable_and_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    for run_id, changes in {"good": {}, "damaged": {}, "driver": {"environment": OLD}, "older": {}}.items():
        assert app.main(["publish", str(dataset(tmp_path, run_id, **changes)), "--to", str(shared)]) == 0
    flip(next((shared / "damaged").glob("steps/*/*/*/*.parquet")))
    with (shared / "damaged" / "runs.parquet").open("ab") as runs:
        runs.write(b"x")
    shutil.copytree(shared / "good", shared / "foreign")
    metadata = shared / "older" / "dataset.json"
    metadata.write_text(metadata.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    assert app.main(["pull", str(shared), "-o", str(local)]) == 1
    printed = capsys.readouterr()
    assert f"pulled: {local / 'good'}" in printed.out
    assert "left out [foreign]: foreign: is not in index.json: `publish` did not write it" in printed.err
    assert "left out [foreign]: older: schema version 1; this code reads version 2" in printed.err
    assert (
        "left out [damaged]: damaged: runs.parquet was edited, steps/site=grace/gpu=a40/run=damaged/part-"
        in printed.err
    )
    assert "left out [not comparable]: driver: a40 at grace" in printed.err
    assert [path.name for path in local.iterdir()] == ["good"]
    reports, _ = report.write_index(local, tmp_path / "page", formats=())
    assert [each.dataset.folder.name for each in reports] == ["good"]

    states = {name: outcome for name, outcome, _ in Registry(str(shared)).pull(local, ["driver"])}
    assert (states["good"], states["driver"]) == ("unchanged", "pulled")


def test_publishing_again_changes_nothing_and_repairs_the_index(tmp_path: Path) -> None:
    source, shared = dataset(tmp_path, "r-01"), tmp_path / "shared"
    assert Registry(str(shared)).publish(source)
    before = {path: path.stat().st_mtime_ns for path in shared.rglob("*")}
    assert not Registry(str(shared)).publish(source)
    assert {path: path.stat().st_mtime_ns for path in shared.rglob("*")} == before
    (shared / registry.INDEX).unlink()  # as if another machine had written it at the same time
    assert Registry(str(shared)).publish(source)
    assert list(json.loads((shared / registry.INDEX).read_text())) == ["r-01"]


def test_a_name_stands_for_one_dataset(tmp_path: Path) -> None:
    shared = Registry(str(tmp_path / "shared"))
    shared.publish(dataset(tmp_path, "r-01"), "mine")
    with pytest.raises(UserError, match="is another dataset; give this one another name"):
        shared.publish(dataset(tmp_path, "r-02"), "mine")
    (tmp_path / "shared" / "theirs").mkdir()
    with pytest.raises(UserError, match="holds something else or half a dataset"):
        shared.publish(tmp_path / "r-02", "theirs")
    with pytest.raises(UserError, match="needs a name of letters"):
        shared.publish(tmp_path / "r-02", "../r-02")
    (tmp_path / "local" / "mine").mkdir(parents=True)
    (reason,) = (reason for name, _, reason in shared.pull(tmp_path / "local") if name == "mine")
    assert "holds something else; move it away" in reason


def test_a_changed_or_unsealed_dataset_is_not_published(tmp_path: Path) -> None:
    source, shared = dataset(tmp_path, "r-01"), Registry(str(tmp_path / "shared"))
    metadata = json.loads((source / "dataset.json").read_text())
    (source / "dataset.json").write_text(json.dumps({**metadata, "runs": 2}))
    with pytest.raises(UserError, match="was changed after its merge"):
        shared.publish(source)
    (source / "dataset.json").write_text(json.dumps({k: v for k, v in metadata.items() if k != "seal"}))
    with pytest.raises(UserError, match="did not seal it"):
        shared.publish(source)
    assert not (tmp_path / "shared").exists()


def test_an_address_of_fsspec_is_a_registry_too(tmp_path: Path) -> None:
    shared = Registry("memory://lab/results")
    shared.publish(dataset(tmp_path, "r-01"))
    assert [outcome for _, outcome, _ in shared.pull(tmp_path / "local")] == ["pulled"]
    fsspec.filesystem("memory").rm("/lab", recursive=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "nosuch://x", "-o", "out"], "nosuch://x: cannot be opened (Protocol not known: nosuch)"),
        (["pull", "nowhere", "-o", "out"], "nowhere does not exist"),
        (["pull", "empty", "-o", "out"], "empty holds no dataset"),
        (["pull", "empty", "-o", "out", "--allow-mixed", "x"], "--allow-mixed x: not one of"),
        (["publish", "empty", "--to", "out"], "empty is not a merged dataset"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert app.main(arguments) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1


def test_a_killed_publication_leaves_nothing_that_a_reader_takes(tmp_path: Path) -> None:
    """dataset.json is written last: the process is killed as it is about to be."""
    source, shared = dataset(tmp_path, "r-01"), tmp_path / "shared"
    code = (
        "import os, sys; from pathlib import Path; from analysis.registry import Registry\n"
        "Registry._replace = lambda *_: os.kill(os.getpid(), 9)\n"
        f"Registry({str(shared)!r}).publish(Path({str(source)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    assert done.returncode == -signal.SIGKILL
    assert (shared / "r-01" / "runs.parquet").exists()
    assert [outcome for _, outcome, _ in Registry(str(shared)).pull(tmp_path / "local")] == ["foreign"]
    with pytest.raises(UserError, match="holds something else or half a dataset; remove it"):
        Registry(str(shared)).publish(source)
