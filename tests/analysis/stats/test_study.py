"""Studies in tables and figures: every step keeps its place, and only comparable runs are compared."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from analysis.report.sections import poster, study_tables
from analysis.report.tables import Table, TableBuilder
from analysis.stats import study
from tests.analysis.report.test_tables import frame

LEVERS = ["tf32", "compile", "cache_image+cache_masked"]


def run(kind: str, parts: str, speed: float | None = None, **more: Any) -> dict[str, Any]:
    """Return a run of a study; it is invalid without a speed."""
    counts = {"images_per_s": speed, "valid": speed is not None}
    base = {"study_name": kind, "study_base": "baseline", "study_levers": ",".join(LEVERS), "batch": 16}
    base |= {"gpu": "h200", "site": "delta", "resolution_px": 512, "gpu_uuid": "GPU-1", "seed": 0}
    return {"run_id": f"r-{kind}-{parts}-{more.get('seed', 0)}", **base, "recipe_parts": parts, **counts, **more}


def table_of(*rows: dict[str, Any], which: int = 0) -> Table:
    runs = frame(*rows)
    return study_tables.table(TableBuilder(runs=runs), study.comparisons(runs)[which])


def column(table: Table, name: str) -> list[str]:
    return [row[table.columns.index(name)] for row in table.rows]


def test_ladder_shows_gains_over_previous_step_and_over_base() -> None:
    """Ratios 1.10 on every seed, then 1.20 more: no scatter, so the intervals have no width."""
    speeds = {"baseline": 10.0, "baseline,tf32": 11.0, "baseline,tf32,compile": 13.2}
    rows = [run("ladder", p, v * (1 + s / 20), seed=s) for p, v in speeds.items() for s in (0, 1, 2)]
    table = table_of(*rows)
    assert column(table, "Step") == ["baseline", "+ tf32", "+ compile", "+ cache_image+cache_masked"]
    assert column(table, "Relative to previous step")[1:3] == ["+10.0 % (+10.0 to +10.0)", "+20.0 % (+20.0 to +20.0)"]
    assert column(table, "Relative to base")[2] == "+32.0 % (+32.0 to +32.0)"
    assert column(table, "n") == ["3", "3", "3", "0"]


def test_step_without_valid_run_keeps_its_place_with_a_reason() -> None:
    lacking = {"status": "failed", "reason": "unavailable", "message": "no compiler on this node"}
    table = table_of(
        run("ladder", "baseline", 10.0),
        run("ladder", "baseline,tf32", status="failed", reason="oom_gpu"),
        run("ladder", "baseline,tf32,compile", **lacking, resolution_px=None),
    )
    assert column(table, "Images/s") == ["10.0", "no valid run", "unavailable", "not run yet"]
    assert column(table, "Lever check")[1:] == [
        "failed (oom_gpu)",
        "unavailable: no compiler on this node",
        "not run yet",
    ]
    assert table.muted_rows == {1, 2, 3}


def test_step_after_a_missing_one_is_compared_with_the_last_measured() -> None:
    table = table_of(run("ladder", "baseline", 10.0), run("ladder", "baseline,tf32,compile", 12.0))
    assert column(table, "Relative to previous step")[2] == "+20.0 % (n = 1, no interval, relative to baseline)"


def test_difference_within_the_scatter_is_reported_as_none() -> None:
    rows = [run("one_at_a_time", "baseline", v, seed=s) for s, v in enumerate((10.0, 10.2, 9.9))]
    rows += [run("one_at_a_time", "baseline,tf32", v, seed=s) for s, v in enumerate((10.1, 9.9, 10.2))]
    rows += [run("one_at_a_time", "baseline,compile", 12.0)]
    table = table_of(*rows)
    gains = column(table, "Relative to base")
    assert gains[1].startswith("tie (+0.3 %, ")
    assert gains[2] == "+20.0 % (n = 1, no interval)"


def test_runs_of_different_cards_are_marked_one_card_each() -> None:
    rows = [run("one_at_a_time", "baseline", 10.0 + s, seed=s) for s in (0, 1)]
    rows += [run("one_at_a_time", "baseline,tf32", 40.0 + s, seed=s, gpu_uuid="GPU-2") for s in (0, 1)]
    assert column(table_of(*rows), "Relative to base")[1].endswith(", one card each)")


def test_runs_without_a_seed_are_not_paired() -> None:
    """Regression: every run of a card had the same key, so that all of them became one pair."""
    rows = [run("one_at_a_time", "baseline", 10.0 + s, seed=None, run_id=f"b-{s}") for s in range(3)]
    rows += [run("one_at_a_time", "baseline,tf32", 40.0 + s, seed=None, run_id=f"t-{s}") for s in range(3)]
    assert column(table_of(*rows), "Relative to base")[1].endswith(", unpaired)")


def test_leave_one_out_shows_the_change_without_each_lever() -> None:
    rows = [
        run("leave_one_out", "baseline,tf32,compile,cache_image,cache_masked", 20.0),
        run("leave_one_out", "baseline,tf32,compile", 15.0),
    ]
    table = table_of(*rows)
    assert column(table, "Recipe") == ["all", "without tf32", "without compile", "without cache_image+cache_masked"]
    assert column(table, "Change without it")[3] == "-25.0 % (n = 1, no interval)"


def test_only_precision_may_differ_within_a_comparison() -> None:
    rows = [
        run("one_at_a_time", "baseline", 10.0, precision="fp32"),
        run("one_at_a_time", "baseline,tf32", 30.0, precision="bf16"),
        run("one_at_a_time", "baseline,compile", 99.0, resolution_px=256),
        run("one_at_a_time", "baseline,compile", 98.0, batch=32),
        run("one_at_a_time", "baseline,compile", 97.0, site="grace"),
    ]
    comparisons = study.comparisons(frame(*rows))
    assert len(comparisons) == 4
    full = next(comparison for comparison in comparisons if len([step for step in comparison.steps if step.runs]) == 2)
    assert [len(step.runs) for step in full.steps] == [1, 1, 0, 0]


def test_searched_batches_form_one_comparison() -> None:
    rows = [
        run("one_at_a_time", "baseline", 10.0, batch=40, batch_requested="auto"),
        run("one_at_a_time", "baseline,tf32", 30.0, batch=64, batch_requested="auto"),
    ]
    (comparison,) = study.comparisons(frame(*rows))
    assert comparison.setting == "H200, batch auto"


def test_run_without_overrides_is_matched_by_its_recipe_name() -> None:
    rows = [
        run("ladder", "", 10.0, recipe="baseline", recipe_parts=None),
        run("ladder", "x", 12.0, recipe="compile+tf32", recipe_parts=None),
        run("ladder", "y", 13.0, recipe="ema", recipe_parts=None),
    ]
    table = table_of(*rows)
    assert column(table, "n") == ["1", "0", "1", "0"]
    assert "1 run of this study with a recipe that is not one of its steps" in table.note


def test_inactive_lever_is_marked_with_its_effective_value() -> None:
    def lever(name: str, active: bool | None) -> dict[str, Any]:
        return {"name": name, "requested": "flash", "effective": "math", "active": active, "evidence": "kernel gemm"}

    levers = json.dumps([lever("tf32", True), lever("compile", False), lever("ema", None)])
    table = table_of(run("ladder", "baseline,tf32,compile", 12.0, levers=levers))
    (cell,) = [text for text in column(table, "Lever check") if "compile" in text]
    mark = study_tables.NOT_ACTIVE
    assert cell.startswith(f"{mark} compile not active: requested flash, effective math (kernel gemm)")
    assert "ema: requested flash, effective math, not verified" in cell
    assert cell.endswith("1 more active")


def test_lever_of_which_nothing_is_known_is_not_said_to_have_had_no_effect() -> None:
    evidence = "calls inside the graph cannot be counted"
    lever = {"name": "compile", "requested": True, "effective": None, "active": None, "evidence": evidence}
    table = table_of(run("ladder", "baseline,compile", 12.0, levers=json.dumps([lever])))
    assert f"compile: requested true, not verified ({evidence})" in column(table, "Lever check")


def test_parity_shows_the_largest_error_and_why_it_is_missing() -> None:
    rows = [
        run("one_at_a_time", "baseline", 10.0, parity_reference="baseline"),
        run("one_at_a_time", "baseline,tf32", 11.0, parity_prediction_rel=0.002, parity_gradient_rel=0.03),
        run("one_at_a_time", "baseline,compile", 12.0, parity_unavailable="the reference ran out of memory"),
    ]
    table = table_of(*rows)
    assert column(table, "Parity") == ["reference", "0.0300 (gradient)", "unavailable", "\u2013"]
    assert "Parity unavailable for compile: the reference ran out of memory." in table.note
    assert "against the reference (baseline) on fixed seeds" in table.note


def test_recipe_that_exceeds_parity_is_marked_and_listed_in_the_note() -> None:
    rows = [
        run("one_at_a_time", "baseline", 10.0, parity_reference="baseline", parity_exceeded=False),
        run("one_at_a_time", "baseline,tf32", 11.0, parity_gradient_rel=0.4, parity_exceeded=True),
        run("one_at_a_time", "baseline,compile", 12.0, parity_exceeded=True),
    ]
    table = table_of(*rows)
    mark = study_tables.NOT_ACTIVE
    assert column(table, "Parity")[1:3] == [
        f"{mark} out of tolerance: 0.400 (gradient)",
        f"{mark} out of tolerance: not finite",
    ]
    assert "Parity error out of tolerance, so not the same computation: tf32, compile." in table.note


def test_note_lists_the_batches_found_by_the_search() -> None:
    rows = [
        run("one_at_a_time", "baseline", 10.0, batch=40, batch_requested="auto"),
        run("one_at_a_time", "baseline,tf32", 30.0, batch=64, batch_requested="auto"),
    ]
    assert "found by search (batch=auto): baseline 40, tf32 64." in table_of(*rows).note
    assert "batch=auto" not in table_of(run("one_at_a_time", "baseline", 10.0)).note


def test_recipes_on_a_bundle_are_separate_cells() -> None:
    """Regression: every recipe on a bundle bore the bundle's name."""
    on = {"study_base": "tuned", "study_levers": "tf32,cudnn_benchmark"}
    rows = [run("ladder", "tuned", 10.0, recipe="tuned", **on)]
    rows += [run("ladder", "tuned,tf32", 11.0, recipe="tuned+tf32", recipe_parts=None, **on)]
    runs = frame(*rows)
    build = TableBuilder(runs=runs)
    assert build.cells.select("recipe", "n").rows() == [("tuned", 1), ("tuned+tf32", 1)]
    table = study_tables.table(build, study.comparisons(runs)[0])
    assert column(table, "n") == ["1", "1", "0"]
    assert column(table, "Recipe") == ["tuned", "tuned+tf32", "tuned+tf32+cudnn_benchmark"]


