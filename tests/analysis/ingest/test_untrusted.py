"""One bad run directory beside two sound ones: it is left out with the reason, and nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.dataset import Dataset, open_dataset
from analysis.ingest import parts, run_dir
from analysis.metrics import run_row
from analysis.metrics.facts import Facts
from inpaint_bench.core import schema
from inpaint_bench.core.errors import UserError

from .. import real_run
from ..build import rewrite_json

pytestmark = pytest.mark.slow

SOUND, BAD = ("r-first", "r-second"), "r-bad"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    for index, run_id in enumerate((*SOUND, BAD)):
        real_run.write_run(folder / run_id, run_id, index)
    return folder


@pytest.fixture
def bad(originals: Path, tmp_path: Path) -> Path:
    """Return the run directory to spoil, between two sound ones in the order of the merge."""
    for place, run_id in (("a", SOUND[0]), ("b", BAD), ("c", SOUND[1])):
        shutil.copytree(originals / run_id, tmp_path / "in" / place)
    return tmp_path / "in" / "b"


def merged(tmp_path: Path, *roots: Path) -> Dataset:
    merge.merge(list(roots) or [tmp_path / "in"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds")


def figures(dataset: Dataset, run_id: str) -> dict[str, Any]:
    return dataset.runs.filter(pl.col("run_id") == run_id).row(0, named=True)


@pytest.fixture(scope="module")
def expected(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    dataset = merged(tmp_path_factory.mktemp("expected"), originals)
    return {run_id: figures(dataset, run_id) for run_id in SOUND}


@pytest.fixture
def check(tmp_path: Path, expected: dict[str, dict[str, Any]]) -> Callable[..., str]:
    """Return a function that merges, and returns code and reason for which the bad run is left out."""

    def run(*, code: str) -> str:
        dataset = merged(tmp_path)
        assert sorted(dataset.runs["run_id"]) == sorted(SOUND)
        for run_id, before in expected.items():
            assert figures(dataset, run_id) | {"run_dir": before["run_dir"]} == before
        skips = dataset.skipped.filter(pl.col("path").str.contains("/in/b", literal=True))
        assert code in skips["code"].to_list(), skips.to_dicts()
        return "\n".join(skips.filter(pl.col("code") == code)["reason"])

    return run


def change(field: str, value: Any) -> Callable[[Any], Any]:
    """Return a change of one value of a record, named by its place."""

    def apply(record: Any) -> Any:
        holder, keys = record, field.split(".")
        for key in keys[:-1]:
            holder = holder[int(key) if key.isdigit() else key]
        holder[keys[-1]] = value
        return record

    return apply


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("started_unix_ns", "today", "Expected `int | null`, got `str` - at `$.started_unix_ns`"),
        ("run_id", "r" * 300, "run_id takes 300 characters as a folder name"),
        ("gpu", "\u00e9" * 100, "gpu takes 602 characters as a folder name"),
    ],
)
def test_manifest_with_a_value_that_nothing_can_hold(
    bad: Path, check: Callable[..., str], field: str, value: Any, message: str
) -> None:
    rewrite_json(bad, schema.MANIFEST, change(field, value))
    assert message in check(code="manifest_damaged")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"run_id": "r-bad", "batch": NaN}', "JSON is malformed"),
        (b'\xff\xfe{"run_id": "r-bad"}', "JSON is malformed"),
        (b"", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"schema_version": %d, "status": "running"}' % schema.SCHEMA_VERSION, "missing required field `run_id`"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_manifest_that_is_no_record(bad: Path, check: Callable[..., str], content: bytes, message: str) -> None:
    (bad / schema.MANIFEST).write_bytes(content)
    assert message in check(code="manifest_damaged")


def place_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def place_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def place_link(target: str) -> Callable[[Path], None]:
    def place(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return place


def grow(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 * 2**30)


PLACED = {
    "pipe": (place_pipe, "is not a plain file"),
    "folder": (place_folder, "Is a directory"),
    "device": (place_link("/dev/zero"), "is a link, which is not followed"),
    "8 GiB": (grow, "so it is not read"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PLACED)
def test_manifest_that_is_no_plain_file(bad: Path, check: Callable[..., str], kind: str) -> None:
    place, message = PLACED[kind]
    place(bad / schema.MANIFEST)
    assert message in check(code="manifest_damaged")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.parametrize(
    "name",
    [
        schema.WINDOWS,
        schema.TELEMETRY,
        "steps/part-000001.parquet",
        "steps/part-000007.parquet",
        "events/.journal.arrows",
    ],
)
def test_other_file_that_is_no_plain_file_is_listed(tmp_path: Path, bad: Path, name: str, kind: str) -> None:
    place, message = PLACED[kind]
    place(bad / name)
    dataset = merged(tmp_path)
    assert set(SOUND) <= set(dataset.runs["run_id"])
    skip = dataset.skipped.filter(pl.col("path") == str(bad / name)).row(0, named=True)
    assert (skip["code"], skip["run_id"]) == ("unreadable", BAD)
    assert message in skip["reason"]


def test_folder_of_parts_that_is_a_link_or_a_file_is_listed(tmp_path: Path, bad: Path, originals: Path) -> None:
    shutil.rmtree(bad / "samples_gpm")
    (bad / "samples_gpm").symlink_to(originals / SOUND[0] / "samples_gpm")
    shutil.rmtree(bad / "events")
    (bad / "events").write_text("x")
    skipped = merged(tmp_path).skipped
    reasons = dict(zip(skipped["path"], skipped["reason"], strict=True))
    assert "is a link, which is not followed" in reasons[str(bad / "samples_gpm")]
    assert "Not a directory" in reasons[str(bad / "events")]


@pytest.mark.parametrize(
    ("table", "column", "values", "message"),
    [
        ("samples_fast", "t_mono_ns", None, "rows without t_mono_ns"),
        ("samples_fast", "gpu_uuid", None, "rows without gpu_uuid"),
        ("samples_fast", "energy_mj", -1, "rows are not"),
        ("samples_fast", "power_instant_w", "text", "rows are not"),
        ("samples_slow", "tick_seq", float("nan"), "rows are not"),
        ("steps", "images", 2**40, "rows are not"),
        ("events", "detail", b"\xff\xfe", "rows are not"),
    ],
)
def test_part_with_values_of_another_type_is_listed(
    tmp_path: Path, bad: Path, table: str, column: str, values: Any, message: str
) -> None:
    part = sorted((bad / table).iterdir())[-1]
    rows = pq.read_table(part, partitioning=None)
    array = pa.array([values] * rows.num_rows, pa.string() if values is None and column == "gpu_uuid" else None)
    rows = rows.set_column(rows.schema.get_field_index(column), column, array)
    pq.write_table(rows, part)
    skip = merged(tmp_path).skipped.row(0, named=True)
    assert (skip["path"], skip["code"]) == (str(part), "damaged")
    assert message in skip["reason"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"text_online": "yes"}, "text_online is 'yes', which is no Boolean"),
        ({"flop_per_image": {}}, "flop_per_image is {}, which is no Float64"),
        ({"epochs": "many"}, "epochs is 'many', which is no Int64"),
    ],
)
def test_fact_that_its_column_cannot_hold(
    bad: Path, check: Callable[..., str], facts: dict[str, Any], message: str
) -> None:
    rewrite_json(
        bad, schema.MANIFEST, lambda manifest: manifest | {"workload_facts": manifest["workload_facts"] | facts}
    )
    assert message in check(code="figure")


def test_texts_of_records_hold_no_control_character(tmp_path: Path, bad: Path) -> None:
    hostile = "\x1b]0;title\x07\x1b[2J\u202egnp.exe\r\nb\u2028c"
    rewrite_json(bad, schema.MANIFEST, lambda manifest: manifest | {"recipe": hostile, "message": hostile})
    rewrite_json(bad, schema.WINDOWS, lambda windows: [window | {"reason": hostile} for window in windows])
    dataset = merged(tmp_path)
    row = figures(dataset, BAD)
    assert row["recipe"] == row["message"] == "?]0;title??[2J?gnp.exe b c"
    for frame in (dataset.runs, dataset.windows, dataset.skipped):
        for column in frame.select(pl.col(pl.String)):
            for text in column.drop_nulls().unique():
                assert parts.printable(text) == text


def test_names_of_files_that_are_not_text_are_escaped(tmp_path: Path, bad: Path) -> None:
    bad.rename(os.fsdecode(os.fsencode(bad.parent) + b"/b\xff\x1b[2J"))
    (bad.parent / "d").mkdir()
    (bad.parent / "d" / "steps").mkdir()
    Path(os.fsdecode(os.fsencode(bad.parent) + b"/d/steps/\xfe\x07.parquet")).touch()
    dataset = merged(tmp_path)
    assert figures(dataset, BAD)["run_dir"].endswith("/b\\xff?[2J")
    assert [path for path in dataset.skipped["path"] if path.endswith("\\xfe?.parquet")]
    assert merge.merge([tmp_path / "in"], tmp_path / "ds")["runs"] == 3


class TestSearch:
    """Stray files and folders beside run directories hide none of them."""

    @pytest.mark.parametrize("name", [schema.MANIFEST, schema.DATASET, schema.SWEEP, "steps", "events", schema.RUNS])
    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_stray_entry_of_a_known_name(self, tmp_path: Path, bad: Path, name: str, kind: str) -> None:
        path = tmp_path / "in" / name
        path.mkdir() if kind == "folder" else path.write_text("{}")
        (tmp_path / "in" / "code").mkdir()
        assert set(merged(tmp_path).runs["run_id"]) == {*SOUND, BAD}

    def test_run_directory_with_a_dataset_marker_is_a_run(self, tmp_path: Path, bad: Path) -> None:
        (bad / schema.DATASET).write_text("{}")
        (bad / schema.RUNS).write_text("")
        assert set(merged(tmp_path).runs["run_id"]) == {*SOUND, BAD}

    def test_run_inside_another_is_found(self, tmp_path: Path, bad: Path) -> None:
        bad.rename(bad.parent / "a" / "copy")
        assert set(merged(tmp_path).runs["run_id"]) == {*SOUND, BAD}

    def test_manifest_that_is_a_folder_is_listed(self, tmp_path: Path, bad: Path) -> None:
        shutil.rmtree(bad)
        (bad / schema.MANIFEST).mkdir(parents=True)
        skip = merged(tmp_path).skipped.row(0, named=True)
        assert (skip["path"], skip["code"]) == (str(bad / schema.MANIFEST), "manifest_damaged")

    def test_links_are_not_followed_and_listed(self, tmp_path: Path, bad: Path) -> None:
        bad.rename(tmp_path / "elsewhere")
        bad.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "in" / "loop").symlink_to("loop")
        (tmp_path / "in" / "up").symlink_to("..", target_is_directory=True)
        (tmp_path / "in" / "latest").symlink_to("a")  # searched under its own name
        dataset = merged(tmp_path)
        assert set(dataset.runs["run_id"]) == set(SOUND)
        skips = {Path(row["path"]).name: row["reason"] for row in dataset.skipped.to_dicts()}
        assert skips.keys() == {"b", "up"}
        assert "give its target as a root of its own" in skips["b"]

    def test_unreadable_folder_is_listed(
        self, tmp_path: Path, bad: Path, check: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scandir = os.scandir

        def refuse(path: Any) -> Any:
            if not isinstance(path, int) and Path(path) == bad:
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
        assert check(code="unreadable") == "folder cannot be searched for runs (Permission denied)"


class TestLastResort:
    def test_unforeseen_exception_leaves_out_one_run(
        self, tmp_path: Path, bad: Path, check: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summarise = run_row.summarise

        def fail(facts: Facts) -> Any:
            if facts.manifest.run_id == BAD:
                raise ZeroDivisionError("nobody thought of this")
            return summarise(facts)

        monkeypatch.setattr(run_row, "summarise", fail)
        assert check(code="internal") == "run left out: ZeroDivisionError: nobody thought of this"
        assert not list((tmp_path / "ds").rglob(f"run={BAD}"))

    def test_copy_takes_the_place_of_a_run_that_is_left_out(self, tmp_path: Path, bad: Path, originals: Path) -> None:
        rewrite_json(bad, schema.MANIFEST, change("workload_facts.flop_per_image", {}))
        shutil.copytree(originals / BAD, tmp_path / "in" / "d")
        dataset = merged(tmp_path)
        assert figures(dataset, BAD)["run_dir"].endswith("/in/d")
        assert dataset.skipped["code"].to_list() == ["figure"]

    def test_full_disk_is_not_the_fault_of_a_run(
        self, tmp_path: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(pq, "write_table", fail)
        with pytest.raises(UserError, match="No space left on device"):
            merged(tmp_path)
        assert not (tmp_path / "ds").exists()


def test_sample_image_is_read_only_from_its_run_directory(tmp_path: Path, bad: Path) -> None:
    for name, message in (
        ("../../../etc/passwd", "outside its run directory"),
        ("grid.png", "there is no such file"),
        ("pipe.png", "is not a plain file"),
        ("x" * 5_000, "cannot be read"),
    ):
        place_pipe(bad / "pipe.png")
        rewrite_json(bad, schema.MANIFEST, lambda manifest, name=name: manifest | {"quality": {"pictures": name}})
        run, skips = run_dir.read_run(run_dir.find_manifest(bad))
        assert run is not None
        assert run.sample_grid is None
        assert message in skips[0].reason
    assert json.loads((bad / schema.MANIFEST).read_text())["quality"]
