"""Runs that share samples or a GPU at one time are not valid, and the sentence names the other run."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from analysis import merge
from analysis.dataset import open_dataset

from .build import S, card, rewrite, rewrite_json, write_run

BOOT = "11111111-2222-3333-4444-555555555555"
TABLES = ("samples_fast", "samples_slow", "steps")

SECOND = card("second")


def merged(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a dataset by run id."""
    merge.merge([tmp_path / "runs"], tmp_path / "ds")
    return {row["run_id"]: row for row in open_dataset(tmp_path / "ds").runs.to_dicts()}


def measured(tmp_path: Path, run_id: str, **changes: Any) -> Path:
    """Write a run whose samples and steps came at irregular times, as those of every real run do."""
    folder = write_run(tmp_path / "runs", run_id, noise=0.02, **changes)
    rng = np.random.default_rng(sum(run_id.encode()))

    def scatter(rows: pl.DataFrame, column: str, limit_ns: int) -> pl.DataFrame:
        return rows.with_columns(pl.col(column) + rng.integers(0, limit_ns, rows.height))

    for table in ("samples_fast", "samples_slow"):
        rewrite(folder, table, lambda rows: scatter(rows, "t_mono_ns", 100_000))
    rewrite(folder, "steps", lambda rows: scatter(rows, "data_wait_ns", 10_000))
    return folder


def copied(folder: Path, run_id: str, **changes: Any) -> Path:
    """Copy a run directory under another run id, in the manifest and in every row."""
    target = folder.with_name(f"run-{run_id}")
    shutil.copytree(folder, target)
    rewrite_json(target, "manifest.json", lambda manifest: {**manifest, "run_id": run_id, **changes})
    for table in TABLES:
        rewrite(target, table, lambda rows: rows.with_columns(pl.lit(run_id).alias("run_id")))
    return target


def shift(folder: Path, seconds: float) -> None:
    """Move everything that a run recorded by some time, on both clocks."""
    time_ns = round(seconds * S)
    for table in TABLES:
        rewrite(folder, table, lambda rows: rows.with_columns(pl.col("^t_.*_ns$") + time_ns))
    moved = {f"t_{edge}_{clock}_ns" for edge in ("start", "end") for clock in ("mono", "unix")}
    rewrite_json(
        folder,
        "windows.json",
        lambda windows: [{k: v + time_ns if k in moved else v for k, v in window.items()} for window in windows],
    )
    times = ("started_unix_ns", "ended_unix_ns")
    rewrite_json(folder, "manifest.json", lambda manifest: manifest | {k: manifest[k] + time_ns for k in times})


def test_other_runs_share_no_rows(tmp_path: Path) -> None:
    for index in range(4):
        measured(tmp_path, f"r-{index}")
    assert all(row["valid"] and row["invalid_across_runs"] is None for row in merged(tmp_path).values())


def test_a_copy_under_another_run_id_does_not_count(tmp_path: Path) -> None:
    copied(measured(tmp_path, "r-a"), "r-b")
    rows = merged(tmp_path)
    assert not rows["r-b"]["valid"]
    assert "same rows as in run r-a; one of them is a copy, remove it" in rows["r-b"]["invalid_reason"]
    assert rows["r-a"]["valid"]


def test_of_copies_with_different_labels_neither_counts(tmp_path: Path) -> None:
    copied(measured(tmp_path, "r-a"), "r-b", recipe="compile")
    rows = merged(tmp_path)
    assert {run_id: row["valid"] for run_id, row in rows.items()} == {"r-a": False, "r-b": False}


def test_a_copy_that_lost_a_part_shares_the_time_of_the_first(tmp_path: Path) -> None:
    part = min((copied(measured(tmp_path, "r-a"), "r-b") / "steps").iterdir())
    part.write_bytes(b"PAR1")
    rows = merged(tmp_path)
    assert "another run measured on the same GPU at the same time: r-a" in rows["r-b"]["invalid_reason"]


def test_two_runs_on_one_gpu_at_one_time_are_not_valid(tmp_path: Path) -> None:
    rows = at_one_time(tmp_path, lambda folder: shift(folder, 12))
    for own, other in (("r-a", "r-b"), ("r-b", "r-a")):
        expected = f"another run measured on the same GPU at the same time: {other}"
        assert rows[own]["invalid_reason"] == rows[own]["invalid_across_runs"] == expected


