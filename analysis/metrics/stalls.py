"""Stalls: steps that took far longer than the others of their window, and what they cost.

A step stalls if it takes more than STALL_STEPS medians and more than STALL_S. On a GPU two clocks count: that of its
CUDA events, and the time from one step's start to the next on the host, which shows what the GPU waited for. The host
may also wait because it is far ahead of the GPU; that costs nothing, so its stalls cost at most the time in which the
GPU had no step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from inpaint_bench.core.records import Window

from .facts import Facts
from .gpu_samples import Floats, Span

# Chosen by convention, not fitted: the longest step in 89 runs on H200 cards took 1.6 medians.
STALL_STEPS = 5.0
STALL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """The stalled steps of some windows, and the seconds that they took beyond the median step."""

    count: int = 0
    seconds: float = 0.0


def stalls_of(facts: Facts, window: Window) -> Stalls | None:
    """Return the stalls of one window, None if it has no end or not every step is in the table."""
    steps, end_ns = facts.steps_of(window), window.t_end_mono_ns
    if end_ns is None or steps.height != window.steps:
        return None
    return find_stalls(steps, (window.t_start_mono_ns, end_ns))


def find_stalls(steps: pl.DataFrame, span: Span) -> Stalls:
    """Return the stalls of one window, whose steps are given in order."""
    if steps.is_empty():
        return Stalls()
    # The first step lasts from the window's start on, the last one to its end: the GPU is idle at both.
    edges = np.concatenate([[span[0]], steps["t_start_mono_ns"].to_numpy()[1:], [span[1]]])
    host = _excess(np.diff(edges) * 1e-9)
    if steps["device_ms"].null_count():
        return host
    device_s = steps["device_ms"].cast(pl.Float64).to_numpy() * 1e-3
    idle_s = max(0.0, (span[1] - span[0]) * 1e-9 - float(device_s.sum()))
    capped = Stalls(count=host.count, seconds=min(host.seconds, idle_s))
    # The same stall may show in both: the dearer account, not their sum. Below STALL_S nothing stalled.
    dearer = max(_excess(device_s), capped, key=lambda stalls: stalls.seconds)
    return dearer if dearer.seconds > STALL_S * (1 - 1 / STALL_STEPS) else Stalls()


def _excess(seconds: Floats) -> Stalls:
    median_s = float(np.median(seconds))
    stalled = seconds[seconds > max(STALL_STEPS * median_s, STALL_S)]
    return Stalls(count=len(stalled), seconds=float((stalled - median_s).sum()))
