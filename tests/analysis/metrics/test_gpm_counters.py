"""Performance counters: weighted by each row's window, of one source, null where they cover too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import merge
from analysis.dataset import open_dataset
from analysis.metrics import telemetry
from analysis.stats import bottleneck
from inpaint_bench.core import schema
from tests.analysis.build import A40, UNIX0, S, card, rewrite, rewrite_json, write_part, write_run

H200, SECOND = card("h200"), card("second")
LOAD = {"sm_active_pct": 90.0, "sm_occupancy_pct": 40.0, "tensor_active_pct": 55.0, "dram_active_pct": 30.0}
SECONDS = (pl.col("t_mono_ns") - 1000 * S) / 1e9


def gpm_rows(
    folder: Path,
    *,
    gpu: str = H200,
    source: str = "nvml",
    window_s: float = 1.0,
    index: int = 0,
    first_s: float = -9.0,
    last_s: float = 35.0,
    **values: Any,
) -> None:
    """Write rows of samples_gpm, one at the end of every window."""
    at = np.arange(first_s, last_s, window_s)
    t = 1000 * S + np.round(at * S).astype(np.int64)
    head = {"run_id": folder.name.removeprefix("run-"), "gpu_uuid": gpu, "source": source, "read_us": 300.0}
    times = {"tick_seq": np.arange(len(t)) + 1000 * index, "t_mono_ns": t, "t_unix_ns": t + UNIX0}
    figures = {name: np.full(len(t), value) for name, value in (LOAD | values).items() if isinstance(value, float)}
    text = {name: value for name, value in values.items() if isinstance(value, str)}
    rows = {**head, **times, "window_ms": 1000 * window_s, **figures, **text}
    write_part(folder / "samples_gpm", "samples_gpm", rows, index)


def row_of(tmp_path: Path) -> dict[str, Any]:
    merge.merge([tmp_path / "delta"], tmp_path / "ds")
    return open_dataset(tmp_path / "ds").runs.row(0, named=True)


def h200(tmp_path: Path, **changes: Any) -> Path:
    return write_run(tmp_path / "delta", gpu="h200", site="delta", power_w=600.0, **changes)


def test_run_has_the_means_of_its_counters_and_their_source(tmp_path: Path) -> None:
    gpm_rows(h200(tmp_path), pcie_rx_mib_s=250.0)
    row = row_of(tmp_path)
    assert row["valid"], row["invalid_reason"]
    assert {name: row[name] for name in LOAD} == pytest.approx(LOAD)
    assert (row["counters_source"], row["pcie_rx_mib_s"]) == ("gpm", pytest.approx(250))
    assert "pcie_tx_mib_s=gpm counters cover 0 % of the measure windows, 80 % are needed" in row["null_reasons"]


def test_bottleneck_evidence_names_the_source_of_the_counters(tmp_path: Path) -> None:
    gpm_rows(h200(tmp_path))
    result = bottleneck.classify(row_of(tmp_path))
    assert (result.name, result.tier) == ("tensor_bound", bottleneck.COUNTERS)
    assert result.evidence == "tensor cores active 55.0 %, SMs active 90.0 % (by gpm)"


def test_rows_are_weighted_by_their_overlap_with_the_measure_window(tmp_path: Path) -> None:
    """Ten 1-s rows at 20 % and two 10-s rows at 80 %: a mean of rows would give 30 %."""
    folder = h200(tmp_path)
    gpm_rows(folder, tensor_active_pct=20.0, first_s=1.0, last_s=10.5)
    gpm_rows(folder, tensor_active_pct=80.0, first_s=20.0, last_s=30.5, window_s=10.0, index=1)
    assert row_of(tmp_path)["tensor_active_pct"] == pytest.approx(60)


def test_rows_outside_the_window_are_not_in_the_mean(tmp_path: Path) -> None:
    folder = h200(tmp_path)
    gpm_rows(folder)
    idle = pl.when(SECONDS.is_between(0.4, 30.6)).then("tensor_active_pct").otherwise(pl.lit(0.0))
    rewrite(folder, "samples_gpm", lambda rows: rows.with_columns(idle.cast(pl.Float32).alias("tensor_active_pct")))
    assert row_of(tmp_path)["tensor_active_pct"] == pytest.approx(55)


def test_counters_that_leave_out_idle_time_may_exceed_the_utilisation(tmp_path: Path) -> None:
    """Regression: SMs active 79 % of the covered 83 % of a window, and a GPU busy 71 % of all of it: not valid."""
    folder = h200(tmp_path)
    gpm_rows(folder, first_s=6.0, sm_active_pct=95.0)
    busy = pl.when(SECONDS > 5.0).then(pl.lit(95.0)).otherwise(pl.lit(0.0)).cast(pl.Float32)
    rewrite(folder, "samples_fast", lambda rows: rows.with_columns(busy.alias("gpu_util_pct")))
    row = row_of(tmp_path)
    assert row["valid"], row["invalid_reason"]
    assert row["gpu_util_pct"] < 80 < row["sm_active_pct"]


def test_low_coverage_gives_null_with_the_coverage_as_reason(tmp_path: Path) -> None:
    gpm_rows(h200(tmp_path), first_s=15.0)
    row = row_of(tmp_path)
    assert (row["tensor_active_pct"], row["counters_source"]) == (None, "none")
    assert "tensor_active_pct=gpm counters cover 53 % of the measure windows, 80 % are needed" in row["null_reasons"]


def test_gpu_without_gpm_gives_null_with_the_recorded_reason(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "delta")
    rows = dict.fromkeys(LOAD)
    gpm_rows(folder, gpu=A40, nulls=";".join(f"{name}=not_supported" for name in LOAD), **rows)
    rewrite(folder, "samples_gpm", lambda rows: rows.with_columns(pl.lit(None).alias(name) for name in LOAD))
    row = row_of(tmp_path)
    assert (row["sm_active_pct"], row["counters_source"]) == (None, "none")
    assert "sm_active_pct=not_supported" in row["null_reasons"]


class TestSeveralGpus:
    @staticmethod
    def two(tmp_path: Path) -> Path:
        folder = h200(tmp_path)
        for table in ("samples_fast", "samples_slow"):
            changes = [pl.lit(SECOND).cast(pl.Categorical).alias("gpu_uuid")]
            changes += [pl.col("energy_mj") + 12345] if table == "samples_fast" else []
            rewrite(folder, table, lambda rows, by=changes: pl.concat([rows, rows.with_columns(by)]))
        rewrite_json(
            folder,
            schema.MANIFEST,
            lambda m: {**m, "gpus": 2, "batch": 4, "devices": [*m["devices"], {**m["devices"][0], "uuid": SECOND}]},
        )
        return folder

    def test_give_the_mean_over_gpus(self, tmp_path: Path) -> None:
        folder = self.two(tmp_path)
        gpm_rows(folder)
        gpm_rows(folder, gpu=SECOND, sm_active_pct=70.0, index=1)
        gpm_rows(folder, gpu="GPU-of-a-neighbour", sm_active_pct=1.0, index=2)
        row = row_of(tmp_path)
        assert row["valid"], row["invalid_reason"]
        assert row["sm_active_pct"] == pytest.approx(80)

    def test_of_which_one_has_no_samples_give_null(self, tmp_path: Path) -> None:
        gpm_rows(self.two(tmp_path))
        row = row_of(tmp_path)
        assert row["sm_active_pct"] is None
        assert "sm_active_pct=gpm counters cover 0 % of the measure windows" in row["null_reasons"]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Any, Any, Any, list[tuple[int, int]]]:
    count = draw(st.integers(1, 30))
    times = st.lists(st.integers(0, 60 * S), min_size=count, max_size=count)
    t = np.array(draw(times), dtype=np.int64)
    window = np.array(draw(st.lists(st.integers(1, 20 * S), min_size=count, max_size=count)), dtype=np.int64)
    value = np.array(draw(st.lists(st.floats(0, 100), min_size=count, max_size=count)))
    start = draw(st.integers(0, 30 * S))
    spans = [(start, start + draw(st.integers(1, 20 * S)))]
    spans += [(spans[0][1] + S, spans[0][1] + 5 * S)] if draw(st.booleans()) else []
    return t, window, value, spans


@settings(max_examples=150, deadline=None)
@given(rows(), st.randoms(use_true_random=False))
def test_weighted_mean_lies_within_its_values_and_ignores_row_order(
    given_rows: tuple[Any, Any, Any, list[tuple[int, int]]], random: Any
) -> None:
    t, window, value, spans = given_rows
    result = telemetry.weighted_mean(t, window, value, spans)
    assert 0 <= result.coverage_pct <= 100
    if result.value is not None:
        assert value.min() <= result.value <= value.max()
    order = list(range(len(t)))
    random.shuffle(order)
    assert telemetry.weighted_mean(t[order], window[order], value[order], spans) == result


@settings(max_examples=80, deadline=None)
@given(rows(), st.integers(1, 10 * S))
def test_rows_without_overlap_do_not_change_the_weighted_mean(
    given_rows: tuple[Any, Any, Any, list[tuple[int, int]]], length: int
) -> None:
    t, window, value, spans = given_rows
    after = max(end for _, end in spans) + length
    more = [np.append(values, new) for values, new in ((t, after), (window, length), (value, 1e6))]
    assert telemetry.weighted_mean(*more, spans) == telemetry.weighted_mean(t, window, value, spans)