def test_failed_attempt_with_a_valid_retry_is_not_listed() -> None:
    same = {"sweep_id": "s-1", "point": "0"}
    table = table_of(
        run("ladder", "baseline", 10.0, **same, seed=1), run("ladder", "baseline", status="failed", **same)
    )
    assert column(table, "Lever check")[0] == "all 1 active"


def test_every_recipe_of_a_study_is_in_the_tables_of_all_cells() -> None:
    """Regression: the leading figures of a ladder showed 2 of its 20 runs."""
    rows = [run("ladder", f"baseline,{name}", 10.0 + i, recipe=name) for i, name in enumerate(LEVERS)]
    build = TableBuilder(runs=frame(run("ladder", "baseline", 9.5), *rows))
    assert {row[3] for row in build.summary("throughput").rows} == {"baseline", *LEVERS}


@pytest.mark.parametrize("kind", ["ladder", "one_at_a_time", "leave_one_out"])
def test_study_figure_has_all_runs_of_the_study_and_says_what_is_missing(kind: str) -> None:
    parts = study.STUDIES[kind]("baseline", LEVERS)
    rows = [run(kind, ",".join(recipe), 10.0 + i, seed=s) for i, recipe in enumerate(parts[:-1]) for s in (0, 1)]
    rows.append(run(kind, ",".join(parts[-1]), status="failed", reason="unavailable", message="no"))
    (comparison,) = study.comparisons(frame(*rows))
    figure = study_tables.draw(comparison)
    assert figure is not None
    assert len(figure.run_ids) == 2 * (len(parts) - 1)
    texts = re.findall(r">([^<>]+)</text>", figure.svg)
    assert "unavailable" in texts
    assert any("cache_image+cache_masked" in text for text in texts)


