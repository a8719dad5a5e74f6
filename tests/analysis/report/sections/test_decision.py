"""What to take: batch, speed, energy and cost per GPU and recipe, fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import site_rates
from analysis.report.sections import decision, study_tables
from analysis.report.tables import Table, TableBuilder
from analysis.site_rates import Rate
from inpaint_bench.core import paths
from tests.analysis.report.test_tables import frame
from tests.analysis.stats.test_best_batch import runs_of


def table_of(*rows: dict[str, Any]) -> Table:
    return next(decision.sections(TableBuilder(runs=frame(*rows)), [])).tables[0]


def only_row(table: Table) -> dict[str, str]:
    (row,) = table.rows
    return dict(zip(table.columns, row, strict=True))


def test_a_row_has_batch_speed_energy_cost_and_the_words_to_paste() -> None:
    facts: dict[str, Any] = {"site": "local", "gpu": "h200", "recipe": "tf32+ema", "dataset_images": 6500}
    row = only_row(table_of(*runs_of(8, 10.0, 10.1, 9.9, **facts), *runs_of(16, 20.0, 20.2, 19.8, **facts)))
    assert row["GPU and recipe"] == "H200"
    assert row["Batch"] == "16"
    assert row["Images/s"] == "20.0 (19.5 to 20.5)"
    assert row["Energy [J/image]"].startswith("5.00 (4.8")
    # A million images at 20 images/s are 50,000 s.
    assert row["GPU-h per million images"] == "13.9"
    assert row["GPU-h per epoch of 6,500"] == "0.0903"
    assert row["n"] == "3"
    assert row["Next run"].startswith("batch=32: ")
    assert row["Overrides"] == "gpu=h200 batch=16 'recipe=[baseline,tf32,ema]'"


def test_the_words_to_paste_name_what_is_not_the_default_of_launch() -> None:
    facts: dict[str, Any] = {"gpus": 4, "nodes": 2, "workload": "sd_inference", "recipe": "cpu"}
    row = only_row(table_of(*runs_of(8, 10.0, 10.1, 9.9, **facts)))
    assert row["Overrides"].startswith("gpu=")
    assert " batch=8 gpus=2 nodes=2 workload=sd_inference " in row["Overrides"]


def test_the_words_to_paste_choose_model_and_workload_as_every_run_was_given_them() -> None:
    given = "gpu=h200 model=sdxl_inpaint workload.resolution_px=64 'model.name=a b' recipe=cpu"
    facts: dict[str, Any] = {"model": "sdxl_inpaint", "recipe": "cpu"}
    rows = runs_of(8, 10.0, 10.1, **facts)
    given += " workload.min_measure_s=4 workload.warmup_steps=2"
    rows = [row | {"overrides": f"{given} seed={seed} workload.steps={seed}"} for seed, row in enumerate(rows)]
    row = only_row(table_of(*rows))
    shared = "model=sdxl_inpaint workload.resolution_px=64 'model.name=a b'"
    assert row["Overrides"].partition(" batch=8 ")[2] == f"{shared} 'recipe=[cpu]'"


def test_one_run_is_provisional_and_an_epoch_of_unknown_size_has_no_column() -> None:
    table = table_of(*runs_of(8, 10.0))
    row = only_row(table)
    assert row["n"] == "1"
    assert "One run is provisional" in table.note
    assert not [name for name in table.columns if "epoch" in name]


def test_service_units_follow_the_rule_of_the_site() -> None:
    row = only_row(table_of(*runs_of(8, 10.0, site="delta", gpu="h200")))
    # 100,000 s of an H200, which Delta charges three times.
    assert row["SU of delta per million images"] == "83.3"
    mixed = table_of(*runs_of(8, 10.0, site="grace"), *runs_of(8, 10.0, site="local", gpu="h200"))
    costs = {row[mixed.columns.index("Cost per million images")] for row in mixed.rows}
    assert costs == {"2,444 SU of grace (at most)", "27.8 GPU-h"}


def test_a_site_with_a_price_has_columns_of_money(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = Rate(unit="SU", units_per_gpu_hour=3.0, price_per_unit=0.5, currency="EUR")
    monkeypatch.setattr(site_rates, "rate", lambda site, gpu: priced)
    row = only_row(table_of(*runs_of(8, 10.0, dataset_images=2000)))
    assert row["Price per million images"] == "41.7 EUR"
    assert row["Price per epoch of 2,000"] == "0.0833 EUR"


def test_a_price_is_read_from_the_file_of_a_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "priced.yaml").write_text(
        "name: priced\ngpus: {a40: {charge_factor: 0.5}}\ncharging: {gpus_per_unit: 1, price_per_unit: 0.2}\n"
    )
    assert (paths.conf_dir() / "site" / "delta.yaml").is_file()
    monkeypatch.setattr(site_rates, "conf_dir", lambda: tmp_path)
    assert site_rates.rate("priced", "a40") == Rate(
        unit="SU", units_per_gpu_hour=0.5, price_per_unit=0.2, currency="USD"
    )


@pytest.mark.parametrize("site", ["../site/delta", "nowhere", "local", "", None])
def test_a_site_without_a_file_here_has_gpu_hours(site: str | None) -> None:
    assert site_rates.rate(site, "h200") is site_rates.GPU_HOURS


def test_the_winner_of_the_answer_is_the_strong_row_also_if_it_ran_in_a_study_only() -> None:
    study = {"study_name": "ladder", "study_base": "baseline", "study_levers": "tf32"}
    rows = runs_of(8, 10.0) + runs_of(8, 30.0, recipe="tf32", recipe_parts="baseline,tf32", **study)
    (section,) = decision.sections(TableBuilder(runs=frame(*rows)), [])
    (table,) = section.tables
    assert table.strong_rows == {0}
    assert table.rows[0][0] == "A40 \u00b7 tf32"
    assert "recipe tf32: 30.0 images/s" in section.answer
    assert table.row_runs[0] == [row["run_id"] for row in rows if row.get("recipe") == "tf32"]


def test_a_study_of_another_workload_does_not_answer_what_to_take() -> None:
    """Regression: a study of volumes hid the answer of the inpainting runs beside it, of one batch."""
    study = {"study_name": "ladder", "study_base": "fp32", "study_levers": "tf32", "workload": "volume3d_train"}
    rows = runs_of(1, 1.0, recipe="fp32", recipe_parts="fp32", model="brats", **study)
    build = TableBuilder(runs=frame(*rows, *runs_of(8, 10.0), *runs_of(8, 12.0, recipe="tf32")))
    answers = {each.workload: each.answer for each in decision.sections(build, study_tables.sections(build))}
    assert answers["finetune_inpaint"].startswith("Take an A40, batch 8, recipe tf32")
    assert not answers["volume3d_train"]


def test_the_first_screen_has_the_eight_fastest_and_the_whole_table_every_recipe() -> None:
    names = [f"lever{index}" for index in range(12)]
    rows = [r for i, name in enumerate(names) for r in runs_of(8, 10.0 + i, recipe=name)]
    table = table_of(*rows, *runs_of(8, 9.0, recipe="baseline"))
    brief = table.brief()
    assert [row[0].partition(" \u00b7 ")[2] for row in brief.rows] == [f"lever{index}" for index in range(11, 3, -1)]
    assert "Overrides" not in brief.columns
    assert len(table.rows) == 13


def test_ties_are_named_beside_the_smallest_batch() -> None:
    rows = runs_of(8, 10.0, 10.2, 9.9) + runs_of(16, 10.1, 10.0, 10.1) + runs_of(32, 5.0, 5.1, 5.2)
    assert only_row(table_of(*rows))["Batch"] == "8 (tied with 16)"