def read_time(folder: Path) -> int:
    times: list[int] = []
    rewrite_json(folder, "manifest.json", lambda manifest: times.append(manifest["started_unix_ns"]) or manifest)
    return times[0]


def at_one_time(tmp_path: Path, change: Callable[[Path], None]) -> dict[str, dict[str, Any]]:
    """Merge two runs at one time after a change to the second one."""
    first, second = measured(tmp_path, "r-a"), measured(tmp_path, "r-b")
    shift(second, (read_time(first) - read_time(second)) / S)
    change(second)
    return merged(tmp_path)


def test_runs_on_two_gpus_at_one_time_are_valid(tmp_path: Path) -> None:
    def other_gpu(folder: Path) -> None:
        for table in ("samples_fast", "samples_slow"):
            rewrite(folder, table, lambda rows: rows.with_columns(pl.lit(SECOND).alias("gpu_uuid")))
        rewrite_json(
            folder, "manifest.json", lambda m: m | {"devices": [device | {"uuid": SECOND} for device in m["devices"]]}
        )

    assert all(row["valid"] for row in at_one_time(tmp_path, other_gpu).values())


def test_of_one_boot_the_monotonic_clock_decides(tmp_path: Path) -> None:
    """A wrong wall clock does not hide an overlap."""
    for name in ("r-a", "r-b"):
        measured(tmp_path, name, boot_id=BOOT)  # equal monotonic times, other wall times
    assert not any(row["valid"] for row in merged(tmp_path).values())


