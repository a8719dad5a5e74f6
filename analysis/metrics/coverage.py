"""Whether samples cover a measure window, and whether the energy counter moves in it."""

from __future__ import annotations

import numpy as np

from inpaint_bench.core.schema import POWERS

from .gpu_samples import COUNTER, GpuSamples, Span

MAX_GAP_PERIODS = 5.0  # 0.5 s at 10 Hz
MAX_GAP_S = 3.0  # however slowly a run was sampled
DEFAULT_HZ = 10.0
STUCK_COUNTER_S = 1.0  # ten updates of an energy counter; an H200's moved at each of 400 readings at 10 Hz
# Limits are floats: a gap of exactly the limit must pass.
EPS = 1 + 1e-9


def gap_limit_s(hz: float) -> float:
    """Return the longest time without a value that a measurement may have."""
    return min(MAX_GAP_PERIODS / hz, MAX_GAP_S)


def check_column(samples: GpuSamples, column: str, span: Span, limit_s: float) -> str | None:
    """Return why this column's values do not cover the window, None if they do. Nulls do not count as values."""
    known = samples.known(column)
    near = known.bracket(*span).t_ns
    # A short window may have no reading of the energy counter, whose growth is known all the same.
    if not len(near) or (column != COUNTER and not known.touches([span])):
        return f"no {column} in the measure window"
    if near[0] > span[0] or near[-1] < span[1]:
        return f"{column} does not reach the edges of the window"
    # A clock that goes back is reported by the audit; here only the time without a value counts.
    in_order = near if known.ordered else np.sort(near)
    gap = float(np.diff(in_order).max()) * 1e-9 if len(near) > 1 else 0.0
    return f"{column} unknown for {gap:.2f} s (limit {limit_s:.2f} s)" if gap > limit_s * EPS else None


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
    # Instant power, or its average if that is all there is. Below 1 W there is nothing to count.
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
