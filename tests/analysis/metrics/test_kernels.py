"""Contradictions in the tables of a profile: each has a sentence."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from analysis.ingest import parts
from analysis.metrics.audit import kernels
from analysis.metrics.facts import Facts
from inpaint_bench.core.kernels import IDLE
from inpaint_bench.core.records import Manifest, Window, to_record
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_TIMES, TABLES
from tests.analysis.build import S, manifest

STEP_MS, CALLS = 500.0, ["step", "eager step"]
TIMES = {"conv": 300.0, "norm": 120.0, "": 80.0}  # of the kernels of a call; the last one is idle time
EXCHANGE = {"step": {"ms": 40.0, "exposed_ms": 10.0, "call_ms": STEP_MS}}
COUNTED = {"ipc": 2.0, "warps_issued": 0.5, "warps_eligible": 0.9, "instructions": 1e6, "inst_fma": 4e5}


def frame(table: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    empty = parts.empty_frame(table).with_columns(pl.selectors.categorical().cast(pl.String))
    return pl.DataFrame([dict.fromkeys(empty.columns) | row for row in rows], schema=empty.schema, strict=False)


def times(changes: dict[int, dict[str, Any]], calls: list[str]) -> pl.DataFrame:
    rows = [
        {"call": call, "measured": call == "step", "kernel": name, "kind": "other" if name else IDLE, "ms": ms}
        | {"launches": 3}
        for call in calls
        for name, ms in TIMES.items()
    ]
    return frame(KERNEL_TIMES, [row | changes.get(index, {}) for index, row in enumerate(rows)])


def facts(rows: pl.DataFrame, counters: pl.DataFrame | None = None, **exchange: float) -> Facts:
    communication = {"step": EXCHANGE["step"] | exchange}
    profile = {"profiler": "torch", "calls": CALLS, "communication": communication}
    window = {"window_id": "w", "kind": "measure", "status": "completed", "steps": 4, "images": 32}
    window |= {"t_start_mono_ns": 0, "t_end_mono_ns": 2 * S, "t_start_unix_ns": 0, "t_end_unix_ns": 2 * S}
    tables = {name: parts.empty_frame(name).with_columns(pl.selectors.categorical().cast(pl.String)) for name in TABLES}
    tables["steps"] = frame("steps", [{"window_id": "w", "step": step, "device_ms": STEP_MS} for step in range(4)])
    tables |= {KERNEL_TIMES: rows} | ({} if counters is None else {KERNEL_COUNTERS: counters})
    record = to_record(manifest("r-1", profile=profile), Manifest)
    return Facts(manifest=record, windows=[to_record(window, Window)], tables=tables)


def counters(**changes: Any) -> pl.DataFrame:
    row = {"call": "step", "kernel": "conv", "sm_pct": 70.0} | COUNTED
    return frame(KERNEL_COUNTERS, [row | changes | {"launch": launch} for launch in (1, 2)])


def test_a_sound_profile_has_no_contradiction() -> None:
    assert list(kernels.check_times(facts(times({}, CALLS)))) == []
    assert list(kernels.check_counters(facts(times({}, CALLS), counters()))) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (times({}, CALLS[:1]), "has no kernel of eager step, which was profiled"),
        (times({}, [*CALLS, "call"]), "has kernels of call, which was not profiled"),
        (times({0: {"ms": -1.0}}, CALLS), "row(s) that no profile gives, e.g. conv: 3 launches of other in -1.0 ms"),
        (times({0: {"launches": 0}}, CALLS), "row(s) that no profile gives, e.g. conv: 0 launches of other in 300.0"),
        (pl.concat([times({}, CALLS)] * 2), "repeats 6 row(s)"),
        (times({1: {"ms": 310.0}}, CALLS), "kernels are not in the order of their times in 1 place(s)"),
        (times({0: {"ms": 2000.0}}, CALLS), "kernels and gaps of step take 2200.0 ms, a step 500.0 ms"),
        (times({0: {"ms": 3.0}, 1: {"ms": 1.0}}, CALLS), "kernels and gaps of step take 84.0 ms, a step 500.0 ms"),
    ],
)
def test_times_that_contradict(rows: pl.DataFrame, text: str) -> None:
    assert text in "; ".join(kernels.check_times(facts(rows)))


@pytest.mark.parametrize("exchange", [{"exposed_ms": 60.0}, {"ms": 700.0}])
def test_communication_that_is_longer_than_its_whole(exchange: dict[str, float]) -> None:
    text = "communication of step: exposed, total and length of the call do not ascend"
    assert text in "; ".join(kernels.check_times(facts(times({}, CALLS), **exchange)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"launch": 1}, "repeats 1 launch(es)"),
        ({"kernel": "gemm"}, "has kernels that kernel_times does not have, e.g. gemm"),
        ({"sm_pct": 140.0}, "no GPU counts such values of sm_pct"),
        ({"warps_issued": 1.4, "ipc": 5.6, "warps_eligible": 2.0}, "no GPU counts such values of warps_issued"),
        ({"inst_fma": 2e6}, "inst_fma counts more instructions than there are"),
        ({"warps_eligible": 0.2}, "more warps were issued than were eligible"),
        ({"ipc": 3.0}, "ipc is not that of four schedulers with warps_issued"),
    ],
)
def test_counters_that_contradict(changes: dict[str, Any], text: str) -> None:
    rows = counters(**changes) if "launch" not in changes else counters().with_columns(pl.lit(1).alias("launch"))
    assert text in "; ".join(kernels.check_counters(facts(times({}, CALLS), rows)))