def test_window_whose_clocks_contradict_each_other_spoils_no_other_run(tmp_path: Path) -> None:
    first, second = (measured(tmp_path, name, boot_id=BOOT) for name in ("r-a", "r-b"))
    shift(second, 600)

    def lengthen(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [window | {"t_end_mono_ns": window["t_end_mono_ns"] + 3600 * S} for window in windows]

    rewrite_json(first, "windows.json", lengthen)
    rows = merged(tmp_path)
    assert (rows["r-a"]["valid"], rows["r-b"]["valid"]) == (False, True)


def test_a_run_from_the_future_is_not_valid(tmp_path: Path) -> None:
    folder = measured(tmp_path, "r-a")
    shift(folder, time.time() + 3600 - read_time(folder) / S)
    reason = merged(tmp_path)["r-a"]["invalid_across_runs"]
    assert re.fullmatch(
        r"it ran at 20\d\d-\d\d-\d\d \d\d:\d\d UTC, and this merge at 20\d\d-\d\d-\d\d \d\d:\d\d: "
        r"the clock of site grace or of this machine is wrong",
        str(reason),
    )


@pytest.mark.parametrize("name", ["flop_per_image", "parameters"])
def test_a_run_of_other_work_than_the_others_of_its_cell_is_not_valid(tmp_path: Path, name: str) -> None:
    facts = {"flop_per_image": 2.4e12, "parameters": 1000}
    for number in range(3):
        changed = facts | {name: 2 * facts[name]} if number == 2 else facts
        measured(tmp_path, f"r-{number}", model="m", workload_facts=changed)
    rows = merged(tmp_path)
    assert [rows[f"r-{number}"]["valid"] for number in range(3)] == [True, True, False]
    value, other = f"{facts[name]:.10g}", f"{2 * facts[name]:.10g}"
    expected = f"{name} is {other}, and runs of this work and code have {value} (2), {other} (1)"
    assert rows["r-2"]["invalid_reason"] == expected
    shutil.rmtree(tmp_path / "runs" / "run-r-1")
    assert not any(row["valid"] for row in merged(tmp_path).values()), "nothing tells which one is right"


def test_position_tokens_are_other_work(tmp_path: Path) -> None:
    # SD 1.5 on an H200, measured: four tokens beside none.
    for number, (tokens, flop) in enumerate(((0, 4656789655552.0), (0, 4656789655552.0), (4, 4657804152832.0))):
        measured(tmp_path, f"r-{number}", workload_facts={"flop_per_image": flop, "location_tokens": tokens})
    assert all(row["valid"] for row in merged(tmp_path).values())


def test_other_code_may_count_other_operations(tmp_path: Path) -> None:
    for number, commit in enumerate(("a" * 40, "b" * 40)):
        facts = {"flop_per_image": (1 + number) * 1e12}
        measured(tmp_path, f"r-{number}", workload_facts=facts, environment={"git": {"commit": commit}})
    assert all(row["valid"] for row in merged(tmp_path).values())


def test_one_lost_edge_of_the_counter_does_not_stop_the_merge_of_the_others(tmp_path: Path) -> None:
    for number in range(5):
        measured(tmp_path, f"r-{number}")
    measured(tmp_path, "r-lost", counter=False)
    rows = merged(tmp_path)
    reason = "its energy is the integral of sampled power, and that of 5 comparable runs the counter's"
    assert rows["r-lost"]["invalid_reason"] == reason
    assert sum(row["valid"] for row in rows.values()) == 5


def stated(rows: dict[str, dict[str, Any]], name: str) -> list[str]:
    """Return the runs that are told of a figure."""
    return [run_id for run_id, row in rows.items() if name in (row["invalid_reason"] or "")]


@pytest.mark.parametrize("changes", [{"recipe": "tf32"}, {"batch": 16}, {"site": "delta"}, {"gpu": "h200"}])
def test_one_model_has_one_number_of_parameters(tmp_path: Path, changes: dict[str, Any]) -> None:
    for number in range(3):
        facts = {"parameters": 1000 + (number == 2)}
        measured(tmp_path, f"r-{number}", model="m", workload_facts=facts, **(changes if number == 2 else {}))
    assert stated(merged(tmp_path), "parameters is 1001") == ["r-2"]


LORA = {"name": "lora", "field": "lora_rank", "requested": 4, "effective": {"rank": 4, "layers": 128}, "active": True}


@pytest.mark.parametrize("changes", [{"resolution_px": 1024}, {}])
def test_another_resolution_and_adapters_are_other_work(tmp_path: Path, changes: dict[str, Any]) -> None:
    measured(tmp_path, "r-0", workload_facts={"flop_per_image": 2.4e12})
    lora = {} if changes else {"recipe": "lora", "levers": [LORA]}
    measured(tmp_path, "r-1", workload_facts={"flop_per_image": 1.7e12, **changes}, **lora)
    assert stated(merged(tmp_path), "flop_per_image") == []


@pytest.mark.parametrize(
    ("field", "requested", "values"),
    [
        ("linears", "fp8", [494, 494, 247]),
        ("compile", "default", [{"graphs": 2, "breaks": 0}, {"graphs": 1, "breaks": 0}, {"graphs": 2, "breaks": 1}]),
        ("exchange", "in_place", [36, None, 18]),
    ],
)
def test_read_backs_that_differ_between_replicates_are_told(
    tmp_path: Path, field: str, requested: str, values: list[Any]
) -> None:
    lever = {"name": "x", "field": field, "requested": requested, "active": True}
    for number, value in enumerate(values):
        active = {"effective": value, "active": value is not None or None}
        measured(tmp_path, f"r-{number}", recipe="x", seed=number, levers=[lever | active])
    text = f"and in the runs of this cell {', '.join(sorted({json.dumps(value) for value in values if value}))}"
    told = [text in (row["warnings"] or "") for row in merged(tmp_path).values()]
    assert told == [value is not None for value in values]


def test_read_backs_of_different_cells_may_differ(tmp_path: Path) -> None:
    for number, batch in enumerate((8, 16)):
        lever = {"name": "fp8", "field": "linears", "requested": "fp8", "effective": 494 - number, "active": True}
        measured(tmp_path, f"r-{number}", recipe="fp8", batch=batch, levers=[lever])
    assert not any("was read back" in (row["warnings"] or "") for row in merged(tmp_path).values())


def test_levers_that_are_too_long_for_a_cell_stop_no_merge(tmp_path: Path) -> None:
    lever = {"name": "fp8", "field": "linears", "requested": "fp8", "effective": 494, "active": True}
    measured(tmp_path, "r-0", recipe="fp8", levers=[lever])
    measured(tmp_path, "r-1", recipe="fp8", levers=[lever | {"evidence": "x" * 300_000}])
    assert all(row["valid"] for row in merged(tmp_path).values())
