"""How much faster one set of runs is than another, and how sure that is.

Gains are ratios, so the statistics are those of logarithms. Where the same card ran both sides with the same
seed, the ratio of each such pair is one observation: what the card itself adds falls out. Otherwise the two
means are compared with Welch's interval. The interval says how these runs scatter, not how cards differ: pairs
of one card say nothing about another.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A ratio minus 1, e.g. 0.12 for 12 % more. No interval where there is but one observation of a side."""

    value: float
    low: float | None
    high: float | None
    n: int  # pairs, or the runs of the smaller side
    paired: bool

    @property
    def tie(self) -> bool:
        """The interval holds 0: the runs show no difference."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


Observation = tuple[Hashable, float]  # what has to be equal in both runs of a pair, and the figure


def gain(new: Sequence[Observation], old: Sequence[Observation]) -> Gain | None:
    """New over old, paired where at least two pairs exist or a side has a single run. None without figures.

    Figures that are zero or below have no ratio and are left out. Several runs with one key are averaged.
    """
    ours, theirs = _logs(new), _logs(old)
    if not ours or not theirs:
        return None
    shared = [key for key in ours if key in theirs]
    if len(shared) >= 2 or (shared and min(map(len, (ours, theirs))) == 1):
        pairs = [float(np.mean(ours[key]) - np.mean(theirs[key])) for key in shared]
        return _made(float(np.mean(pairs)), _half_width(pairs), len(pairs), paired=True)
    flat_new, flat_old = ([value for values in side.values() for value in values] for side in (ours, theirs))
    middle = float(np.mean(flat_new) - np.mean(flat_old))
    return _made(middle, _welch(flat_new, flat_old), min(len(flat_new), len(flat_old)), paired=False)


def student(df: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t. With t = sqrt(df) tan(a), its density becomes cos(a)^(df - 1)."""
    if df < 1:
        raise ValueError(f"{df} degrees of freedom: at least 1 are needed")
    angle = np.linspace(0, math.pi / 2, 4_001)
    density = np.cos(angle).clip(0) ** (df - 1)
    area = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(df) * math.tan(float(np.interp(confidence * area[-1], area, angle)))


def _logs(side: Sequence[Observation]) -> dict[Hashable, list[float]]:
    found: dict[Hashable, list[float]] = {}
    for key, value in side:
        if value > 0:
            found.setdefault(key, []).append(math.log(value))
    return found


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return student(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    if min(len(a), len(b)) < 2:
        return None
    parts = [float(np.var(side, ddof=1)) / len(side) for side in (a, b)]
    total = sum(parts)
    if total == 0:
        return 0.0
    df = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    return student(df) * math.sqrt(total)


def _made(middle: float, half: float | None, n: int, *, paired: bool) -> Gain:
    low, high = (None, None) if half is None else (math.expm1(middle - half), math.expm1(middle + half))
    return Gain(value=math.expm1(middle), low=low, high=high, n=n, paired=paired)
