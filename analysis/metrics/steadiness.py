"""Whether the step time was in steady state over the measured time, and what stalled steps cost.

A slow phase makes the mean step longer than the median step, a drift the last third of the blocks slower or faster.

A step stalls if it takes more than STALL_STEPS medians and more than STALL_S. On a GPU two clocks count: that of its
CUDA events, and the time from one step's start to the next on the host, which shows what the GPU waited for. The host
may also wait because it is far ahead of the GPU; that costs nothing, so its stalls cost at most the time in which the
GPU had no step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Window

from .facts import Facts
from .gpu_samples import Floats, Span

BLOCK_S = 1.0  # longer if the median step is
MIN_BLOCKS = 3  # a third is one
# Chosen by convention, not fitted. 197 of the 225 committed runs with windows of 8 s and more are within it.
LIMIT_PCT = 2.0
# Chosen by convention, not fitted: the longest step in 89 runs on H200 cards took 1.6 medians.
STALL_STEPS = 5.0
STALL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Steadiness:
    """The verdict on a run's step times, and the figures behind it."""

    blocks: int
    mean_pct: float | None = None  # the mean step over the median step, less 100 %
    drift_pct: float | None = None  # the last third over the first, less 100 %; above 0: steps became slower

    @property
    def verdict(self) -> str:
        if self.mean_pct is None or self.drift_pct is None:
            return "too_short"
        return "yes" if max(abs(self.mean_pct), abs(self.drift_pct)) <= LIMIT_PCT else "no"

    @property
    def explanation(self) -> str:
        if self.mean_pct is None or self.drift_pct is None:
            return f"too_short: {pluralize(self.blocks, 'block')} of {BLOCK_S:g} s or a step, {MIN_BLOCKS} are needed"
        return (
            f"not steady: the mean step is {self.mean_pct:+.1f} % off the median step, the last third of the window "
            f"{self.drift_pct:+.1f} % off the first (limit {LIMIT_PCT:g} %)"
        )

    @property
    def columns(self) -> dict[str, str | float | None]:
        return {
            "steady": self.verdict,
            "step_blocks": self.blocks,
            "step_mean_pct": self.mean_pct,
            "step_drift_pct": self.drift_pct,
        }


def measured_steps(steps: pl.DataFrame, spans: Mapping[str, Span]) -> pl.DataFrame:
    """Return the steps of the measured windows with `start_s`, since the first window opened, and `step_ms`.

    The time between two windows does not count. One kind of time for all steps: by the host if the device's is
    missing anywhere.
    """
    offsets_ns, before_ns = {}, 0
    for window_id, (opened_ns, closed_ns) in spans.items():
        offsets_ns[window_id] = before_ns - opened_ns
        before_ns += closed_ns - opened_ns
    steps = steps.with_columns(pl.col("window_id").cast(pl.String)).filter(pl.col("window_id").is_in(list(offsets_ns)))
    host_ms = (pl.col("t_end_mono_ns") - pl.col("t_start_mono_ns")) / 1e6
    offset_ns = pl.col("window_id").replace_strict(offsets_ns, return_dtype=pl.Int64)
    return steps.with_columns(
        start_s=(pl.col("t_start_mono_ns") + offset_ns) * 1e-9,
        step_ms=host_ms if steps["device_ms"].null_count() else pl.col("device_ms").cast(pl.Float64),
    )


def judge(start_s: Floats, step_ms: Floats, measured_s: float) -> Steadiness:
    """Judge steps that began at `start_s` of the measured time. A last block that is not full is left out."""
    median_ms = float(np.median(step_ms)) if len(step_ms) else 0.0
    block_s = max(BLOCK_S, median_ms / 1000)
    # Rounding must not cost a block if the time is a multiple of its length.
    full_blocks = int(measured_s / block_s + 1e-9)
    block = np.floor(start_s / block_s).astype(np.int64)
    inside = (block >= 0) & (block < full_blocks)
    counts = np.bincount(block[inside], minlength=full_blocks)
    sums = np.bincount(block[inside], weights=step_ms[inside], minlength=full_blocks)
    means: Floats = sums[counts > 0] / counts[counts > 0]
    if len(means) < MIN_BLOCKS or median_ms <= 0:
        return Steadiness(blocks=len(means))
    third = len(means) // 3
    mean_pct, drift_pct = np.mean(step_ms) / median_ms, means[-third:].mean() / means[:third].mean()
    return Steadiness(blocks=len(means), mean_pct=100 * float(mean_pct - 1), drift_pct=100 * float(drift_pct - 1))


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """The stalled steps of some windows, and the seconds that they took beyond the median step."""

    count: int = 0
    seconds: float = 0.0


def stalls_of(facts: Facts, window: Window) -> Stalls | None:
    """Return the stalls of one window; None if it has no end, if steps are lost, or if their work differs."""
    steps, end_ns = facts.steps_of(window), window.t_end_mono_ns
    if end_ns is None or steps.height != window.steps or not facts.uniform_steps:
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
