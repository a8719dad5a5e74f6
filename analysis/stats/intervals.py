"""Confidence intervals of means over runs and of ratios between two sets of runs.

The unit of replication is the run. The interval of a mean is Student's t over the runs of one card. Runs of one card
are not independent, so where several cards ran the standard error is clustered by card: each card's mean weighs as
many runs as it has, and there are as many degrees of freedom as cards less one. Two cards thus give intervals as wide
as twelve standard errors: their coverage is right, but they tell a reader nothing. The report therefore asks for
`MIN_DF` and shows the range of the runs where there are fewer. A single card says nothing about other cards.

Simulated with normal runs and cards, half or four fifths of the variance between cards: this interval covers the true
mean in 94 to 96 of 100 cells of 3 to 6 runs on 2 to 6 cards. Student's t over all runs covers it in 72 to 95, a
percentile bootstrap (cards, then runs within them, 2000 draws) in 54 to 86; neither is used.

Gains are ratios, so they are computed on logarithms. Where the same card ran both sides with the same seed, each such
pair is one observation, which removes the effect of the card. Otherwise the two means are compared with Welch's
interval, with the standard errors and degrees of freedom above.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
MIN_DF = 2  # for an interval worth drawing: three runs of a card, three cards, or three pairs
Observation = tuple[Hashable, float]  # pairing key (see `pairing_key`) and value


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A ratio minus 1, e.g. 0.12 for 12 % more. It has no interval where one side has a single observation."""

    value: float
    low: float | None
    high: float | None
    n: int  # pairs, or the runs of the smaller side
    paired: bool

    @property
    def tie(self) -> bool:
        """Return whether the interval holds 0: the runs show no difference."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


def pairing_key(card: str | None, seed: int | None, run_id: str) -> Hashable:
    """Return (card, seed) of a run. Without a seed it pairs with no other run, without a card it has no cluster."""
    return (card, run_id if seed is None else seed) if card else run_id


def observations(runs: Iterable[Mapping[str, Any]], metric: str) -> list[Observation]:
    """Return the metric of each run that has it, by card and seed; without a UUID the node stands for the card."""
    known = [run for run in runs if run[metric] is not None]
    return [(pairing_key(run["gpu_uuid"] or run["node"], run["seed"], run["run_id"]), run[metric]) for run in known]


def t_quantile(df: float) -> float:
    """Return the two-sided quantile of Student's t."""
    # scipy.stats.t.ppf gives the same value, but importing scipy.stats takes another half second.
    return float(stdtrit(df, (1 + CONFIDENCE) / 2))


def mean_interval(observations: Sequence[Observation], *, min_df: int = 1) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, None for a single run or for less than `min_df` degrees of freedom."""
    half = _half_width(observations, min_df=min_df)
    return None if half is None else (_mean(observations) - half, _mean(observations) + half)


def gain(new: Sequence[Observation], old: Sequence[Observation], *, min_df: int = 1) -> Gain | None:
    """Return new over old, None where a side has no positive value.

    Paired where every run has a partner and there are at least two pairs, or where a side has a single run. With less
    than `min_df` degrees of freedom (of the pairs, or of either side) there is no interval; two means with enough are
    preferred to pairs with too few. Several runs with one key are averaged within their pair.
    """
    new_logs, old_logs = ([(key, math.log(value)) for key, value in side if value > 0] for side in (new, old))
    if not new_logs or not old_logs:
        return None
    pairs = _paired_differences(new_logs, old_logs)
    unpaired = _half_width(new_logs, old_logs, min_df=min_df)
    runs = min(len(new_logs), len(old_logs))
    # The ratio is that of all runs: pairs count where every run has a partner.
    complete = {key for key, _ in new_logs} == {key for key, _ in old_logs}
    # Pairs without an interval are preferred to means without one; a lone run is compared with its own partner.
    pairs_only = bool(pairs) and (runs == 1 or (complete and len(pairs) >= 2 and unpaired is None))
    if (complete and len(pairs) > min_df) or pairs_only:
        return _gain(_mean(pairs), _half_width(pairs, min_df=min_df), len(pairs), paired=True)
    return _gain(_mean(new_logs) - _mean(old_logs), unpaired, runs, paired=False)


def _paired_differences(new: list[Observation], old: list[Observation]) -> list[Observation]:
    """Return one difference per key that both sides have; the pairs themselves are independent of each other."""
    old_keys = {key for key, _ in old}
    shared = dict.fromkeys(key for key, _ in new if key in old_keys)
    sides = ([_mean([run for run in side if run[0] == key]) for key in shared] for side in (new, old))
    # One key for all: the card has cancelled out, so the differences are not clustered by it.
    return [("pair", after - before) for after, before in zip(*sides, strict=True)]


def _mean(observations: Sequence[Observation]) -> float:
    return float(np.mean([value for _, value in observations]))


def _variance_of_mean(observations: Sequence[Observation]) -> tuple[float, int]:
    """Return the squared standard error, clustered by card where several ran, and its degrees of freedom."""
    values = np.array([value for _, value in observations], float)
    if len(values) < 2:
        return 0.0, 0
    # Runs of unknown cards count as runs of one card.
    cards = [key[0] if isinstance(key, tuple) else None for key, _ in observations]
    names = list(dict.fromkeys(cards))
    if len(names) == 1:
        return float(np.var(values, ddof=1)) / len(values), len(values) - 1
    # What each card contributes to the error of the mean.
    residuals = np.bincount([names.index(card) for card in cards], weights=values - values.mean()) / len(values)
    df = len(names) - 1
    return float(np.sum(residuals**2)) * len(names) / df, df


def _half_width(*sides: Sequence[Observation], min_df: int) -> float | None:
    """Return half the interval of one mean, or of the difference of two (Welch). None with too few observations."""
    estimates = [_variance_of_mean(side) for side in sides]
    if min(df for _, df in estimates) < max(min_df, 1):
        return None
    variance = sum(part for part, _ in estimates)
    # Equal runs on every side; the formula below would divide by zero.
    if variance == 0:
        return 0.0
    # Welch-Satterthwaite; of a single side these are its own degrees of freedom.
    df = variance**2 / sum(part**2 / df for part, df in estimates)
    return t_quantile(max(df, 1.0)) * math.sqrt(variance)  # rounding can leave df just below 1


def _gain(mean: float, half: float | None, n: int, *, paired: bool) -> Gain:
    low, high = (None, None) if half is None else (math.expm1(mean - half), math.expm1(mean + half))
    return Gain(value=math.expm1(mean), low=low, high=high, n=n, paired=paired)
