"""The report's section on scaling, of made-up rates."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

from analysis import recipe_labels
from analysis.report.estimate import Estimate
from analysis.report.sections import scaling
from analysis.report.tables import Section, Table, TableBuilder
from tests.analysis.report.test_tables import frame

IMAGES = 6480


def runs(*cells: tuple[int, int, int, float], n: int = 3) -> TableBuilder:
    """Return `n` runs of each cell of nodes, GPUs, batch per GPU and images/s."""
    rows: list[dict[str, Any]] = [
        {
            "run_id": f"r-{nodes}-{gpus}-{batch}-{seed}",
            "gpu": "h200",
            "gpu_uuid": ", ".join(f"GPU-{index}" for index in range(gpus)),
            "nodes": nodes,
            "gpus": gpus,
            "batch": batch,
            "seed": seed,
            "dataset_images": IMAGES,
            "images_per_s": rate + 0.01 * rate * (seed - 1),
        }
        for nodes, gpus, batch, rate in cells
        for seed in range(n)
    ]
    return TableBuilder(runs=frame(*rows))


def test_time_in_communication_is_of_the_profiled_runs_of_several_gpus() -> None:
    build = runs((1, 1, 16, 40.0), (1, 2, 16, 78.0))
    assert [table.rows for table in section(build)[0].tables if table.id == "communication"] == [[]]
    facts = json.dumps({"communication": {"step": {"ms": 30.0, "exposed_ms": 10.0, "call_ms": 400.0}}})
    profiled = pl.when(pl.col("gpus") == 2).then(pl.lit(facts)).otherwise(pl.lit('{"calls": ["step"]}'))
    build.runs = build.runs.with_columns(profile=profiled)
    (table,) = [table for table in section(build)[0].tables if table.id == "communication"]
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert (row["GPUs"], row["Profiles"], row["Call"]) == ("2", "3", "step")
    milliseconds = [row[f"{name} [ms]"] for name in ("Communication", "Beside other kernels", "Exposed")]
    assert milliseconds == ["30.0", "20.0", "10.0"]
    assert row["Exposed [% of call]"] == "2.50"


def section(build: TableBuilder) -> tuple[Section, dict[tuple[str, str, str], dict[str, str]]]:
    """Return the section, and its rows by kind, number of GPUs and of nodes."""
    (found,) = scaling.sections(build)
    table: Table = found.tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return found, {(row["Scaling"], row["GPUs"], row["Nodes"]): row for row in rows}


def test_one_number_of_gpus_has_no_section() -> None:
    assert scaling.sections(runs((1, 1, 8, 40.0), (1, 1, 16, 42.0))) == []
    assert scaling.sections(runs((1, 1, 8, 40.0), (1, 2, 16, 80.0))) == [], "neither batch is the same"


def test_weak_scaling_keeps_the_batch_of_each_gpu_and_strong_scaling_that_of_all() -> None:
    _, rows = section(runs((1, 1, 16, 40.0), (1, 2, 16, 78.0), (1, 2, 8, 72.0)))
    assert rows.keys() == {(kind, gpus, "1") for kind in ("weak", "strong") for gpus in ("1", "2")}
    weak, strong = rows["weak", "2", "1"], rows["strong", "2", "1"]
    assert (weak["Batch per GPU"], weak["Batch in total"]) == ("16", "32")
    assert (strong["Batch per GPU"], strong["Batch in total"]) == ("8", "16")
    assert weak["Ideal [images/s]"] == strong["Ideal [images/s]"] == "80.0"
    efficiency = weak["Efficiency [%]"]
    assert isinstance(efficiency, Estimate)
    assert efficiency.value == pytest.approx(97.5)
    assert efficiency.low is not None
    assert efficiency.high is not None
    assert efficiency.low < 97.5 < efficiency.high
    assert float(weak["GPU-hours per epoch"]) == pytest.approx(2 * IMAGES / 78 / 3600, rel=0.01)
    assert rows["weak", "1", "1"]["Efficiency [%]"] == "\u2013"


def test_four_gpus_of_one_node_and_two_each_of_two_are_different_rows() -> None:
    found, rows = section(runs((1, 1, 16, 40.0), (1, 4, 16, 156.0), (2, 4, 16, 120.0)))
    assert rows["weak", "4", "1"]["Efficiency [%]"].startswith("97.5")
    assert rows["weak", "4", "2"]["Efficiency [%]"].startswith("75.0")
    assert any(text.endswith("4 GPUs of up to 4 worth it.") for text in found.paragraphs)
    assert found.answer == "4 H200 reach 156 images/s: baseline 3.90 times 1 GPU (98 % of ideal, weak, batch 16)."


def test_the_most_gpus_with_nine_tenths_of_the_efficiency_are_worth_it() -> None:
    found, _ = section(runs((1, 1, 16, 40.0), (1, 2, 16, 79.0), (1, 4, 16, 100.0)))
    text = "H200 (grace) baseline \u00b7 weak, batch 16 per GPU: 2 GPUs of up to 4 worth it."
    assert text in found.paragraphs


def test_a_lower_end_of_the_interval_below_the_limit_is_not_worth_it() -> None:
    found, rows = section(runs((1, 1, 16, 40.0), (1, 2, 16, 73.0)))
    assert rows["weak", "2", "1"]["Efficiency [%]"].startswith("91.3 (")
    assert any(text.endswith("1 GPU of up to 2 worth it.") for text in found.paragraphs)


def test_levers_of_several_gpus_are_beside_one_gpu_without_them() -> None:
    build = runs((1, 1, 16, 40.0), (1, 2, 16, 78.0), (1, 4, 16, 120.0), (1, 4, 32, 160.0))
    several = pl.when(pl.col("gpus") == 2).then(pl.lit("+exchange_in_place")).otherwise(pl.lit("+zero1"))
    recipe = pl.col("recipe") + pl.when(pl.col("gpus") > 1).then(several).otherwise(pl.lit(""))
    runs_of_all = build.runs.drop(recipe_labels.COLUMN).with_columns(recipe=pl.lit("tuned")).with_columns(recipe)
    found, _ = section(TableBuilder(runs=runs_of_all))
    rows = [dict(zip(found.tables[0].columns, row, strict=True)) for row in found.tables[0].rows]
    assert [(row["Recipe"], row["GPUs"], str(row["Efficiency [%]"])[:4]) for row in rows] == [
        ("tuned", "1", "\u2013"),
        ("tuned+exchange_in_place", "2", "97.5"),
        ("tuned", "1", "\u2013"),
        ("tuned+zero1", "4", "75.0"),
    ]


def test_published_scaling_and_a_figure_stand_beside_the_measured_one() -> None:
    found, _ = section(runs((1, 1, 16, 40.0), (1, 2, 16, 78.0), n=1))
    assert [table.id for table in found.tables if table.rows] == ["scaling", "nemo-scaling", "nemo-gpus"]
    assert found.answer.endswith("Too few runs for an interval.")
    (figure,) = found.figures
    assert "<svg" in figure.svg
    assert "One run per cell: no intervals." in figure.caption


def test_the_first_screen_shows_each_reference_once_and_two_numbers_of_gpus_have_no_logarithmic_axis() -> None:
    found, _ = section(runs((1, 1, 16, 40.0), (1, 2, 16, 78.0), (1, 2, 8, 72.0)))
    first = found.tables[0].brief()
    gpus = first.columns.index("GPUs")
    assert [(row[0], row[gpus]) for row in first.rows] == [("weak", "1"), ("weak", "2"), ("strong", "2")]
    assert "logarithmic" not in found.figures[0].caption
    more, _ = section(runs((1, 1, 16, 40.0), (1, 2, 16, 78.0), (1, 4, 16, 150.0)))
    assert "Both axes are logarithmic." in more.figures[0].caption


def test_scaling_of_different_work_has_a_section_each_that_says_whose_it_is() -> None:
    """Regression: one answer ranked the rates of two models, and no row told them apart."""
    cells = ((1, 1, 16, 40.0), (1, 2, 16, 78.0))
    assert section(runs(*cells))[0].title == "Scaling over GPUs"
    two = runs(*cells).runs
    two = pl.concat([two, two.with_columns(model=pl.lit("sdxl"), run_id=pl.col("run_id") + "-b")])
    first, second = scaling.sections(TableBuilder(runs=two))
    assert (first.title, second.title) == ("Scaling over GPUs: sd15_inpaint", "Scaling over GPUs: sdxl")
    assert first.answer.startswith("SD 1.5 inpainting fine-tune: 2 H200 reach 78.0 images/s")
    ids = [each.id for found in (first, second) for each in (*found.tables, *found.figures)]
    assert len(ids) == len(set(ids))
