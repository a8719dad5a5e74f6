"""Checks of the samples around the measure windows: GPUs, edges, order, gaps, clocks, counters, power limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import polars as pl

from analysis.metrics.gpu_samples import COUNTER, GpuSamples, Span
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import POWERS

from .events import device_uuids
from .evidence import CLOCKS_AGREE_S, REPLAY, Evidence
from .windows import CLOCK_TOLERANCE, CLOCK_TOLERANCE_S

MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
LATE_TICK_S = 1.0  # of 89 H200 runs the latest tick was 0.35 s late
STUCK_COUNTER_S = 1.0  # ten updates of an energy counter; an H200's moved at each of 400 readings at 10 Hz
MIN_POWER_SHARE = 0.02  # of the limit; idle boards draw 5 to 15 %
POWER_LIMIT_MARGIN = 1.05  # mean power over the limit: +/- 5 W of the sensor, and what the regulator lets pass
# Limits are floats: a gap of exactly the limit must pass.
_EPS = 1 + 1e-9


def gap_limit_s(hz: float) -> float:
    """Return the longest time without a value that a measurement may have."""
    return min(MAX_GAP_PERIODS / hz, MAX_GAP_S)


def check_power(power_w: float | None, manifest: Manifest) -> Iterator[str]:
    """Compare the mean power with the power limits in the manifest: not above, and not next to nothing."""
    limits = [device.power_limit_w for device in manifest.devices if device.power_limit_w is not None]
    # Only with the limit of every GPU: the mean power is of all of them.
    if power_w is None or not len(limits) == len(manifest.devices) == (manifest.gpus or 1):
        return
    if power_w > POWER_LIMIT_MARGIN * (limit_w := sum(limits)):
        yield f"mean power of {power_w:.0f} W, over the limit of {limit_w:.0f} W in the manifest: it was not in force"
    elif power_w < MIN_POWER_SHARE * limit_w:
        yield f"mean power of {power_w:.3g} W, of a board limited to {limit_w:.0f} W: even idle ones draw more"


def check_column(samples: GpuSamples, column: str, span: Span, limit_s: float) -> str | None:
    """Return why this column's values do not cover the window, None where they do. Nulls do not count as values."""
    known = samples.known(column)
    near = known.bracket(*span).t_ns
    # A short window may have no reading of the energy counter, whose growth is known all the same.
    if not len(near) or (column != COUNTER and not known.touches([span])):
        return f"no {column} in the measure window"
    if near[0] > span[0] or near[-1] < span[1]:
        return f"{column} does not reach the edges of the window"
    # A clock that goes back is reported by `check_samples`; here only the time without a value counts.
    in_order = near if known.ordered else np.sort(near)
    gap = float(np.diff(in_order).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{column} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * _EPS else None


def check_devices(fast: list[GpuSamples], slow: list[GpuSamples], manifest: Manifest) -> Iterator[str]:
    """Compare the sampled GPUs with the manifest's. A replay on a machine without GPU has none to compare."""
    listed, sampled = device_uuids(manifest), {gpu.uuid for gpu in fast}
    # Images are counted for every GPU of the run, and energy for every one that is sampled.
    if listed and len(listed) != (manifest.gpus or 1):
        yield f"the manifest lists {len(listed)} GPU(s) in a run on {manifest.gpus or 1}"
    if listed and sampled != listed:
        extra, missing = sorted(sampled - listed), sorted(listed - sampled)
        parts = [f"samples of {', '.join(extra)}, which the manifest does not list"] if extra else []
        parts += [f"no samples of {', '.join(missing)}"] if missing else []
        yield "GPUs differ: " + "; ".join(parts)
    elif not listed:
        source = (manifest.telemetry.source if manifest.telemetry else None) or ""
        if not source.startswith(REPLAY):
            yield "the manifest lists no GPU to compare the samples with"
        elif len(sampled) != (manifest.gpus or 1):
            yield f"samples of {len(sampled)} GPUs in a run of {manifest.gpus or 1}"
    if listed and (extra := sorted({gpu.uuid for gpu in slow} - listed)):
        yield f"GPUs differ: slow samples of {', '.join(extra)}, which the manifest does not list"


def check_samples(samples: GpuSamples, span: Span, hz: float, counter_hz: float) -> Iterator[str]:
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
    # Also between the readings around the window, which may be further apart than the rows.
    if counter_fell(samples.known(COUNTER).bracket(*span)):
        yield "energy counter went back (driver reloaded?)"
    if stuck := stuck_counter(samples, span, counter_hz):
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
    for name in POWERS:
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


def check_clock_offsets(evidence: Evidence) -> Iterator[str]:
    """Compare the clocks of worker and sidecar: on one host the wall clock leads the monotonic clock by the same.

    Where only one edge of a window disagrees, the wall clock was set between them, which `check_clocks` judges.
    """
    for (window, span), (table, rows) in product(evidence.measured, evidence.samples.items()):
        inside = rows.filter(pl.col("t_mono_ns").is_between(*span)).sort("t_mono_ns", maintain_order=True)
        if inside.is_empty():
            continue
        leads = inside.select(pl.col("t_unix_ns") - pl.col("t_mono_ns")).to_series()
        differences = [leads[0] - (window.t_start_unix_ns - span[0])]
        if window.t_end_unix_ns is not None:
            differences.append(leads[-1] - (window.t_end_unix_ns - span[1]))
        ahead_s = min(differences, key=abs) * 1e-9
        if abs(ahead_s) > CLOCKS_AGREE_S:
            yield (
                f"clocks disagree: from monotonic clock to wall clock it is {ahead_s:+.2f} s more in {table} "
                f"than in {window.window_id}"
            )


def check_ticks(evidence: Evidence) -> Iterator[str]:
    """Check that samples were taken when their tick was due, by its number and the rate."""
    rates = (
        {name: stream.hz for name, stream in evidence.files.sidecar.streams.items()} if evidence.files.sidecar else {}
    )
    state = evidence.manifest.telemetry
    if state is not None and state.hz:
        rates.setdefault("fast", state.hz)
    for name, hz in rates.items():
        rows = evidence.samples[f"samples_{name}"]
        if hz <= 0 or rows.is_empty():
            continue
        # By window: a sidecar that was started again counts from 0.
        for _, span in evidence.measured:
            inside = rows.filter(pl.col("t_mono_ns").is_between(*span))
            for (uuid,), ticks in inside.group_by("gpu_uuid", maintain_order=True):
                due_s = ticks["t_mono_ns"].cast(pl.Float64) * 1e-9 - ticks["tick_seq"].cast(pl.Float64) / hz
                # A row has the time of the middle of its read, and a slow driver delays it.
                off_s = (due_s - due_s.median()).abs() - ticks["read_us"].fill_null(0).cast(pl.Float64) * 1e-6
                if (worst_s := float(off_s.max())) > max(LATE_TICK_S, gap_limit_s(hz)):  # type: ignore[arg-type]
                    yield f"GPU {uuid}: samples_{name} is up to {worst_s:.2f} s off the times of its ticks at {hz:g} Hz"


def check_throttle_counters(evidence: Evidence) -> Iterator[str]:
    """Check that no counter of throttled time grows faster than time."""
    counters = [
        name
        for name in evidence.tables["samples_slow"].columns
        if name.startswith("throttle_") and name.endswith("_ns")
    ]
    for gpu in GpuSamples.split(evidence.samples["samples_slow"], counters):
        for (_, span), name in product(evidence.measured, counters):
            grown_s, seconds = (gpu.growth(name, span) or 0.0) * 1e-9, (span[1] - span[0]) * 1e-9
            if grown_s > seconds + max(CLOCK_TOLERANCE_S, CLOCK_TOLERANCE * seconds):
                yield f"GPU {gpu.uuid}: {name} grows by {grown_s:.2f} s in a window of {seconds:.2f} s"


def check_sources(evidence: Evidence) -> Iterator[str]:
    """Compare where samples say that they come from with what the manifest says."""
    state = evidence.manifest.telemetry
    if state is None or state.source in (None, "none"):
        return
    for table, rows in evidence.samples.items():
        sources = {str(source) for source in rows["source"].unique().drop_nulls()}
        if other := sorted(source for source in sources if not source.startswith(str(state.source))):
            yield f"{table} is from {', '.join(other)}, and the manifest says {state.source}"


CHECKS = (check_clock_offsets, check_ticks, check_throttle_counters, check_sources)
