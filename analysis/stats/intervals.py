"""Confidence intervals of means over runs and of ratios between two sets of runs.

report/templates/method.txt describes them to readers. If several cards ran, the standard error is clustered by card:
each card's mean weighs as many runs as it has, and there are as many degrees of freedom as cards less one.

Simulated with normal runs and cards, half or four fifths of the variance between cards: this interval covers the true
mean in 94 to 96 of 100 cells of 3 to 6 runs on 2 to 6 cards. Student's t over all runs covers it in 72 to 95, a
percentile bootstrap (cards, then runs within them, 2000 draws) in 54 to 86; neither is used. `benchmarks/coverage.py`
simulates these rules.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from inpaint_bench.core.console import pluralize

CONFIDENCE = 0.95
MIN_DF = 2  # for an interval worth drawing: three runs of a card, three cards, or three pairs
TIE_THRESHOLD = 0.02  # without an interval a smaller difference of means never counts
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(32)  # Gauss-Legendre quadrature
Observation = tuple[Hashable, float]  # pairing key (see `pairing_key`) and value
Side = Sequence[Observation]
Variance = tuple[float, float]  # variance of logarithms, with its degrees of freedom
# Standard deviation of logarithms between cards of one type, stated: the committed cells that ran on several cards give
# 0.7 % with 24 degrees of freedom and 3.1 % with 27 (a test pools them). Other metrics are not compared between cards.
CARD_SD = {"images_per_s": 0.01, "joules_per_image": 0.035}
STATED_DF = 20.0  # degrees of freedom of the stated variances
# Between runs of a card, stated: if cells of a kind give less than `MIN_DF` and no larger scatter.
UNKNOWN_SCATTER: Variance = (0.03**2, STATED_DF)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A ratio minus 1, e.g. 0.12 for 12 % more. It has no interval if one side has a single observation."""

    value: float
    low: float | None
    high: float | None
    n: int  # pairs, or the runs of the smaller side
    paired: bool
    limit: float = 0.0  # without an interval: what a difference has to exceed
    one_card_each: bool = False  # each side ran on one card, or one card set, and the two differ
    cards: int = 0  # cards, or card sets, that the pairs ran on
    card: str = "card"  # or `card set`, if a run is on several GPUs

    @property
    def tie(self) -> bool:
        """Return whether the runs show no difference: the interval holds 0, or else the limit is not exceeded."""
        if self.low is None or self.high is None:
            # In logarithms twice and half are equally far from 1, whichever side is called the new one.
            return abs(math.log1p(self.value)) <= math.log1p(self.limit)
        return self.low <= 0 <= self.high

    @property
    def remark(self) -> str:
        """Return what tables say of the comparison; nothing of pairs on one card."""
        if not self.paired:
            return f"one {self.card} each" if self.one_card_each else "unpaired"
        return f"paired within {pluralize(self.cards, self.card)}" if self.cards > 1 and self.low is not None else ""


def pairing_key(card: str | None, seed: int | None, run_id: str) -> Hashable:
    """Return (card, seed) of a run. Without a seed it pairs with no other run, without a card it has no cluster."""
    return (card, run_id if seed is None else seed) if card else run_id


def observations(runs: Iterable[Mapping[str, Any]], metric: str) -> list[Observation]:
    """Return the metric of each run that has it, by card and seed; without a UUID the node stands for the card."""
    known = [run for run in runs if run[metric] is not None]
    return [(pairing_key(run["gpu_uuid"] or run["node"], run["seed"], run["run_id"]), run[metric]) for run in known]


def t_quantile(df: float) -> float:
    """Return the two-sided quantile of Student's t for at least one degree of freedom.

    Newton's method finds the angle up to which the integral of the density is CONFIDENCE / 2; t = sqrt(df) tan(angle).
    """
    df = min(df, 1e6)  # from here on the normal distribution's, to 6 digits
    wanted = CONFIDENCE / 2 * math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    angle = math.atan(NormalDist().inv_cdf((1 + CONFIDENCE) / 2) / math.sqrt(df))  # smaller than the one wanted
    for _ in range(20):
        integral = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (df - 1))
        angle += (wanted - integral) / math.cos(angle) ** (df - 1)
    return math.sqrt(df) * math.tan(angle)


