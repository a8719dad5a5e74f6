"""What manifests record of levers, quality and resumption: in columns, on the page and in the merged dataset."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.dataset import open_dataset
from analysis.ingest import run_dir
from analysis.report import page
from analysis.report.figures import points
from analysis.report.tables import TableBuilder
from analysis.stats.cells import CELL_KEYS, build_cells
from tests.analysis.build import write_levers, write_quality, write_run
from tests.analysis.test_merge import merged

from .test_report import report_of
from .test_tables import frame

pytestmark = pytest.mark.slow

LEVERS = ["channels_last", "compile", "dali"]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any]:
    """Write the report of a ladder of three levers, the last of which is unavailable."""
    tmp_path = tmp_path_factory.mktemp("ladder")
    write_levers(tmp_path / "in", "ladder", LEVERS, repeats=2)
    return tmp_path, *report_of(tmp_path)


def row_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Merge one run with these changes and return its row."""
    write_run(tmp_path / "grace", "r-01", **changes)
    return merged(tmp_path).runs.row(0, named=True)


def test_fields_missing_from_an_older_manifest_are_null_with_a_reason(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    assert row["valid"]
    for name in ("study_name", "levers", "validation", "sample_grid", "resumed_from_step", "seed", "batch_requested"):
        assert row[name] is None, name
    reasons = dict(part.split("=", 1) for part in row["null_reasons"].split("; "))
    assert reasons["parity_loss_rel"] == reasons["compile_s"] == "not recorded"
    assert reasons["validation_last_loss"] == "no validation"


def test_a_study_point_records_its_requested_recipe(tmp_path: Path) -> None:
    study = {"name": "ladder", "base": "baseline", "levers": ["tf32", "cache_image+cache_masked"], "repeats": 3}
    overrides = ["recipe=[baseline]", "batch=8", "recipe=[baseline, tf32]"]
    facts = {"compile_s": 71.5, "setup_s": 8.0, "encodes_online": 0, "text_online": False, "cache": {"bytes": 5}}
    row = row_of(tmp_path, study=study, seed=0, overrides=overrides, workload_facts=facts)
    assert (row["study_name"], row["study_levers"]) == ("ladder", "tf32,cache_image+cache_masked")
    assert (row["recipe_parts"], row["seed"]) == ("baseline,tf32", 0)
    assert (row["compile_s"], row["encodes_online"], row["text_online"]) == (71.5, 0, False)
    assert json.loads(row["cache"]) == {"bytes": 5}


def test_unavailable_parity_is_null_with_the_reason(tmp_path: Path) -> None:
    row = row_of(tmp_path, parity={"unavailable": "the baseline does not fit beside it"})
    assert row["parity_unavailable"] == "the baseline does not fit beside it"
    assert "parity_update_rel=the baseline does not fit beside it" in row["null_reasons"]


def test_a_parity_error_out_of_tolerance_makes_a_run_invalid_with_the_values(tmp_path: Path) -> None:
    errors = {"prediction_rel": 0.25, "loss_rel": 0.02, "gradient_rel": None, "update_rel": None}
    row = row_of(tmp_path, parity={"reference": "baseline", **errors, "far": True, "not_finite": ["gradient_rel"]})
    assert row["parity_exceeded"] is True
    assert row["invalid_reason"] == (
        "does not compute what baseline does (relative errors: prediction 0.250, loss 0.0200, gradient not finite)"
    )


def test_a_parity_error_within_tolerance_is_none(tmp_path: Path) -> None:
    row = row_of(tmp_path, parity={"reference": "baseline", "prediction_rel": 0.01, "far": False})
    assert (row["parity_exceeded"], row["invalid_reason"]) == (False, None)


def test_tables_use_the_batch_size_found_by_search_and_say_so(tmp_path: Path) -> None:
    """As a worker writes it: the manifest has the batch found, its facts that a search was requested."""
    write_run(tmp_path / "in", "r-01", batch=40, workload_facts={"batch_requested": "auto"})
    write_run(tmp_path / "in", "r-02", batch=8, workload_facts={"batch_requested": 8})
    report_of(tmp_path)
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    assert "auto" not in " ".join(line for line in lines if line.startswith("| "))
    assert any("| 40 (searched) |" in line for line in lines if line.startswith("| r-01"))
    assert all("| 8 |" in line for line in lines if line.startswith("| r-02"))
    assert "| A40 | 40 | 1 | 1 | \u2013 | \u2013 | \u2013 | 1 |" in lines, (
        "the cells whose batch was searched for are listed"
    )
    cells = build_cells(open_dataset(tmp_path / "ds").runs)
    assert cells.select("batch", "batch_searched").rows() == [(8, 0), (40, 1)]


def test_the_batch_of_a_batch_search_is_its_result(tmp_path: Path) -> None:
    write_run(tmp_path / "grace", "r-01", batch=8)
    file = tmp_path / "grace" / "run-r-01" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["workload_facts"] |= {"batch": 8, "batch_requested": "auto"}
    file.write_text(json.dumps({**manifest, "batch": "auto"}))
    row = merged(tmp_path).runs.row(0, named=True)
    assert (row["valid"], row["batch"], row["batch_requested"]) == (True, 8, "auto")


def test_a_resumed_run_names_its_step_and_unused_checkpoints(tmp_path: Path) -> None:
    attempts = [{"checkpoint": "step-9", "reason": "checksum differs"}, {"step": 120, "checkpoint": "step-00000120"}]
    row = row_of(tmp_path, resumed=attempts)
    assert row["resumed_from_step"] == 120
    assert "resumed from step 120; windows cut by the interruption are left out" in row["warnings"]
    assert "checkpoint step-9 was not used: checksum differs" in row["warnings"]


def test_an_unavailable_run_is_not_listed_as_failed(ladder: tuple[Path, str, Any]) -> None:
    tmp_path, text, _ = ladder
    assert re.search(r"<dt>Unavailable</dt><dd>2</dd>", text)
    assert "Failed or unfinished" not in text
    assert "failed (unavailable)" not in text
    assert "unavailable on this machine" in text
    assert "dali needs nvidia-dali-cuda130" in text
    assert pl.read_parquet(tmp_path / "ds" / "skipped_files.parquet").is_empty()
    assert "| + dali | unavailable |" in (tmp_path / "out" / "report.md").read_text()


def test_sample_images_are_in_the_dataset_and_on_the_page(ladder: tuple[Path, str, Any]) -> None:
    tmp_path, text, page = ladder
    assert len(list((tmp_path / "ds" / "quality").glob("*.png"))) == 6
    assert len(page.loads) == 3  # one per recipe that ran
    assert all(link.startswith("data:image/png;base64,") for link in page.loads)
    assert "all 6 are in the dataset" in text


def test_the_page_of_a_study_has_its_figures_and_tables(ladder: tuple[Path, str, Any]) -> None:
    _, text, page = ladder
    assert {"answer-1", "ladder-0", "fig-ladder-0", "fig-validation-0", "training-quality"} <= set(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "unavailable: no weights at assets.lpips.path" in text


def test_a_merge_with_sample_images_can_be_repeated(ladder: tuple[Path, str, Any]) -> None:
    tmp_path, _, _ = ladder
    first = (tmp_path / "ds" / "dataset.json").read_text()
    repeated, _ = report_of(tmp_path)
    assert (
        json.loads(first)["content_hash"] == json.loads((tmp_path / "ds" / "dataset.json").read_text())["content_hash"]
    )
    assert "fig-ladder-0" in repeated


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("quality/gone.png", None, "no such file"),
        ("../outside.png", b"\x89PNG\r\n\x1a\n", "outside its run directory"),
        ("quality/page.png", b"<html>", "not a PNG"),
        ("quality/large.png", b"\x89PNG\r\n\x1a\n" + b"0" * run_dir.MAX_IMAGE_BYTES, "the limit is"),
    ],
)
def test_an_unusable_sample_image_is_listed_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    folder = write_run(tmp_path / "grace", "r-01", quality={"pictures": name})
    if content:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    dataset = merged(tmp_path)
    assert dataset.skipped["code"].to_list() == ["picture"]
    assert reason in dataset.skipped["reason"][0]
    assert dataset.runs["sample_grid"].to_list() == [None]


