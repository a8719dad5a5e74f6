"""Checks whether a measure window can be trusted. Each problem that is yielded makes the run invalid, unless the check
says that it warns.

Of the rows in the events table, two kinds are problems, whoever writes them: `co_tenant`, detail `pid N`, for another
process on one of its GPUs, and `power_limit`, detail `300 W to 250 W`, for a limit that changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from inpaint_bench.core.records import Manifest, Window
from inpaint_bench.core.schema import WindowKind

from .gpu_samples import GpuSamples, Span

MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz: the energy counter is interpolated over less than this
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
STUCK_COUNTER_S = 1.0  # ten updates of an energy counter; an H200's moved at each of 400 readings at 10 Hz
POWER_LIMIT_MARGIN = 1.05  # mean power over the limit: +/- 5 W of the sensor, and what the regulator lets pass
SHORT_WINDOW_S, SHORT_WINDOW_STEPS = 20.0, 50
# The wall clock and the monotonic clock may differ by the larger of the two.
CLOCK_TOLERANCE_S, CLOCK_TOLERANCE = 0.5, 0.01
INCIDENTS = {"xid": "Xid", "ecc": "memory errors:"}
INVALIDATING_EVENTS = {
    "co_tenant": "another process was on GPU",
    "power_limit": "the power limit changed during the run on GPU",
}
# Limits are floats: a gap of exactly the limit must pass.
_EPS = 1 + 1e-9


def gap_limit_s(hz: float) -> float:
    """Return the longest time without a value that a measurement may have."""
    return min(MAX_GAP_PERIODS / hz, MAX_GAP_S)


def check_length(window: Window, span: Span) -> Iterator[str]:
    """Warn of a measure window that is too short to say much."""
    seconds = (span[1] - span[0]) * 1e-9
    if seconds < SHORT_WINDOW_S or window.steps < SHORT_WINDOW_STEPS:
        yield f"short window: {seconds:.1f} s, {window.steps} steps"


def check_clocks(window: Window, span: Span) -> Iterator[str]:
    """Compare how long the window was by the wall clock and by the monotonic clock."""
    if window.t_end_unix_ns is None:
        return
    seconds, wall_s = (span[1] - span[0]) * 1e-9, (window.t_end_unix_ns - window.t_start_unix_ns) * 1e-9
    if abs(wall_s - seconds) > max(CLOCK_TOLERANCE_S, CLOCK_TOLERANCE * seconds):
        yield f"clock jump: the window lasted {seconds:.2f} s by the monotonic clock, {wall_s:.2f} s by the wall clock"


def check_overlaps(window: Window, windows: list[Window]) -> Iterator[str]:
    """Look for time that a measure window shares with another window of the run.

    Windows of an earlier boot may have equal monotonic times by chance: both clocks must agree.
    """
    for other in windows:
        shared_ns = [_shared_ns(window, other, clock) for clock in ("mono", "unix")]
        if other is not window and min(shared_ns) > 0:
            prefix = "warm-up included: " if other.kind == WindowKind.WARMUP else ""
            time = "the start" if other.t_end_mono_ns is None else f"{shared_ns[0] * 1e-9:.2f} s"
            yield f"{prefix}the measure window shares {time} with {other.kind} window {other.window_id}"


def _shared_ns(window: Window, other: Window, clock: str) -> int:
    """Return how long both are open at once. A window without an end is open at its start only."""
    starts, ends = ([getattr(w, f"t_{edge}_{clock}_ns") for w in (window, other)] for edge in ("start", "end"))
    ends = [start + 1 if end is None else end for start, end in zip(starts, ends, strict=True)]
    return int(min(ends) - max(starts))


def check_steps(window: Window, span: Span, steps: pl.DataFrame) -> Iterator[str]:
    """Check that the window's steps lie inside it, one after the other."""
    rows = steps.filter(pl.col("window_id") == window.window_id).sort("step", maintain_order=True)
    start, end = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
    problems = {
        "warm-up included: {} step(s) began before the measure window opened": start < span[0],
        "{} step(s) ended after the measure window closed": end > span[1],
        "clock jump: the times of steps go back in {} places": (start.diff() < 0) | (end < start),
    }
    counts = rows.select(condition.sum().alias(text) for text, condition in problems.items()).row(0, named=True)
    yield from (text.format(count) for text, count in counts.items() if count)