def mean_interval(observations: Side, *, min_df: int = 1) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean, None for a single run or for less than `min_df` degrees of freedom."""
    half = _half_width(observations, min_df=min_df)
    return None if half is None else (_mean(observations) - half, _mean(observations) + half)


def pooled_scatter(cells: Iterable[Iterable[Observation]]) -> Variance:
    """Return the variance between runs of one cell on one card, pooled over cells of one kind."""
    cards: dict[Hashable, list[float]] = {}
    for index, cell in enumerate(cells):
        for key, value in cell:
            cards.setdefault((index, _card(key)), []).append(math.log(value) if value > 0 else math.nan)
    known = [logs for logs in cards.values() if not math.isnan(sum(logs))]
    df = sum(len(logs) - 1 for logs in known)
    variance = sum(map(_squares, known)) / max(df, 1)
    return (variance, df) if df >= MIN_DF else (max(variance, UNKNOWN_SCATTER[0]), STATED_DF)


def gain(
    new: Side, old: Side, *, min_df: int = 1, card_sd: float = 0.0, scatter: Sequence[Variance] = ()
) -> Gain | None:
    """Return the relative change, new over old, with its interval; None if a side has no positive value.

    Paired if every run has a partner and there are at least two pairs, or if a side has a single run. With less
    than `min_df` degrees of freedom (of the pairs, or of either side) there is no interval; two means with enough are
    preferred to pairs with too few. Several runs with one key are averaged within their pair.

    `card_sd` is the standard deviation between cards; infinite: unknown, so two different cards have no interval.
    `scatter` is the variance between runs of either side, for the limit if there is no interval.
    """
    sides = [[(key, math.log(value)) for key, value in side if value > 0] for side in (new, old)]
    if not all(sides):
        return None
    pairs, sizes = _paired_differences(*sides), [len(side) for side in sides]
    clusters = [len({_card(key) for key, _ in side}) for side in sides]
    distance = _distance_of_cards(*sides)
    # The error of a mean over several cards holds their variance already.
    weight = distance if clusters == [1, 1] else float(1 in clusters)
    half = _half_width(*sides, min_df=min_df, between_cards=weight and weight * card_sd**2)
    # The ratio is that of all runs: pairs count if every run has a partner.
    complete = {key for key, _ in sides[0]} == {key for key, _ in sides[1]}
    # Pairs without an interval are preferred to means without one; a lone run is compared with its own partner.
    pairs_only = bool(pairs) and (min(sizes) == 1 or (complete and len(pairs) >= 2 and half is None))
    paired = (complete and len(pairs) > min_df) or pairs_only
    mean = _mean(pairs) if paired else _mean(sides[0]) - _mean(sides[1])
    if paired:
        half, sizes = _half_width(pairs, min_df=min_df), [len(pairs)] * 2
    cards = 0.0 if paired else distance and distance * card_sd**2
    return Gain(
        value=math.expm1(mean),
        low=None if half is None else math.expm1(mean - half),
        high=None if half is None else math.expm1(mean + half),
        n=min(sizes),
        paired=paired,
        limit=_limit(sides, sizes, scatter, cards) if scatter else 0.0,
        one_card_each=clusters == [1, 1] and distance > 0,
        cards=min(clusters) if paired else 0,
        card="card set" if any(len(_cards(_card(key))) > 1 for key, _ in chain(*sides)) else "card",
    )


def _limit(sides: Sequence[Side], sizes: Sequence[int], scatter: Sequence[Variance], between_cards: float) -> float:
    """Return what a difference has to exceed to count without an interval."""
    logs = [sorted(value for _, value in side) for side in sides]
    if max(each[0] for each in logs) <= min(each[-1] for each in logs):  # the runs overlap
        return math.inf
    shares: dict[Variance, float] = {}  # two sides of one kind have one estimate of the scatter, not two
    for own, size in zip(scatter, sizes, strict=True):
        shares[own] = shares.get(own, 0.0) + 1 / size
    runs = [(variance * share, df) for (variance, df), share in shares.items()]
    return max(TIE_THRESHOLD, math.expm1(_welch([*runs, (between_cards, STATED_DF)])))


def _card(key: Hashable) -> Hashable:
    # Runs of unknown cards count as runs of one card.
    return key[0] if isinstance(key, tuple) else None


def _cards(card: Hashable) -> list[Hashable]:
    # A run on several GPUs lists all their UUIDs.
    return [*card.split(", ")] if isinstance(card, str) else [card]


def _distance_of_cards(*sides: Side) -> float:
    """Return the sum over cards of the squared difference of their shares in either side: 0 for the same, at most 2."""
    shares: dict[Hashable, float] = {}
    for sign, side in zip((1, -1), sides, strict=True):
        for card in (_card(key) for key, _ in side):
            each = _cards(card)
            for name in each:
                shares[name] = shares.get(name, 0.0) + sign / len(each) / len(side)
    return round(sum(share**2 for share in shares.values()), 9)


def _paired_differences(new: Side, old: Side) -> list[Observation]:
    """Return one difference per key that both sides have; the pairs themselves are independent of each other."""
    old_keys = {key for key, _ in old}
    shared = dict.fromkeys(key for key, _ in new if key in old_keys)
    sides = ([_mean([run for run in side if run[0] == key]) for key in shared] for side in (new, old))
    # One key for all: the card has cancelled out, so the differences are not clustered by it.
    return [("pair", after - before) for after, before in zip(*sides, strict=True)]


def _mean(observations: Side) -> float:
    return fmean(value for _, value in observations)


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _variance_of_mean(observations: Side) -> Variance:
    """Return the squared standard error, clustered by card if several ran, and its degrees of freedom."""
    n = len(observations)
    if n < 2:
        return 0.0, 0
    mean = _mean(observations)
    # What each card contributes to the error of the mean.
    residuals: dict[Hashable, float] = {}
    for key, value in observations:
        residuals[_card(key)] = residuals.get(_card(key), 0.0) + (value - mean) / n
    df = len(residuals) - 1
    if not df:
        return _squares([value for _, value in observations]) / (n - 1) / n, n - 1
    return sum(residual**2 for residual in residuals.values()) * len(residuals) / df, df


def _half_width(*sides: Side, min_df: int, between_cards: float = 0.0) -> float | None:
    """Return half the interval of one mean, or of the difference of two. None with too few observations."""
    estimates = [_variance_of_mean(side) for side in sides]
    if min(df for _, df in estimates) < max(min_df, 1) or between_cards == math.inf:
        return None
    return _welch([*estimates, (between_cards, STATED_DF)])


def _welch(parts: Sequence[Variance]) -> float:
    """Return half the interval of a sum with these variances: Welch and Satterthwaite; of one its own t interval."""
    variance = sum(part for part, _ in parts)
    # Equal runs on every side; the formula below would divide by zero.
    if variance == 0:
        return 0.0
    df = variance**2 / sum(part**2 / df for part, df in parts)
    return t_quantile(max(df, 1.0)) * math.sqrt(variance)  # rounding can leave df just below 1