def test_single_gains_are_sorted_in_descending_order() -> None:
    speeds = {"": 10.0, ",tf32": 9.0, ",compile": 13.0, ",cache_image,cache_masked": 11.0}
    rows = [run("one_at_a_time", f"baseline{p}", v, seed=s) for p, v in speeds.items() for s in (0, 1)]
    figure = study_tables.draw(study.comparisons(frame(*rows))[0])
    assert figure is not None
    places = [figure.svg.index(f">{name}</text>") for name in ("compile", "cache_image+cache_masked", "tf32")]
    assert places == sorted(places)


def test_study_without_a_valid_run_has_a_table_and_no_figure() -> None:
    comparisons = study.comparisons(frame(run("ladder", "baseline", status="failed", reason="timeout")))
    assert len(comparisons) == 1
    assert study_tables.draw(comparisons[0]) is None


def _pipeline(metrics: dict[str, tuple[float, float]], **more: Any) -> list[dict[str, Any]]:
    names = (poster.BASELINE, poster.OPTIMIZED)
    base = {"gpu": "h200", "batch": 16, "site": "delta", "resolution_px": 512, "gpu_uuid": "GPU-1", **more}
    return [
        {**base, "run_id": f"r-{name}-{seed}", "recipe": name, "seed": seed}
        | {metric: pair[side] * (1 + 0.01 * seed) for metric, pair in metrics.items()}
        for side, name in enumerate(names)
        for seed in (0, 1)
    ]


