"""Runs that must not be averaged are refused, or form separate cells where that is allowed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import comparability, merge
from analysis.dataset import Dataset, open_dataset
from analysis.stats import best_batch, cells, study
from inpaint_bench.cli import app
from inpaint_bench.core import seal
from inpaint_bench.core.errors import UserError
from tests.analysis.report.test_tables import frame

from .build import card, write_levers, write_run, write_study

OLD = {"driver": "570.172.08"}


def merged(tmp_path: Path, *allowed: str) -> Dataset:
    merge.merge([tmp_path / "runs"], tmp_path / "ds", allow_mixed=allowed)
    return open_dataset(tmp_path / "ds")


def test_sites_may_differ_in_driver_and_power_limit(tmp_path: Path) -> None:
    write_study(tmp_path / "runs" / "grace", tmp_path / "runs" / "delta")
    write_run(tmp_path / "runs", "r-other", environment=OLD, site="delta", batch=8)  # an A40 elsewhere
    dataset = merged(tmp_path)
    assert dataset.runs["driver"].n_unique() == 2
    assert dataset.runs["comparability_key"].unique().to_list() == [""]
    assert dataset.metadata["mixed"] == []


def test_batches_of_one_series_must_be_comparable(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "r-1", batch=8)
    write_run(tmp_path / "runs", "r-2", batch=16, environment=OLD)
    with pytest.raises(UserError, match=r"a40 at grace, finetune_inpaint, sd15_inpaint, 512 px: driver 580\.95\.05"):
        merged(tmp_path)


def test_command_exits_with_2_and_names_the_option_that_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", "r-1")
    write_run(tmp_path / "runs", "r-2", environment=OLD, power_w=152.0, counter=False)
    command = ["merge", str(tmp_path / "runs"), "-o", str(tmp_path / "ds"), "--threads", "1"]
    assert app.main(command) == 2
    stderr = capsys.readouterr().err
    assert "add --allow-mixed driver,power_semantics:" in stderr
    assert "Traceback" not in stderr
    assert app.main([*command, "--allow-mixed", "driver"]) == 2
    capsys.readouterr()
    assert app.main([*command, "--allow-mixed", "driver,power_semantics"]) == 0
    assert "separate cells: a40 at grace" in capsys.readouterr().err
    assert app.main([*command, "--allow-mixed", "color"]) == 2
    assert "color: not one of board, driver, power_limit, power_semantics" in capsys.readouterr().err


def test_invalid_run_is_no_conflict(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "r-1")
    write_run(tmp_path / "runs", "r-2", environment=OLD, status="failed", reason="oom_gpu")
    assert merged(tmp_path).runs.height == 2


def test_unknown_value_is_not_a_different_value(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "r-1")
    folder = write_run(tmp_path / "runs", "r-2", environment={"driver": None}, telemetry={"source": "none"})
    for name in ("samples_fast", "samples_slow"):
        shutil.rmtree(folder / name)
    dataset = merged(tmp_path)
    assert cells.build_cells(dataset.runs)["n"].to_list() == [2]


def test_replays_of_one_capture_are_comparable_and_of_two_are_not(tmp_path: Path) -> None:
    for run_id in ("r-1", "r-2"):
        write_run(tmp_path / "runs", run_id, source="replay:a40-one")
    assert merged(tmp_path).runs.height == 2
    write_run(tmp_path / "runs", "r-3", source="replay:a40-two")
    with pytest.raises(UserError, match="energy_mj by replay:a40-two"):
        merged(tmp_path)


def test_memory_limit_of_a_separate_cell_is_that_of_its_board(tmp_path: Path) -> None:
    for index, (name, oom) in enumerate((("NVIDIA A100-PCIE-40GB", 16), ("NVIDIA A100-SXM4-40GB", 32))):
        board = {"uuid": card("a100"), "name": name, "index_visible": 0, "power_limit_w": 250.0}
        facts: dict[str, Any] = {"gpu": "a100", "devices": [board]}
        write_run(tmp_path / "runs", f"r-{index}-ran", batch=8, **facts)
        write_run(tmp_path / "runs", f"r-{index}-oom", batch=oom, status="failed", reason="oom_gpu", **facts)
    dataset = merged(tmp_path, "board")
    decisions = best_batch.decide_batches(cells.build_cells(dataset.runs), dataset.runs)
    assert {decision.series: decision.smallest_oom for decision in decisions} == {
        "A100 \u00b7 NVIDIA A100-PCIE-40GB": 16,
        "A100 \u00b7 NVIDIA A100-SXM4-40GB": 32,
    }


def test_study_over_two_drivers_is_two_comparisons(tmp_path: Path) -> None:
    environment = {"torch": "2.9.1", "cuda": "12.8", "hostname": "gpuc01"}
    for driver in ("570", "580"):
        write_levers(
            tmp_path / "runs" / driver,
            "one_at_a_time",
            ["compile", "dali"],
            repeats=2,
            environment={**environment, "driver": driver},
            sweep_id=f"s-{driver}",
            prefix=driver,
        )
    dataset = merged(tmp_path, "driver")
    comparisons = study.comparisons(dataset.runs)
    assert [comparison.setting for comparison in comparisons] == [
        "H200, batch 16, driver 570",
        "H200, batch 16, driver 580",
    ]
    assert [len(step.runs) for comparison in comparisons for step in comparison.steps] == [2, 2, 0, 2, 2, 0]
    assert all(
        row["driver"] == comparison.setting[-3:]
        for comparison in comparisons
        for step in comparison.steps
        for row in step.runs
    )


def test_driver_that_is_a_prefix_of_another_is_a_different_driver(tmp_path: Path) -> None:
    for index, (driver, oom) in enumerate((("570.1", 16), ("570.10", 32))):
        environment = {"driver": driver}
        write_run(tmp_path / "runs", f"r-{index}-ran", batch=8, environment=environment)
        lost = {"status": "failed", "reason": "oom_gpu"}
        write_run(tmp_path / "runs", f"r-{index}-oom", batch=oom, environment=environment, **lost)
    dataset = merged(tmp_path, "driver")
    decisions = best_batch.decide_batches(cells.build_cells(dataset.runs), dataset.runs)
    assert {decision.series: decision.smallest_oom for decision in decisions} == {
        "A40 \u00b7 driver 570.1": 16,
        "A40 \u00b7 driver 570.10": 32,
    }


def test_comparability_key_is_computed_when_a_dataset_without_it_is_opened(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "r-1")
    write_run(tmp_path / "runs", "r-2", environment=OLD)
    merged(tmp_path, "driver")
    runs = tmp_path / "ds" / "runs.parquet"
    pl.read_parquet(runs).drop("comparability_key", "power_semantics").write_parquet(runs)
    metadata = tmp_path / "ds" / "dataset.json"
    metadata.write_text(json.dumps(seal.seal(json.loads(metadata.read_text()), tmp_path / "ds")))
    assert cells.build_cells(open_dataset(tmp_path / "ds").runs)["n"].to_list() == [1, 1]


VALUES = st.fixed_dictionaries(
    {
        "driver": st.sampled_from([None, "570", "580"]),
        "gpu_name": st.sampled_from([None, "A", "B"]),
        "power_limit_w": st.sampled_from([None, 300.0, 249.5]),
        "energy_source": st.sampled_from([None, "counter", "integral"]),
        "valid": st.booleans(),
        "site": st.sampled_from(["grace", "delta"]),
        "batch": st.sampled_from([8, 16]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=12), st.integers(0, 99))
def test_no_cell_holds_two_values_of_a_comparability_attribute(rows: list[dict[str, Any]], seed: int) -> None:
    numbered = [{"run_id": f"r-{i:02d}", **row, "images_per_s": 1.0} for i, row in enumerate(rows)]
    runs = comparability.add_comparability_key(frame(*numbered))
    for ids in cells.build_cells(runs)["run_ids"].to_list():
        cell = runs.filter(pl.col("run_id").is_in(ids))
        assert all(cell[column].drop_nulls().n_unique() <= 1 for column in comparability.ATTRIBUTES.values())
    conflicts = comparability.find_conflicts(runs)
    assert bool(conflicts) == bool((runs.filter("valid")["comparability_key"] != "").any())
    random.Random(seed).shuffle(numbered)
    shuffled = comparability.add_comparability_key(frame(*numbered))
    assert shuffled.sort("run_id").equals(runs)
    assert comparability.find_conflicts(shuffled) == conflicts