def check_counts(window: Window, manifest: Manifest, batch: int | None) -> Iterator[str]:
    """Check that the images processed are steps times batch times GPUs."""
    gpus = manifest.gpus or 1
    if not window.images:
        yield "the measure window counts no images"
    elif batch is not None and window.images != window.steps * batch * gpus:
        yield f"{window.images} images are not {window.steps} steps of batch {batch} on {gpus} GPU(s)"


def own_events(events: pl.DataFrame, manifest: Manifest, uuids: set[str] | None = None) -> pl.DataFrame:
    """Return the events of these GPUs, by default the manifest's, or of no GPU in particular, since this start.

    A requeued job keeps its directory: its earlier events belong to another node.
    """
    if events.is_empty():
        return events
    own = pl.col("t_unix_ns") >= (manifest.started_unix_ns or 0)
    uuids = uuids if uuids is not None else device_uuids(manifest) or None
    if uuids is not None:
        own &= pl.col("gpu_uuid").is_in(sorted(uuids)) | pl.col("gpu_uuid").is_null()
    return events.filter(own)


def device_uuids(manifest: Manifest) -> set[str]:
    """Return the UUIDs of the GPUs that the manifest lists."""
    return {device.uuid for device in manifest.devices if device.uuid}


def check_events(events: pl.DataFrame, manifest: Manifest, uuids: set[str]) -> Iterator[str]:
    """Look for events that make the run invalid, on the GPUs that were sampled."""
    rows = own_events(events, manifest, uuids).select("kind", "gpu_uuid", "detail").unique(maintain_order=True)
    for kind, uuid, detail in rows.iter_rows():
        if kind in INVALIDATING_EVENTS:
            yield f"{INVALIDATING_EVENTS[kind]} {uuid or '(not named)'}: {detail or 'no detail'}"


def check_incidents(events: pl.DataFrame, manifest: Manifest, spans: list[Span]) -> Iterator[str]:
    """Warn of errors that the driver reported during the measurement; not every Xid spoils the figures."""
    rows = own_events(events, manifest).select("kind", "t_mono_ns", "gpu_uuid", "detail")
    for kind, t_ns, uuid, detail in rows.iter_rows():
        start = next((start for start, end in spans if start <= t_ns <= end), None)
        if kind in INCIDENTS and start is not None:
            where = f"on GPU {uuid or '(not named)'} at {(t_ns - start) * 1e-9:.1f} s"
            yield f"{INCIDENTS[kind]} {detail or 'no detail'} {where}"


def check_power_limit(power_w: float | None, manifest: Manifest) -> Iterator[str]:
    """Compare the mean power with the power limits in the manifest."""
    limits = [device.power_limit_w for device in manifest.devices if device.power_limit_w is not None]
    # Only with the limit of every GPU: the mean power is of all of them.
    if power_w is None or not len(limits) == len(manifest.devices) == (manifest.gpus or 1):
        return
    if power_w > POWER_LIMIT_MARGIN * (limit_w := sum(limits)):
        yield f"mean power of {power_w:.0f} W, over the limit of {limit_w:.0f} W in the manifest: it was not in force"


