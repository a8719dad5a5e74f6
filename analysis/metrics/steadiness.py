"""Whether the step time was in steady state: drift and scatter of block means over the measured time.

Single steps scatter and are correlated, so steps of 10 s are averaged. Drift is the Theil-Sen slope through the block
means (Sen, JASA 63, 1968) times the measured time. A run that is not steady is still valid, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .gpu_samples import Floats

BLOCK_S = 10.0
MIN_BLOCKS = 3  # two have a slope and no scatter
MIN_STEPS = 3  # in a block: fewer say little of its mean
MAX_BLOCKS = 360  # of longer runs the blocks are longer: the slope takes quadratic time
# By convention, not fitted. Eight H200 runs of 30 to 40 s showed less than 0.3 %.
DRIFT_PCT = 2.0
SCATTER_PCT = 2.0


@dataclass(frozen=True, kw_only=True)
class Steadiness:
    """The verdict on a run's step times, and the figures behind it."""

    blocks: int
    drift_pct: float | None = None  # over the measured time, of the median block; above 0: steps became slower
    cv_pct: float | None = None  # standard deviation of the block means over their mean

    @property
    def verdict(self) -> str:
        if self.drift_pct is None or self.cv_pct is None:
            return "too_short"
        return "yes" if abs(self.drift_pct) <= DRIFT_PCT and self.cv_pct <= SCATTER_PCT else "no"

    @property
    def explanation(self) -> str:
        if self.drift_pct is None or self.cv_pct is None:
            return f"too_short: {self.blocks} block(s) of {BLOCK_S:g} s with steps, {MIN_BLOCKS} are needed"
        return (
            f"not steady: step time drifts by {self.drift_pct:+.1f} % (limit {DRIFT_PCT:g} %), "
            f"block means scatter by {self.cv_pct:.1f} % (limit {SCATTER_PCT:g} %) over {self.blocks} blocks"
        )


def judge(start_s: Floats, step_ms: Floats, measured_s: float) -> Steadiness:
    """Judge steps that began at `start_s` of the measured time. A last block that is not full is left out."""
    block_s = max(BLOCK_S, measured_s / MAX_BLOCKS)
    # Rounding must not cost a block where the time is a multiple of its length.
    full_blocks = int(measured_s / block_s + 1e-9)
    block = np.floor(start_s / block_s).astype(np.int64)
    inside = (block >= 0) & (block < full_blocks)
    counts = np.bincount(block[inside], minlength=full_blocks)
    sums = np.bincount(block[inside], weights=step_ms[inside], minlength=full_blocks)
    usable = np.flatnonzero(counts >= MIN_STEPS)
    means: Floats = np.divide(sums[usable], counts[usable], dtype=np.float64)
    if len(usable) < MIN_BLOCKS or (median := float(np.median(means))) <= 0:
        return Steadiness(blocks=len(usable))
    drift_pct = 100 * _theil_sen_slope(usable.astype(np.float64) * block_s, means) * measured_s / median
    cv_pct = 100 * float(means.std(ddof=1) / means.mean())
    return Steadiness(blocks=len(usable), drift_pct=drift_pct, cv_pct=cv_pct)


def _theil_sen_slope(x: Floats, y: Floats) -> float:
    """Return the median of the slopes of all pairs; x ascends.

    scipy.stats.theilslopes gives the same, but importing scipy.stats takes as long as reading ten runs.
    """
    slopes = [(y[i + 1 :] - y[i]) / (x[i + 1 :] - x[i]) for i in range(len(x) - 1)]
    return float(np.median(np.concatenate(slopes)))
