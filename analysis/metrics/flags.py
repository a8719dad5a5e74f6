"""What touched a window or a run, as codes beside the words: a reader can leave such windows out.

A mark says that something happened, not that the figures are wrong: what makes a run invalid says so in
`invalid_reason`. Codes are joined with commas, in the order of `Flag`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import polars as pl

from inpaint_bench.core.schema import Reason, WindowKind, WindowStatus

from . import energy
from .audit import GpuSamples


class Flag(StrEnum):
    REQUEUED = "requeued"  # the job was started again; a window: of a start before the manifest's
    PREEMPTED = "preempted"  # the run ended so; a window: it was open then
    INTERRUPTED = "interrupted"  # cut by a signal, or by the end of its process
    THERMAL = "throttled_thermal"
    POWER_CAP = "throttled_power"
    POWER_BRAKE = "throttled_brake"  # a signal of the power supply
    CO_TENANT = "co_tenant"  # seen from then on: nobody saw it leave
    POWER_LIMIT = "power_limit_changed"  # from then on
    XID = "xid"
    GPU_LOST = "gpu_lost"
    ECC = "ecc"  # errors became more within the run


THERMAL_PCT, POWER_CAP_PCT = 1.0, 5.0  # of a window; the bottleneck rules have the same limits
_AT = {"xid": Flag.XID, "gpu_lost": Flag.GPU_LOST, "ecc": Flag.ECC}
_FROM = {"co_tenant": Flag.CO_TENANT, "power_limit": Flag.POWER_LIMIT}
_THROTTLE = {
    Flag.THERMAL: (("throttle_sw_thermal_ns", "throttle_hw_thermal_ns"), THERMAL_PCT),
    Flag.POWER_CAP: (("throttle_power_cap_ns",), POWER_CAP_PCT),
    Flag.POWER_BRAKE: (("throttle_power_brake_ns",), THERMAL_PCT),
}


def window_flags(
    manifest: Mapping[str, Any], windows: list[dict[str, Any]], samples_slow: pl.DataFrame, events: pl.DataFrame
) -> list[set[Flag]]:
    """The marks of each window, in the windows' order."""
    began = manifest.get("started_unix_ns") or 0
    columns = [name for names, _ in _THROTTLE.values() for name in names]
    lanes = GpuSamples.split(samples_slow, columns) if windows else []
    told = _events(manifest, events)
    preempted = manifest.get("reason") == Reason.PREEMPTED
    found = []
    for window in windows:
        marks: set[Flag] = set()
        start, end = window.get("t_start_mono_ns"), window.get("t_end_mono_ns")
        until = end if isinstance(end, int) else math.inf
        opened = window.get("t_start_unix_ns")
        earlier = isinstance(opened, int) and opened < began
        marks |= {Flag.REQUEUED} if earlier else set()
        if window.get("status") in (WindowStatus.INTERRUPTED, WindowStatus.RUNNING):
            marks.add(Flag.INTERRUPTED)
            marks |= {Flag.PREEMPTED} if preempted and not earlier else set()
        if isinstance(start, int) and not earlier:
            marks |= {mark for kind, at in told if (mark := _AT.get(kind)) and start <= at <= until}
            marks |= {mark for kind, at in told if (mark := _FROM.get(kind)) and at <= until}
        if isinstance(start, int) and isinstance(end, int) and end > start and not earlier:
            marks |= {
                mark
                for mark, (names, limit_pct) in _THROTTLE.items()
                if any(_held_pct(lane, names, start, end) > limit_pct for lane in lanes)
            }
        found.append(marks)
    return found


def run_flags(
    manifest: Mapping[str, Any], windows: list[dict[str, Any]], marked: list[set[Flag]], events: pl.DataFrame
) -> set[Flag]:
    """Those of its measure windows, and what happened to the run outside of any window."""
    found: set[Flag] = set()
    for window, marks in zip(windows, marked, strict=True):
        if window.get("kind") == WindowKind.MEASURE:
            found |= marks
    found |= {mark for kind, _ in _events(manifest, events) if (mark := _AT.get(kind) or _FROM.get(kind))}
    if ((manifest.get("slurm") or {}).get("restart_count") or 0) > 0:
        found.add(Flag.REQUEUED)
    if manifest.get("reason") == Reason.PREEMPTED:
        found.add(Flag.PREEMPTED)
    return found


def join(marks: Iterable[Flag]) -> str | None:
    """As a column holds them; null for none."""
    given = set(marks)
    return ",".join(mark.value for mark in Flag if mark in given) or None


def _events(manifest: Mapping[str, Any], events: pl.DataFrame) -> list[tuple[str, int]]:
    """Kind and monotonic time of what happened to the run's GPUs since this start of it."""
    uuids = [device["uuid"] for device in manifest.get("devices") or [] if device.get("uuid")]
    ours = pl.col("t_unix_ns") >= (manifest.get("started_unix_ns") or 0)
    if uuids:
        ours &= pl.col("gpu_uuid").is_in(uuids) | pl.col("gpu_uuid").is_null()
    return events.filter(ours).select("kind", "t_mono_ns").rows()


def _held_pct(lane: GpuSamples, names: tuple[str, ...], start: int, end: int) -> float:
    """Share of a window that the GPU was held back, by the growth of its counters; 0 where they do not tell."""
    grown = 0.0
    for name in names:
        near = lane.known(name).bracket(start, end)
        growth = energy.growth(near.t_ns, near.columns[name], start, end)
        grown += max(growth, 0.0) if growth is not None and not np.isnan(growth) else 0.0
    return 100 * grown / (end - start)
