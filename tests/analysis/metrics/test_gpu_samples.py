"""Samples of one GPU: slices where the clock moves forward, row by row where it goes back, with equal results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.metrics import gpu_samples
from analysis.metrics.gpu_samples import GpuSamples
from tests.analysis.build import rewrite, write_run

S = 1_000_000_000


def samples_at(t_s: list[float], power_w: list[float | None] | None = None) -> GpuSamples:
    rows = pl.DataFrame(
        {
            "gpu_uuid": pl.Series(["GPU-1"] * len(t_s), dtype=pl.String),
            "t_mono_ns": [round(t * S) for t in t_s],
            "tick_seq": list(range(len(t_s))),
            "power_instant_w": pl.Series(power_w or [300.0] * len(t_s), dtype=pl.Float32),
        }
    )
    return GpuSamples.split(rows, ["power_instant_w"])[0]


def by_rows(samples: GpuSamples, start_ns: int, end_ns: int) -> list[int]:
    """Return the ticks that a bracket holds, row by row, in any order."""
    times = samples.t_ns.tolist()
    low = max((t for t in times if t <= start_ns), default=start_ns)
    high = min((t for t in times if t >= end_ns), default=end_ns)
    return [tick for t, tick in zip(times, samples.tick.tolist(), strict=True) if low <= t <= high]


@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "out of order"])
def test_bracket_holds_the_same_rows_where_the_clock_goes_back(mixed: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        times = np.sort(rng.integers(0, 12, rng.integers(1, 20)))  # many times come twice
        samples = samples_at((rng.permutation(times) if mixed else times).astype(float).tolist())
        start, end = sorted((rng.integers(-2, 28, 2) * (S // 2)).tolist())
        assert samples.bracket(start, end).tick.tolist() == by_rows(samples, start, end)
        inside = [tick for t, tick in zip(samples.t_ns, samples.tick, strict=True) if start <= t <= end]
        assert samples.tick[samples.inside(start, end)].tolist() == inside
        assert samples.touches([(start, end)]) == bool(inside)


def test_gap_is_found_in_rows_out_of_order() -> None:
    times = [0.0, 1.0, 2.0, 7.0, 8.0, 9.0]
    shuffled = samples_at([times[i] for i in (0, 1, 3, 2, 4, 5)])
    assert not shuffled.ordered
    gap = gpu_samples.check_column(shuffled, "power_instant_w", (S, 8 * S), 3.0)
    assert gap == gpu_samples.check_column(samples_at(times), "power_instant_w", (S, 8 * S), 3.0)
    assert gap == "power_instant_w unknown for 5.00 s (limit 3.00 s)"


def test_known_drops_nulls_and_leaves_the_samples_unchanged() -> None:
    samples = samples_at([0.0, 1.0, 2.0, 3.0], [300.0, None, 302.0, 303.0])
    assert samples.known("power_instant_w").tick.tolist() == [0, 2, 3]
    assert samples.tick.tolist() == [0, 1, 2, 3]


def test_rows_without_a_gpu_are_dropped() -> None:
    rows = pl.DataFrame({"gpu_uuid": ["GPU-1", None], "t_mono_ns": [1, 2], "tick_seq": [0, 1]})
    assert [gpu.t_ns.tolist() for gpu in GpuSamples.split(rows, [])] == [[1]]
    assert GpuSamples.split(rows[1:], []) == []


def test_extreme_values_survive_a_merge_for_every_reader(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "in", "r-01")
    odd = {
        "throttle_reasons": [2**64 - 1, 0, None, 2**63],
        "sm_clock_mhz": [2**32 - 1, 0, None, 1],
        "temp_gpu_c": [9e11, -0.0, None, 1e-45],
    }
    edges = [pl.Series(name, values) for name, values in odd.items()]
    rewrite(folder, "samples_slow", lambda rows: rows[:4].with_columns(edges))
    merge.merge([tmp_path / "in"], tmp_path / "ds")
    path = tmp_path / "ds/samples_slow/site=grace/gpu=a40/run=r-01/part-000000.parquet"
    readers = pl.read_parquet(path, hive_partitioning=False), pq.read_table(path, partitioning=None)
    part = pq.read_table(folder / "samples_slow", partitioning=None)
    for name in odd:
        assert readers[0][name].to_list() == readers[1][name].to_pylist() == part[name].to_pylist()
    assert readers[1]["throttle_reasons"].to_pylist() == odd["throttle_reasons"]
