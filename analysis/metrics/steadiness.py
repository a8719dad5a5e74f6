"""Whether the step time had settled: block means over the measured time, their drift and their scatter.

Steps of 10 s are averaged, because single steps scatter and follow one another closely. Drift is Theil and Sen's
slope through the block means, the median of the slopes of all pairs (Sen, JASA 63, 1968), times the measured time.
A run that is not steady still counts, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .energy import Floats

BLOCK_S = 10.0
MIN_BLOCKS = 3  # two have a slope and no scatter
MIN_STEPS = 3  # in a block: fewer say little of its mean
MAX_BLOCKS = 360  # of longer runs the blocks are longer: pairs grow with the square
# By habit, not fitted: the difference that matters elsewhere too. Eight H200 runs of 30 to 40 s showed less than 0.3 %.
DRIFT_PCT = 2.0
SCATTER_PCT = 2.0


class Steady(StrEnum):
    YES = "yes"
    NO = "no"
    TOO_SHORT = "too_short"


@dataclass(frozen=True, kw_only=True)
class Steadiness:
    verdict: Steady
    blocks: int
    drift_pct: float | None = None  # over the measured time, of the median block; above 0: slower and slower
    cv_pct: float | None = None  # standard deviation of the block means over their mean

    @property
    def words(self) -> str:
        """Of a run that is not steady or too short to tell."""
        if self.drift_pct is None or self.cv_pct is None:
            return f"too_short: {self.blocks} block(s) of {BLOCK_S:g} s with steps, {MIN_BLOCKS} are needed"
        return (
            f"not steady: step time drifts by {self.drift_pct:+.1f} % (limit {DRIFT_PCT:g} %), "
            f"block means scatter by {self.cv_pct:.1f} % (limit {SCATTER_PCT:g} %) over {self.blocks} blocks"
        )


def judge(at_s: Floats, step_ms: Floats, measured_s: float) -> Steadiness:
    """Of steps that began at `at_s` of the measured time. A last block that is not full is left out."""
    block_s = max(BLOCK_S, measured_s / MAX_BLOCKS)
    full = int(measured_s / block_s + 1e-9)
    place = np.floor(at_s / block_s).astype(np.int64)
    keep = (place >= 0) & (place < full)
    counts = np.bincount(place[keep], minlength=full)
    sums = np.bincount(place[keep], weights=step_ms[keep], minlength=full)
    usable = np.flatnonzero(counts >= MIN_STEPS)
    if len(usable) < MIN_BLOCKS:
        return Steadiness(verdict=Steady.TOO_SHORT, blocks=len(usable))
    means: Floats = np.divide(sums[usable], counts[usable], dtype=np.float64)
    middle, average = float(np.median(means)), float(means.mean())
    if middle <= 0:
        return Steadiness(verdict=Steady.TOO_SHORT, blocks=len(usable))
    drift_pct = 100 * theil_sen(usable.astype(np.float64) * block_s, means) * measured_s / middle
    cv_pct = 100 * float(means.std(ddof=1)) / average
    calm = abs(drift_pct) <= DRIFT_PCT and cv_pct <= SCATTER_PCT
    verdict = Steady.YES if calm else Steady.NO
    return Steadiness(verdict=verdict, blocks=len(usable), drift_pct=drift_pct, cv_pct=cv_pct)


def theil_sen(x: Floats, y: Floats) -> float:
    """Median of the slopes of all pairs. Raises ValueError with fewer than two different x."""
    first, second = np.triu_indices(len(x), k=1)
    run, rise = x[second] - x[first], y[second] - y[first]
    apart = run != 0
    if not apart.any():
        raise ValueError("a slope needs two points at different places")
    return float(np.median(rise[apart] / run[apart]))
