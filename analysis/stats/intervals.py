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
interval, with the standard errors and degrees of freedom above. Two sides of one card each that is not the same card
add the variance between cards (`CARD_SD`). Without an interval two means differ if no runs overlap and if they are
further apart than `TIE_THRESHOLD` and than a 95 % interval whose variance of runs is pooled over cells of the same
kind: 2.8 times their scatter where each side is one run of one card. `benchmarks/coverage.py` simulates these rules.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from scipy.special import stdtrit

CONFIDENCE = 0.95
MIN_DF = 2  # for an interval worth drawing: three runs of a card, three cards, or three pairs
TIE_THRESHOLD = 0.02  # without an interval a smaller difference of means never counts
Observation = tuple[Hashable, float]  # pairing key (see `pairing_key`) and value
Variance = tuple[float, float]  # of logarithms, with its degrees of freedom
# Standard deviation of logarithms between cards of one type, stated: above or at what the committed cells that ran on
# several cards give (benchmarks/coverage.py). Other metrics are not compared between cards.
CARD_SD = {"images_per_s": 0.01, "joules_per_image": 0.035}
STATED_DF = 20.0  # of the stated variances: there are about as many in the committed cells
ONE_CARD_EACH = "one card each"  # what tables say of two different cards
# Between runs of a card, stated: where cells of a kind give less than `MIN_DF` and no larger scatter.
UNKNOWN_SCATTER: Variance = (0.03**2, STATED_DF)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A ratio minus 1, e.g. 0.12 for 12 % more. It has no interval where one side has a single observation."""

    value: float
    low: float | None
    high: float | None
    n: int  # pairs, or the runs of the smaller side
    paired: bool
    limit: float = 0.0  # without an interval: what a difference has to exceed
    one_card_each: bool = False  # of two different cards

    @property
    def tie(self) -> bool:
        """Return whether the runs show no difference: the interval holds 0, or else the limit is not exceeded."""
        if self.low is None or self.high is None:
            return abs(self.value) <= self.limit
        return self.low <= 0 <= self.high


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


def pooled_scatter(cells: Iterable[Iterable[Observation]]) -> Variance:
    """Return the variance between runs of one cell on one card, pooled over cells of one kind."""
    total, df = 0.0, 0
    for cell in cells:
        by_card: dict[Hashable, list[float]] = {}
        for key, value in cell:
            if value > 0:
                by_card.setdefault(_card(key), []).append(math.log(value))
        for logs in by_card.values():
            total += _squares(logs)
            df += len(logs) - 1
    variance = total / max(df, 1)
    return (variance, df) if df >= MIN_DF else (max(variance, UNKNOWN_SCATTER[0]), STATED_DF)


def gain(
    new: Sequence[Observation],
    old: Sequence[Observation],
    *,
    min_df: int = 1,
    card_sd: float | None = 0.0,
    scatter: Sequence[Variance] = (),
) -> Gain | None:
    """Return new over old, None where a side has no positive value.

    Paired where every run has a partner and there are at least two pairs, or where a side has a single run. With less
    than `min_df` degrees of freedom (of the pairs, or of either side) there is no interval; two means with enough are
    preferred to pairs with too few. Several runs with one key are averaged within their pair.

    `card_sd` is the standard deviation between cards; None: unknown, so two different cards have no interval. `scatter`
    is the variance between runs of either side (`pooled_scatter`), for the limit where there is no interval.
    """
    sides = [[(key, math.log(value)) for key, value in side if value > 0] for side in (new, old)]
    if not all(sides):
        return None
    pairs = _paired_differences(*sides)
    clusters = [len({_card(key) for key, _ in side}) for side in sides]
    distance = _distance_of_cards(*sides)
    # The error of a mean over several cards holds their variance already.
    cards = _between_cards(distance if clusters == [1, 1] else float(1 in clusters), card_sd)
    unpaired = _half_width(*sides, min_df=min_df, more=cards)
    sizes = [len(side) for side in sides]
    # The ratio is that of all runs: pairs count where every run has a partner.
    complete = {key for key, _ in sides[0]} == {key for key, _ in sides[1]}
    # Pairs without an interval are preferred to means without one; a lone run is compared with its own partner.
    pairs_only = bool(pairs) and (min(sizes) == 1 or (complete and len(pairs) >= 2 and unpaired is None))
    paired = (complete and len(pairs) > min_df) or pairs_only
    if paired:
        mean, half = _mean(pairs), _half_width(pairs, min_df=min_df)
        sizes, distance = [len(pairs)] * 2, 0.0
    else:
        mean, half = _mean(sides[0]) - _mean(sides[1]), unpaired
    return Gain(
        value=math.expm1(mean),
        low=None if half is None else math.expm1(mean - half),
        high=None if half is None else math.expm1(mean + half),
        n=min(sizes),
        paired=paired,
        limit=_limit(sides, sizes, scatter, _between_cards(distance, card_sd)),
        one_card_each=clusters == [1, 1] and distance > 0,
    )


def _limit(
    sides: Sequence[Sequence[Observation]], sizes: Sequence[int], scatter: Sequence[Variance], cards: list[Variance]
) -> float:
    """Return what a difference has to exceed to count without an interval, 0 where the scatter is not known."""
    if not scatter:
        return 0.0
    least, most = zip(
        *((min(logs), max(logs)) for logs in ([value for _, value in side] for side in sides)), strict=True
    )
    if max(least) <= min(most):  # the runs overlap
        return math.inf
    # Two sides of one kind have one estimate of the scatter, not two.
    runs = [
        (own[0] * sum(1 / size for size, other in zip(sizes, scatter, strict=True) if other == own), own[1])
        for own in dict.fromkeys(scatter)
    ]
    return max(TIE_THRESHOLD, math.expm1(_welch([*runs, *cards])))


def _card(key: Hashable) -> Hashable:
    # Runs of unknown cards count as runs of one card.
    return key[0] if isinstance(key, tuple) else None


def _between_cards(weight: float, card_sd: float | None) -> list[Variance]:
    """Return the variance that cards add to a difference."""
    return [(weight * card_sd**2 if card_sd is not None else math.inf, STATED_DF)] if weight and card_sd != 0 else []


def _distance_of_cards(*sides: Sequence[Observation]) -> float:
    """Return the sum over cards of the squared difference of their shares in either side: 0 for the same, at most 2."""
    shares: dict[Hashable, float] = {}
    for sign, side in zip((1, -1), sides, strict=True):
        for key, _ in side:
            card = _card(key)
            # A run on several GPUs lists all their UUIDs.
            each = card.split(", ") if isinstance(card, str) else [card]
            for name in each:
                shares[name] = shares.get(name, 0.0) + sign / len(each) / len(side)
    distance = sum(share**2 for share in shares.values())
    return distance if distance > 1e-9 else 0.0  # rounding


def _paired_differences(new: list[Observation], old: list[Observation]) -> list[Observation]:
    """Return one difference per key that both sides have; the pairs themselves are independent of each other."""
    old_keys = {key for key, _ in old}
    shared = dict.fromkeys(key for key, _ in new if key in old_keys)
    sides = ([_mean([run for run in side if run[0] == key]) for key in shared] for side in (new, old))
    # One key for all: the card has cancelled out, so the differences are not clustered by it.
    return [("pair", after - before) for after, before in zip(*sides, strict=True)]


def _mean(observations: Sequence[Observation]) -> float:
    return fmean(value for _, value in observations)


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)


def _variance_of_mean(observations: Sequence[Observation]) -> Variance:
    """Return the squared standard error, clustered by card where several ran, and its degrees of freedom."""
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


def _half_width(*sides: Sequence[Observation], min_df: int, more: Sequence[Variance] = ()) -> float | None:
    """Return half the interval of one mean, or of the difference of two. None with too few observations."""
    estimates = [_variance_of_mean(side) for side in sides]
    if min(df for _, df in estimates) < max(min_df, 1) or any(part == math.inf for part, _ in more):
        return None
    return _welch([*estimates, *more])


def _welch(parts: Sequence[Variance]) -> float:
    """Return half the interval of a sum with these variances: Welch and Satterthwaite; of one its own t interval."""
    variance = sum(part for part, _ in parts)
    # Equal runs on every side; the formula below would divide by zero.
    if variance == 0:
        return 0.0
    df = variance**2 / sum(part**2 / df for part, df in parts)
    return t_quantile(max(df, 1.0)) * math.sqrt(variance)  # rounding can leave df just below 1
