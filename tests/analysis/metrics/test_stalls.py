"""Stalled steps are counted and priced, on a GPU and on a CPU; waiting that costs the GPU nothing is none."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from analysis import merge
from analysis.dataset import open_dataset
from analysis.metrics.gpu_samples import Span
from analysis.metrics.steadiness import Stalls, find_stalls
from tests.analysis.build import S, rewrite, rewrite_json, write_run


def steps(host_s: list[float], device_s: list[float] | None) -> tuple[pl.DataFrame, Span]:
    """Return the steps of a window that opens at 100 s, by the time from each step's start to the next."""
    start = 100 * S + np.concatenate([[0], np.cumsum(np.array(host_s) * S)]).astype(np.int64)
    device_ms = [None] * len(host_s) if device_s is None else [1000 * seconds for seconds in device_s]
    rows = pl.DataFrame({"t_start_mono_ns": start[:-1], "device_ms": pl.Series(device_ms, dtype=pl.Float32)})
    return rows, (100 * S, int(start[-1]))


@pytest.mark.parametrize(
    ("host_s", "device_s", "expected"),
    [
        ([0.5] * 20, [0.5] * 20, Stalls()),
        ([0.5] * 20, None, Stalls()),
        ([0.5] * 19 + [4.5], None, Stalls(count=1, seconds=4)),  # on a CPU
        ([0.5] * 19 + [4.5], [0.5] * 20, Stalls(count=1, seconds=4)),  # the GPU waited
        ([0.5] * 19 + [4.5], [0.5] * 19 + [4.5], Stalls(count=1, seconds=4)),  # the GPU was slow: counted once
        ([0.01] * 19 + [9.81], [0.5] * 20, Stalls()),  # the host was ahead of the GPU, which was never idle
        ([0.5] * 19 + [1.4], None, Stalls()),  # less than five medians
        ([0.05] * 19 + [0.9], None, Stalls()),  # less than a second
        ([2.2] * 20, [0.4] * 20, Stalls()),  # every step waits for data
    ],
)
def test_stalls_of_a_window(host_s: list[float], device_s: list[float] | None, expected: Stalls) -> None:
    found = find_stalls(*steps(host_s, device_s))
    assert found.count == expected.count
    assert found.seconds == pytest.approx(expected.seconds, abs=0.02)


def test_stalled_run_is_valid_with_its_cost_and_its_rate_without_it(tmp_path: Path) -> None:
    """Let half of the steps be lost in one that takes 15.5 s: 30 steps of batch 8 in 30 s."""
    row = _merged_stall(tmp_path, uniform_steps=True)
    assert row["valid"], row["invalid_reason"]
    assert (row["stalls"], row["stall_s"], row["stall_pct"]) == (1, pytest.approx(15), pytest.approx(50))
    assert row["images_per_s"] == pytest.approx(240 / 30)
    assert row["images_per_s_steady"] == pytest.approx(16)
    assert row["flags"] == "stalled"
    assert "1 step stalled for 15.0 s, 50.0 % of the measure window; 16 images/s without" in row["warnings"]


def test_a_long_step_among_steps_of_different_work_is_no_stall(tmp_path: Path) -> None:
    row = _merged_stall(tmp_path, uniform_steps=False)
    assert (row["stalls"], row["flags"]) == (None, None)


def _merged_stall(tmp_path: Path, *, uniform_steps: bool) -> dict[str, Any]:
    folder = write_run(tmp_path / "in")
    rewrite_json(folder, "manifest.json", lambda manifest: _with_facts(manifest, uniform_steps))
    shifts = {"t_start_mono_ns": pl.col("step") > 10, "t_end_mono_ns": pl.col("step") >= 10}
    later = [pl.col(name) + pl.when(condition).then(15 * S).otherwise(0) for name, condition in shifts.items()]
    rewrite(folder, "steps", lambda rows: rows.head(30).with_columns(later))
    rewrite_json(folder, "windows.json", lambda windows: [windows[0], windows[1] | {"steps": 30, "images": 240}])
    merge.merge([tmp_path / "in"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds").runs.row(0, named=True)


def _with_facts(manifest: dict[str, Any], uniform_steps: bool) -> dict[str, Any]:
    return manifest | {"workload_facts": (manifest.get("workload_facts") or {}) | {"uniform_steps": uniform_steps}}
