"""How sure a mean of runs is, and how much faster one set of runs is than another.

The unit of replication is the run. An interval of a mean is Student's over the runs of one card; where several
cards ran, runs of one card are no independent news of another, so that the scatter is that of the cards: each
card's mean weighs as many runs as it has, and there is one degree of freedom fewer than cards. Two cards thus
give intervals as wide as twelve standard errors. They hold the truth as often as they should and tell a reader
nothing, so that the report asks for `MIN_DF` and shows the range of the runs where there are fewer. One card says
nothing about another.

Simulated, runs and cards normal, with half or four fifths of the variance between cards: this interval holds the
truth in 94 to 96 of 100 cells of 3 to 6 runs on 2 to 6 cards. Student's over all runs does in 72 to 95, and a
percentile bootstrap (cards, then runs within them, 2000 draws) in 54 to 86: neither is used.

Gains are ratios, so the statistics are those of logarithms. Where the same card ran both sides with the same
seed, the ratio of each such pair is one observation: what the card itself adds falls out. Otherwise the two
means are compared with Welch's interval, each side's error and degrees of freedom as above.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
MIN_DF = 2  # for an interval worth drawing: three runs of a card, three cards, or three pairs


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


def pairing_key(card: str | None, seed: int | None, run_id: str) -> Hashable:
    """(card, seed) of a run. One that names no seed is no pair of anything; one that names no card has no card."""
    return (card, run_id if seed is None else seed) if card else run_id


def mean_interval(observations: Sequence[Observation], *, min_df: int = 1) -> tuple[float, float] | None:
    """The 95 % interval of the mean; None for a single run, or with fewer degrees of freedom than asked for."""
    side = _side([value for _, value in observations], [_card(key) for key, _ in observations])
    if side is None or side.df < min_df:
        return None
    half = t_quantile(side.df) * math.sqrt(side.variance)
    return side.mean - half, side.mean + half


def gain(new: Sequence[Observation], old: Sequence[Observation], *, min_df: int = 1) -> Gain | None:
    """New over old, paired where at least two pairs exist or a side has a single run. None without figures.

    With fewer degrees of freedom than asked for (of the pairs, else of each side) there is no interval. Two means
    that have enough go before pairs that have not. Figures that are zero or below have no ratio and are left out. In
    a pair, several runs with one key are averaged.
    """
    ours, theirs = _logs(new), _logs(old)
    if not ours or not theirs:
        return None
    shared = [key for key in ours if key in theirs]
    flat = [[(key, value) for key, values in side.items() for value in values] for side in (ours, theirs)]
    loose = _welch(flat[0], flat[1], min_df)
    few = shared and (min(map(len, flat)) == 1 or (len(shared) >= 2 and loose is None))
    if len(shared) > min_df or few:
        pairs = [float(np.mean(ours[key]) - np.mean(theirs[key])) for key in shared]
        return _made(float(np.mean(pairs)), _half_width(pairs, min_df), len(pairs), paired=True)
    means = [float(np.mean([value for _, value in side])) for side in flat]
    return _made(means[0] - means[1], loose, min(map(len, flat)), paired=False)


@lru_cache(maxsize=4096)
def t_quantile(df: float, confidence: float = CONFIDENCE) -> float:
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


def _half_width(values: Sequence[float], min_df: int) -> float | None:
    if len(values) <= min_df:
        return None
    return t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True, kw_only=True)
class _Side:
    mean: float
    variance: float  # of the mean
    df: int


def _card(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else None


def _side(values: Sequence[float], cards: Sequence[Hashable]) -> _Side | None:
    """The mean over runs and its error: over cards where there are several, else over runs. None for one run."""
    if len(values) < 2:
        return None
    figures, mean = np.asarray(values, float), float(np.mean(values))
    names = list(dict.fromkeys(cards))
    if len(names) == 1:
        return _Side(mean=mean, variance=float(np.var(figures, ddof=1)) / len(figures), df=len(figures) - 1)
    owner = np.array([names.index(card) for card in cards])
    pulls = np.bincount(owner, weights=figures - mean) / len(figures)  # of each card on the mean
    return _Side(mean=mean, variance=float(np.sum(pulls**2)) * len(names) / (len(names) - 1), df=len(names) - 1)


def _welch(new: Sequence[Observation], old: Sequence[Observation], min_df: int) -> float | None:
    sides = [_side([value for _, value in side], [_card(key) for key, _ in side]) for side in (new, old)]
    known = [side for side in sides if side is not None and side.df >= min_df]
    if len(known) < 2:
        return None
    total = sum(side.variance for side in known)
    if total == 0:
        return 0.0
    df = total**2 / sum(side.variance**2 / side.df for side in known)
    return t_quantile(max(df, 1.0)) * math.sqrt(total)  # rounding can leave it a hair below 1


def _made(middle: float, half: float | None, n: int, *, paired: bool) -> Gain:
    low, high = (None, None) if half is None else (math.expm1(middle - half), math.expm1(middle + half))
    return Gain(value=math.expm1(middle), low=low, high=high, n=n, paired=paired)
