"""Contradictions in the tables of a profile: each has a sentence."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from analysis.ingest import parts
from analysis.metrics.audit import kernels
from analysis.metrics.facts import Facts
from inpaint_bench.core.kernels import IDLE
from inpaint_bench.core.records import LeverReport, Manifest, ProfileFacts, Window, to_record
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
    # Measured on an H200: blocks of 64 threads use two schedulers, a block alone one, and replays differ.
    for ipc, warps in ((1.05, 0.53), (0.04, 0.03), (1.67, 0.36), (0.89, 0.28)):
        rows = counters(ipc=ipc, warps_issued=warps)
        assert list(kernels.check_counters(facts(times({}, CALLS), rows))) == []


def test_hit_rates_of_two_passes_are_above_100_percent() -> None:
    """Accept what ncu printed on H200s for 11 of 1,549 launches: 100.01 to 105.74 %."""
    assert list(kernels.check_counters(facts(times({}, CALLS), counters(l2_hit_pct=105.7)))) == []


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (times({}, CALLS[:1]), "has no kernel of eager step, which was profiled"),
        (times({}, [*CALLS, "call"]), "has kernels of call, which was not profiled"),
        (times({0: {"ms": -1.0}}, CALLS), "1 row that no profile gives, e.g. conv: 3 launches of other in -1.0 ms"),
        (times({0: {"launches": 0}}, CALLS), "1 row that no profile gives, e.g. conv: 0 launches of other in 300.0"),
        (pl.concat([times({}, CALLS)] * 2), "repeats 6 rows"),
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
        ({"launch": 1}, "repeats 1 launch"),
        ({"kernel": "gemm"}, "has kernels that kernel_times does not have, e.g. gemm"),
        ({"sm_pct": 105.0}, "no GPU counts such values of sm_pct"),
        ({"l2_hit_pct": 140.0}, "no GPU counts such values of l2_hit_pct"),
        ({"warps_issued": 1.4, "ipc": 5.6, "warps_eligible": 2.0}, "no GPU counts such values of warps_issued"),
        ({"inst_fma": 2e6}, "inst_fma counts more instructions than there are"),
        ({"warps_eligible": 0.2}, "more warps were issued than were eligible"),
        ({"ipc": 3.5}, "ipc is not that of one to four schedulers with warps_issued"),
        ({"ipc": 0.1}, "ipc is not that of one to four schedulers with warps_issued"),
    ],
)
def test_counters_that_contradict(changes: dict[str, Any], text: str) -> None:
    rows = counters(**changes) if "launch" not in changes else counters().with_columns(pl.lit(1).alias("launch"))
    assert text in "; ".join(kernels.check_counters(facts(times({}, CALLS), rows)))


TIMELINE: dict[str, Any] = {"steps": 4, "length_ms": 2000.0, "kernels": 900, "gaps": 40, "idle_ms": 300.0}
TIMELINE |= {"longest_gap_ms": 60.0, "wait_ms": 200.0, "idle_in_waits_ms": 150.0}
TIMELINE |= {"copied_ms": {"host to device": 8.0, "device to device": 20.0}}
TIMELINE |= {"copied_mib": {"host to device": 400.0, "device to device": 40_000.0}}


def timeline(**changes: Any) -> str:
    run = facts(times({}, CALLS))
    run.manifest.profile = to_record({"profiler": "nsys", "timeline": TIMELINE | changes}, ProfileFacts)
    return "; ".join(kernels.check_timeline(run))


@pytest.mark.parametrize(
    "changes", [{}, {"wait_ms": None, "idle_in_waits_ms": None}, {"copied_ms": {}, "copied_mib": {}}]
)
def test_a_sound_timeline_has_no_contradiction(changes: dict[str, Any]) -> None:
    assert timeline(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"idle_ms": 2500.0, "gaps": 400}, "idle_ms beside length_ms: 2,500, and at most 2,000"),
        ({"idle_ms": 900.0, "gaps": 2}, "idle_ms beside its gaps: 900, and at most 120"),
        ({"gaps": 0}, "idle_ms beside its gaps"),
        ({"longest_gap_ms": 400.0}, "longest_gap_ms beside idle_ms"),
        ({"idle_in_waits_ms": 250.0}, "idle_in_waits_ms beside wait_ms"),
        ({"idle_in_waits_ms": 350.0, "wait_ms": 500.0}, "idle_in_waits_ms beside idle_ms"),
        ({"wait_ms": None}, "idle_in_waits_ms beside wait_ms"),
        ({"wait_ms": 4000.0}, "wait_ms beside length_ms: 3,000, and at most 2,000"),
        ({"copied_ms": {"host to device": 4000.0}}, "copied_ms host to device beside length_ms"),
        ({"copied_mib": {"host to device": 9000.0}}, "copied_mib host to device beside copied_ms and the bus"),
        ({"copied_mib": {"device to device": 1e6}}, "copied_mib device to device beside copied_ms and the bus"),
        ({"copied_mib": {"device to host": 5.0}}, "copied_mib device to host beside copied_ms and the bus"),
        ({"idle_ms": -1.0}, "idle_ms beside length_ms: -1.00"),
        ({"steps": 0}, "one beside steps and kernels: 1.00, and at most 0"),
        ({"length_ms": 20_000.0}, "a step of the timeline takes 4962.5 ms, a step 500.0 ms"),
        ({"length_ms": 500.0}, "a step of the timeline takes 87.5 ms, a step 500.0 ms"),
    ],
)
def test_a_timeline_that_contradicts_itself(changes: dict[str, Any], text: str) -> None:
    assert text in timeline(**changes)


ATTENTION = {0: {"kind": "attention", "detail": "flash", "kernel": "flash_fwd_kernel"}}


@pytest.mark.parametrize(
    ("field", "requested", "kernel", "told"),
    [
        ("attention", "flash", {}, False),
        ("attention", "flash4", {}, True),
        ("attention", "flash4", {"detail": "FlashAttention-4"}, False),
        ("attention", "flash", {"detail": "FlashAttention-4"}, True),
        ("attention", "cudnn", {}, True),
        ("attention", "math", {"detail": "math", "kernel": "softmax_warp_forward"}, False),
        ("linears", "fp8", {}, True),
        ("linears", "fp8", {"kind": "GEMM", "detail": "CUTLASS", "kernel": "sm90_xmma_gemm_e4m3bf16"}, False),
        ("unet", "nhwc", {}, True),
        ("unet", "nhwc", {"kind": "norm", "detail": "", "kernel": "_group_norm_forward"}, False),
        ("volume_unet", "fused", {}, True),
        ("ema", True, {}, False),
        ("of_a_later_version", "x", {}, False),
    ],
)
def test_kernels_of_another_library_than_the_active_levers(
    field: str, requested: Any, kernel: dict[str, Any], told: bool
) -> None:
    run = facts(times({0: ATTENTION[0] | kernel}, CALLS))
    run.manifest.levers = [LeverReport(name="x", field=field, requested=requested, active=True)]
    text = "; ".join(kernels.check_levers(run))
    assert ("lever x is called active, and the profile has no kernel of it, but" in text) == told
    run.manifest.levers[0].active = False
    assert list(kernels.check_levers(run)) == []


def test_the_kernels_of_a_profile_that_lacks_a_call_tell_nothing() -> None:
    run = facts(times(ATTENTION, CALLS))
    run.manifest.levers = [LeverReport(name="attn_flash4", field="attention", requested="flash4", active=True)]
    assert "no kernel of it, but attention flash flash_fwd_kernel" in next(kernels.check_levers(run))
    assert run.manifest.profile is not None
    run.manifest.profile.problems = ["no trace"]
    assert list(kernels.check_levers(run)) == []
