"""What happened during a window or a run, as codes: readers can exclude such windows.

A flag says that something happened, not that the figures are wrong; what makes a run invalid is in `invalid_reason`.
Codes are separated by commas, in the order of `Flag`.
"""

import math
from collections.abc import Iterable
from enum import StrEnum

from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import Reason, Status, WindowKind

from .facts import Facts, inactive_levers
from .gpu_samples import GpuSamples
from .steadiness import stalls_of


class Flag(StrEnum):
    """A code in the columns `flags` of runs and windows."""

    REQUEUED = "requeued"  # the job was started again; a window: it belongs to an earlier start than the manifest's
    PREEMPTED = "preempted"  # the run was preempted; a window: it was open then
    INTERRUPTED = "interrupted"  # cut by a signal, or by the end of its process
    THERMAL = "throttled_thermal"
    POWER_CAP = "throttled_power"
    POWER_BRAKE = "throttled_brake"  # a signal of the power supply
    CO_TENANT = "co_tenant"  # from when it was observed to the end of the run
    POWER_LIMIT = "power_limit_changed"  # from then on
    XID = "xid"
    GPU_LOST = "gpu_lost"
    ECC = "ecc"  # the error counts grew during the run
    STALLED = "stalled"  # a step took far longer than the others: steadiness.py
    LEVER_INACTIVE = "lever_inactive"  # for a run: the recipe names a lever that was not found active
    UNSTEADY = "unsteady"  # for a run: the step time changed within the measured time: steadiness.py


THERMAL_PCT, POWER_CAP_PCT = 1.0, 5.0  # percent of a window; the bottleneck rules use the same limits
THERMAL_COUNTERS = ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns")
POWER_CAP_COUNTERS = ("throttle_power_cap_ns",)
_AT_ONCE = {"xid": Flag.XID, "gpu_lost": Flag.GPU_LOST, "ecc": Flag.ECC}
_FROM_THEN_ON = {"co_tenant": Flag.CO_TENANT, "power_limit": Flag.POWER_LIMIT}
_EVENTS = _AT_ONCE | _FROM_THEN_ON
_THROTTLING = {
    Flag.THERMAL: (THERMAL_COUNTERS, THERMAL_PCT),
    Flag.POWER_CAP: (POWER_CAP_COUNTERS, POWER_CAP_PCT),
    Flag.POWER_BRAKE: (("throttle_power_brake_ns",), THERMAL_PCT),
}


def window_flags(facts: Facts) -> list[set[Flag]]:
    """Return the flags of each window, in the windows' order."""
    columns = [name for counters, _ in _THROTTLING.values() for name in counters]
    samples = GpuSamples.split(facts.tables["samples_slow"], columns)
    times = facts.own_events().select("kind", "t_mono_ns").rows()
    return [_window_flags(facts, window, samples, times) for window in facts.windows]


def _window_flags(facts: Facts, window: Window, samples: list[GpuSamples], events: list[tuple[str, int]]) -> set[Flag]:
    manifest, stalls = facts.manifest, stalls_of(facts, window)
    earlier = window.t_start_unix_ns < (manifest.started_unix_ns or 0)
    flags = {Flag.REQUEUED} if earlier else set()
    if stalls and stalls.count:
        flags.add(Flag.STALLED)
    if window.status in (Status.INTERRUPTED, Status.RUNNING):
        flags.add(Flag.INTERRUPTED)
        if manifest.reason == Reason.PREEMPTED and not earlier:
            flags.add(Flag.PREEMPTED)
    if earlier:  # the events and samples of an earlier start may be of another node and clock
        return flags
    start, end = window.t_start_mono_ns, window.t_end_mono_ns
    # A window that was cut has no end: whatever came after its start may have hit it.
    until = math.inf if end is None else end
    for kind, t_ns in events:
        # A co-tenant seen before the window may still be there; an Xid before it is over.
        if t_ns <= until and (kind in _FROM_THEN_ON or (kind in _AT_ONCE and t_ns >= start)):
            flags.add(_EVENTS[kind])
    if end is not None and end > start:
        for flag, (counters, limit_pct) in _THROTTLING.items():
            if any((gpu.counted_pct(counters, [(start, end)]) or 0) > limit_pct for gpu in samples):
                flags.add(flag)
    return flags


def run_flags(facts: Facts, flags: list[set[Flag]], steady: str | None) -> set[Flag]:
    """Return the flags of the measure windows, and of the run: its steadiness, what happened outside of any window."""
    manifest = facts.manifest
    result: set[Flag] = set()
    for window, codes in zip(facts.windows, flags, strict=True):
        if window.kind == WindowKind.MEASURE:
            result |= codes
    result |= {_EVENTS[kind] for kind in facts.own_events()["kind"].unique() if kind in _EVENTS}
    if manifest.slurm and (manifest.slurm.restart_count or 0) > 0:
        result.add(Flag.REQUEUED)
    if manifest.reason == Reason.PREEMPTED:
        result.add(Flag.PREEMPTED)
    if inactive_levers(manifest):
        result.add(Flag.LEVER_INACTIVE)
    if steady == "no":
        result.add(Flag.UNSTEADY)
    return result


def join(flags: Iterable[Flag]) -> str | None:
    """Return the value of a `flags` column, null for none."""
    present = set(flags)
    return ",".join(flag.value for flag in Flag if flag in present) or None
