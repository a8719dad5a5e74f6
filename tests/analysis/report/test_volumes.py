"""The sections of volume diffusion: speed-ups over fp32 with validation beside them, and the published figures."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from analysis.columns import SCHEMA
from analysis.dataset import open_dataset
from analysis.merge import merge
from analysis.report import contents
from analysis.report.sections import dataset_comparison
from analysis.report.tables import TableBuilder
from analysis.report.workloads import volume3d_sample, volume3d_train
from inpaint_bench.core.paths import ROOT
from tests.analysis.build import write_run
from tests.analysis.report.sections.test_counters import write

RUN = {"site": "delta", "gpu": "h200", "workload": "volume3d_train", "model": "whole_head 128x128x128", "batch": 2}
RATES = {"fp32": 1.0, "fp32+tf32+channels_last": 3.0}


def _runs() -> pl.DataFrame:
    rows = [
        {**RUN, "run_id": recipe, "recipe": recipe, "precision": "fp32", "images_per_s": 2 * rate, "steps_per_s": rate}
        | {"joules_per_image": 100 / rate, "comparability_key": "", "parity_prediction_rel": 0.001}
        for recipe, rate in RATES.items()
    ]
    return pl.DataFrame(rows, schema_overrides=SCHEMA).with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in SCHEMA.items() if name not in rows[0]
    )


def _results(side: int = 128, tflop: float = 5.537, **l1: float) -> pl.DataFrame:
    sizes = {"network": "whole_head", "depth": side, "height": side, "width": side}
    sizes |= {"parameters": 40226433, "forward_tflop": tflop}
    rows = [
        {"run_id": recipe, **sizes, "trained_steps": 25, "validation_l1": 0.5, "validation_ms_ssim": 0.25}
        | {"ms_ssim_scales": 4, **(l1 if recipe != "fp32" else {})}
        for recipe in RATES
    ]
    return pl.DataFrame(rows)


def test_training_shows_speed_ups_with_validation_and_the_published_networks():
    section = volume3d_train.section(TableBuilder(runs=_runs()), _results(), _runs())
    recipes, networks = section.tables
    shown = [dict(zip(recipes.columns, row, strict=True)) for row in recipes.rows]
    assert {row["Recipe"]: row["Speed-up"] for row in shown} == {"fp32": "1.00", "fp32+tf32+channels_last": "3.00"}
    assert {row["Energy [J/step]"] for row in shown} == {"200", "66.7"}
    assert {(row["Validation L1"], row["MS-SSIM"]) for row in shown} == {("0.500", "0.250")}
    assert networks.rows[0][2:] == [
        *("40,226,433", "5.537", "40,226,433", "5.537 at 128x128x128", "1.0000", "yes"),
    ]
    assert networks.rows[1][4:] == ["\u2013", "\u2013", "\u2013", "not measured"]
    assert "MS-SSIM (4 scales)" in recipes.note


def test_a_network_of_other_work_per_voxel_does_not_agree():
    for tflop, agrees in ((5.537 / 8, "yes"), (5.537 / 4, "no")):
        section = volume3d_train.section(TableBuilder(runs=_runs()), _results(64, tflop), _runs())
        assert section.tables[1].rows[0][-1] == agrees


def _compared(tmp_path: Path, results: pl.DataFrame) -> dict[str, list[list[str]]]:
    """Return the cells behind the published one, by figure: with the counters of the runs in this folder."""
    merge([tmp_path / "runs"], tmp_path / "dataset")
    dataset = open_dataset(tmp_path / "dataset")
    (table,) = volume3d_train.more_tables(TableBuilder(runs=dataset.runs), dataset, results, _runs())
    assert table.columns[:2] == ["Figure", "Published"]
    shown: dict[str, list[list[str]]] = {}
    for row in table.rows:
        shown.setdefault(f"{row[0]}: {row[1]}", []).append(row[2:])
    return shown


def _count(root: Path, run_id: str, recipe: str, counters: dict[str, float], **changes: Any) -> None:
    launches = [("conv", "convolution forward", counters)]
    write(root / "runs", run_id, recipe, launches, workload="volume3d_train", model="whole_head 128x128x128", **changes)


def test_counters_stand_beside_the_published_claims_with_what_agrees_and_why_not(tmp_path):
    _count(tmp_path, "r-1", "fp32", {"sm_cycles": 6e7, "instructions": 8e6, "ipc": 2.0, "tensor_pct": 1.5})
    after = {"sm_cycles": 1e6, "instructions": 8e5, "ipc": 2.12, "tensor_pct": 60.0}
    _count(tmp_path, "r-2", "fp32+tf32+channels_last", after)
    _count(tmp_path, "r-3", "fp32+tf32", {"sm_cycles": 2e6, "instructions": 1e6, "ipc": 3.0, "tensor_pct": 20.0})
    _count(tmp_path, "r-5", "fp32+channels_last", after, demonstration=True)
    _count(tmp_path, "r-4", "fp32", {"sm_cycles": 1e9, "instructions": 1e9, "ipc": 1.0, "tensor_pct": 0.0}, batch=4)
    shown = _compared(tmp_path, _results(validation_l1=0.502))
    # From each recipe that lacks one or both of the levers, never from another batch or to TF32 alone.
    both = "fp32+tf32+channels_last"
    cycles = shown["SM cycles, largest reduction: 100 times"]
    assert [row[3:] for row in cycles] == [
        ["fp32", both, "60.0 times (convolution forward)", "0.600", "yes", "\u2013"],
        ["fp32+tf32", both, "2.00 times (convolution forward)", "0.0200", "no", cycles[1][-1]],
    ]
    assert "one kernel there" in cycles[1][-1]
    assert [row[2] for row in cycles] == ["8", "8"]
    tensor = shown["tensor core utilisation, gain: 1.45 to 9.98 times"]
    assert [row[5:8] for row in tensor] == [
        ["from 1.50 to 60.0 % of the peak", "\u2013", "no ratio"],
        ["3.00 times", "2.07 to 0.301", "yes"],
    ]
    assert [row[5:8] for row in shown["instructions per cycle, gain: +7 %"]] == [
        ["+6 %", "0.857", "yes"],
        ["-29 %", "-4.19", "no"],
    ]
    assert [row[5:8] for row in shown["loss of synthesis quality: none"]] == [
        ["L1 +0.40 %, MS-SSIM +0.0000", "\u2013", "yes"]
    ]


def test_sums_with_missing_launches_are_not_judged(tmp_path):
    _count(tmp_path, "r-1", "fp32", {"sm_cycles": 6e7, "instructions": 8e6}, missing=1)
    _count(tmp_path, "r-2", "fp32+tf32+channels_last", {"sm_cycles": 1e6, "instructions": 8e5})
    shown = _compared(tmp_path, _results(validation_l1=0.5))
    (cycles,) = shown["SM cycles, largest reduction: 100 times"]
    assert cycles[5:7] == ["60.0 times (convolution forward)", "0.600"]
    assert cycles[7:] == ["incomplete", "of the time of this class at most 100 % was counted before, 100 % after"]


def test_published_claims_stay_where_nothing_was_counted_and_a_loss_is_no_agreement(tmp_path):
    write_run(tmp_path / "runs", "r-1")
    shown = _compared(tmp_path, _results(validation_l1=0.6))
    for claim in ("SM cycles, largest reduction: 100 times", "executed instructions, largest reduction: 100 times"):
        assert [row[7] for row in shown[claim]] == ["not measured"]
    (dominant,) = (rows for figure, rows in shown.items() if figure.startswith("kernels that take most time"))
    assert [row[7] for row in dominant] == ["not measured"]
    assert [row[5:8] for row in shown["loss of synthesis quality: none"]] == [
        ["L1 +20.00 %, MS-SSIM +0.0000", "\u2013", "no"]
    ]


def test_sampling_shows_the_agreement_with_the_baseline():
    results = pl.DataFrame(
        [
            {"run_id": recipe, "window_id": "measure-0", "total_ms": 1000 / rate, "baseline_l1": 0.01}
            | {"baseline_ms_ssim": 0.99, "ms_ssim": 0.1, "finite": recipe == "fp32"}
            | {"compared_volumes": 8, "mmd": 0.2, "pair_ms_ssim": 0.5, "real_pair_ms_ssim": 0.4}
            | {"other_weights_rel": None if recipe == "fp32" else 0.03, "trained_with": "fp32"}
            for recipe, rate in RATES.items()
        ]
    )
    section = volume3d_sample.section(TableBuilder(runs=_runs()), results, _runs())
    shown = [dict(zip(section.tables[0].columns, row, strict=True)) for row in section.tables[0].rows]
    assert {row["Recipe"]: row["Speed-up"] for row in shown} == {"fp32": "1.00", "fp32+tf32+channels_last": "3.00"}
    assert {row["MS-SSIM to baseline"] for row in shown} == {"0.990"}
    assert {row["Network"] for row in shown} == {"whole_head 128x128x128, trained with fp32"}
    assert {(row["MMD to real"], row["MS-SSIM of pairs"], row["of real pairs"]) for row in shown} == {
        ("0.200", "0.500", "0.400")
    }
    assert [row["Difference to other weights"] for row in shown] == ["\u2013", "0.0300"]
    assert "Then sets: 8 samples and as many held-out volumes" in section.tables[0].note
    assert section.paragraphs == ["Batches with voxels that are NaN or infinite: 1."]


def test_the_answer_names_the_card_of_each_network() -> None:
    """Regression: `On an H100` stood before the rate of another network, which only an H200 had run."""
    runs, results = _runs(), _results()
    assert volume3d_train.section(TableBuilder(runs=runs), results, runs).answer.startswith("On an H200, whole_head")
    brats = runs.with_columns(run_id=pl.col("run_id") + "-b", model=pl.lit("brats"), gpu=pl.lit("h100"))
    both = pl.concat([runs, brats])
    results = pl.concat([results, results.with_columns(run_id=pl.col("run_id") + "-b")])
    answer = volume3d_train.section(TableBuilder(runs=both), results, both).answer
    recipe = "with fp32+tf32+channels_last"
    assert not answer.startswith("On ")
    assert f"brats: 3.00 steps/s and 66.7 J/step {recipe} on an H100 (1 run)" in answer
    assert f"whole_head 128x128x128: 3.00 steps/s and 66.7 J/step {recipe} on an H200 (1 run)" in answer


def test_rates_and_energies_of_volumes_are_not_those_of_images() -> None:
    """Regression: the headings of volumes were `Images/s`, `Energy [J/image]` and `GPU-h per million images`."""
    shown = {}
    for name in ("2026-11-23-h200-volumes", "2026-11-28-h200-breadth"):
        dataset = open_dataset(ROOT / "benchmarks" / "results" / name)
        report = contents.make_report(dataset, TableBuilder(runs=dataset.runs), [], [])
        shown[name] = {table.id: table.columns for table in report.tables}
        if name.endswith("volumes"):
            assert not [column for table in report.tables for column in table.columns if "mage" in column]
            specs = [json.dumps(each.titled_spec) for each in report.figures if each.id.startswith("fig-")]
            assert any("Volumes/s" in spec for spec in specs)
            assert not any("Images/s" in spec or "J/image" in spec for spec in specs)
            only = dataset_comparison.compare(dataset.runs, dataset.runs)
            table, *_ = dataset_comparison.tables(TableBuilder(runs=dataset.runs), only, dataset, dataset)
            assert {"Change of volumes/s", "Energy [J/volume], old"} <= {*table.columns}
    mixed = shown["2026-11-28-h200-breadth"]
    assert "Images (volumes)/s" in mixed["throughput"]
    assert "Energy [J/image (volume)]" in mixed["energy"]
    decisions = [columns for id, columns in mixed.items() if id.startswith("decision")]
    assert {"Images/s", "Volumes/s"} <= {name for columns in decisions for name in columns}