def test_published_pipeline_is_shown_only_for_h200_at_batch_16() -> None:
    rows = _pipeline({"images_per_s": (10.0, 11.0)}, gpu="a40")
    (table,) = poster.pipeline(TableBuilder(runs=frame(*rows)))
    assert {cell for row in table.rows for cell in row[4:]} == {"\u2013"}
    assert poster.pipeline(TableBuilder(runs=frame(*rows[:2]))) == []


def test_studies_of_different_work_say_whose_they_are() -> None:
    """Regression: in a merge of two workloads both were `Ladder: H200, batch 16`, also on one and on two GPUs."""
    rows = [run("ladder", "baseline", 10.0), run("ladder", "baseline", 10.0, gpus=2, run_id="r-2")]
    other = {"workload": "volume3d_train", "model": "brats", "resolution_px": None, "run_id": "r-3"}
    assert [each.setting for each in study.comparisons(frame(rows[0]))] == ["H200, batch 16"]
    assert [each.setting for each in study.comparisons(frame(*rows, run("ladder", "baseline", 1.0, **other)))] == [
        "H200, batch 16, finetune_inpaint, sd15_inpaint, 1 GPU",
        "H200, batch 16, finetune_inpaint, sd15_inpaint, 2 GPUs",
        "H200, batch 16, volume3d_train, brats, 1 GPU",
    ]
    inference = {"run_id": "r-4", "workload": "sd_inference", "gpu": "h200"}
    assert study.comparisons(frame(rows[0], inference))[0].setting == "H200, batch 16, finetune_inpaint"