def test_sample_images_beyond_the_page_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, recipe in enumerate(("baseline", "tf32")):
        about = write_quality(tmp_path / "grace" / f"run-r-{index}", 0, 0)
        write_run(tmp_path / "grace", f"r-{index}", recipe=recipe, quality=about)
    dataset = merged(tmp_path)
    size = (dataset.folder / dataset.runs["sample_grid"][0]).stat().st_size
    monkeypatch.setattr(page, "PAGE_BYTES", size)
    shown, note = page.embed_samples(dataset.folder, dataset.runs, CELL_KEYS)
    assert len(shown) == 1
    assert "1 more are not on this page" in note


def test_sample_images_come_from_valid_runs_only(tmp_path: Path) -> None:
    for index in (0, 1):
        about = write_quality(tmp_path / "grace" / f"run-r-{index}", index, 0)
        write_run(tmp_path / "grace", f"r-{index}", quality=about)
    dataset = merged(tmp_path)
    runs = dataset.runs.with_columns(valid=pl.col("run_id") == "r-1")
    shown, note = page.embed_samples(dataset.folder, runs, CELL_KEYS)
    assert [picture["run_id"] for picture in shown] == ["r-1"]
    assert "all 2 are in the dataset" in note


def test_an_unavailable_metric_gives_the_reason_beside_the_mean() -> None:
    def metrics(value: float | None) -> str:
        """Return FID as a manifest records it."""
        fid = {"value": value, "n": 4096} if value else {"unavailable": "2,049 images are needed"}
        return json.dumps({"fid": fid})

    rows = [{"run_id": f"r-{i}", "seed": i, "quality_metrics": metrics(v)} for i, v in enumerate((20.0, 22.0, None))]
    table = TableBuilder(runs=frame(*rows)).training_quality()
    assert table.rows[0][-1] == "21.0 (range 20.0 to 22.0) [4096]; unavailable: 2,049 images are needed"


def test_validation_has_a_line_per_run_of_as_many_recipes_as_there_are_colours() -> None:
    losses = json.dumps([{"step": s, "loss": 1.0 - s / 1000, "n": 64} for s in (0, 50, 100)])
    levers = [f"workers_{i}" for i in range(10)]
    base = {"study_name": "one_at_a_time", "study_base": "baseline", "study_levers": ",".join(levers)}
    names = ["baseline", *(f"baseline,{lever}" for lever in levers)]
    rows = [
        {**base, "run_id": f"r-{i}", "recipe": name, "recipe_parts": name, "validation": losses}
        for i, name in enumerate(names)
    ]
    (figure,) = points.draw_validation(frame(*rows))
    assert len(figure.run_ids) == 8
    assert "8 runs, a line each; 64 images per point" in figure.svg
    assert "3 recipes more in the table." in figure.caption