def check_column(samples: GpuSamples, column: str, span: Span, limit_s: float) -> str | None:
    """Return why this column's values do not cover the window, None where they do. Nulls do not count as values."""
    known = samples.known(column)
    if not known.touches([span]):
        return f"no {column} in the measure window"
    near = known.bracket(*span).t_ns
    if near[0] > span[0] or near[-1] < span[1]:
        return f"{column} does not reach the edges of the window"
    # A clock that goes back is reported by `check_samples`; here only the time without a value counts.
    in_order = near if known.ordered else np.sort(near)
    gap = float(np.diff(in_order).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{column} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * _EPS else None


def check_devices(fast: list[GpuSamples], slow: list[GpuSamples], manifest: Manifest) -> Iterator[str]:
    """Compare the sampled GPUs with the manifest's. A replay on a machine without GPU has none to compare."""
    listed, sampled = device_uuids(manifest), {gpu.uuid for gpu in fast}
    if listed and sampled != listed:
        extra, missing = sorted(sampled - listed), sorted(listed - sampled)
        parts = [f"samples of {', '.join(extra)}, which the manifest does not list"] if extra else []
        parts += [f"no samples of {', '.join(missing)}"] if missing else []
        yield "GPUs differ: " + "; ".join(parts)
    elif not listed:
        source = (manifest.telemetry.source if manifest.telemetry else None) or ""
        if not source.startswith("replay"):
            yield "the manifest lists no GPU to compare the samples with"
        elif len(sampled) != (manifest.gpus or 1):
            yield f"samples of {len(sampled)} GPUs in a run of {manifest.gpus or 1}"
    if listed and (extra := sorted({gpu.uuid for gpu in slow} - listed)):
        yield f"GPUs differ: slow samples of {', '.join(extra)}, which the manifest does not list"


def check_samples(samples: GpuSamples, span: Span, hz: float) -> Iterator[str]:
    """Check one GPU's fast samples around one measure window: edges, order, gaps, clocks, energy counter."""
    start_ns, end_ns = span
    if samples.t_ns.min() > start_ns:
        yield f"first sample {(int(samples.t_ns.min()) - start_ns) * 1e-9:.2f} s after the window opened"
    if samples.t_ns.max() < end_ns:
        yield f"last sample {(end_ns - int(samples.t_ns.max())) * 1e-9:.2f} s before the window closed"
    # From here on only the samples around this window: what happens between two windows is no problem of either.
    near = samples.bracket(*span)
    if len(near.t_ns) < 2:
        yield "fewer than two samples around the window"
        return
    periods = np.diff(near.t_ns)
    if (periods <= 0).any():
        yield f"clock does not move forward in {int((periods <= 0).sum())} places"
    if (np.diff(near.tick) <= 0).any():
        yield "tick_seq repeats or goes back"
    limit_s, longest = gap_limit_s(hz), int(periods.argmax())
    if periods[longest] * 1e-9 > limit_s * _EPS:
        at_s, gap_s = (int(near.t_ns[longest]) - span[0]) * 1e-9, periods[longest] * 1e-9
        yield f"gap of {gap_s:.2f} s at {at_s:.1f} s of the window (limit {limit_s:.2f} s)"
    # A step of the wall clock that is undone before the window closes shows in the samples alone.
    offset = near.columns["t_unix_ns"] - near.t_ns
    drift_s = float(np.nanmax(offset) - np.nanmin(offset)) * 1e-9
    if drift_s > max(CLOCK_TOLERANCE_S, CLOCK_TOLERANCE * (span[1] - span[0]) * 1e-9):
        yield f"clock jump: wall clock and monotonic clock of the samples drift {drift_s:.2f} s apart"
    if counter_fell(near):
        yield "energy counter went back (driver reloaded?)"
    if stuck := stuck_counter(samples, span, hz):
        yield stuck


def stuck_counter(samples: GpuSamples, span: Span, hz: float) -> str | None:
    """Describe the longest part of the window in which power is drawn and the energy counter does not move."""
    known = samples.known("energy_mj")
    inside = known.inside(*span)
    t_ns, moves = known.t_ns[inside], np.diff(known.columns["energy_mj"][inside]) != 0
    if not len(t_ns) or moves.all():
        return None
    # Divided into stretches of equal values: a new one begins at each reading that differs from the one before.
    edges = np.concatenate([[0], np.flatnonzero(moves) + 1, [len(t_ns)]])
    lengths = t_ns[edges[1:] - 1] - t_ns[edges[:-1]]
    longest = int(lengths.argmax())
    first_ns, length_ns = int(t_ns[edges[longest]]), int(lengths[longest])
    if length_ns * 1e-9 <= max(STUCK_COUNTER_S, gap_limit_s(hz)):
        return None
    during = samples.inside(first_ns, first_ns + length_ns)
    # Instant power, or its average where that is all there is. Below 1 W there is nothing to count.
    for name in ("power_instant_w", "power_avg1s_w"):
        watts = samples.columns[name][during]
        if not np.isnan(watts).all():
            where = f"for {length_ns * 1e-9:.2f} s at {(first_ns - span[0]) * 1e-9:.1f} s of the window"
            mean_w = float(np.nanmean(watts))
            return f"energy counter does not move {where}, while {mean_w:.0f} W are drawn" if mean_w >= 1 else None
    return None


def counter_fell(samples: GpuSamples) -> bool:
    """Return whether the cumulative energy counter decreases between two readings."""
    counter = samples.columns["energy_mj"]
    return bool((np.diff(counter[~np.isnan(counter)]) < 0).any())
