"""The design of the experiment, a crossover trial, and what its figures say.

Every round times each arm once, and an arm is compared with the two blocks of its round that had no sidecar. Slow drift
(clocks, temperature, other users) cancels in three ways. Ratios are taken within a round, so differences between rounds
cancel. Each order is followed by its mirror image, so a linear drift over those two rounds cancels exactly. And orders
come from Williams squares with shuffled labels: over a square every arm has every position, and every other arm before
it, equally often.

One observation is a round's logarithm of arm over off; the interval is Student's t over rounds. Two mirrored rounds err
in opposite directions under drift, which makes the interval too wide, never too narrow.

Simulated, 2,000 trials each of 4, 8 and 12 rounds with noise, steady or bent drift, or a random walk: the interval
covers the truth in 94 to 100 of 100, and no drift shifts the mean. Blocks that scatter by 0.1 % give an interval of
+/- 0.10 % after 8 rounds and +/- 0.08 % after 12.

One disturbed block makes an interval useless: one of eight that takes 10 % longer moves the mean by 1.3 % and the upper
end to 4 %. It stays in every figure, since it cannot be distinguished from a rare cost of the sidecar, but it is listed
(`outliers`), and the median of the rounds, which it hardly moves, is printed beside the mean.

Two off blocks per round give a reference with less scatter, and an A/A comparison of off with off, whose true value is
zero, by the same method in the same minutes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from scipy import stats

OFF = ("off a", "off b")
MIN_ROUNDS_FOR_OUTLIERS = 6
CONFIDENCE = 0.95

Round = Mapping[str, float]  # time per step by arm, both of OFF among them


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A relative difference and its 95 % interval; a single round has none."""

    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def includes_zero(self) -> bool:
        """Return whether the interval includes zero."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


def orders(arms: Sequence[str], rounds: int, random: Random) -> list[list[str]]:
    """Return the order of the arms in every round. `rounds` is even: an order and its mirror image belong together."""
    assert rounds % 2 == 0
    drawn: list[list[str]] = []
    while len(drawn) < rounds:
        pairs = [(row, row[::-1]) for row in _half_williams_square(random.sample(arms, len(arms)))]
        random.shuffle(pairs)
        for pair in pairs:
            drawn += random.sample(pair, 2)
    return drawn[:rounds]


def _half_williams_square(arms: Sequence[str]) -> list[list[str]]:
    """Return half a Williams square; the mirror images of its rows are the other half."""
    n = len(arms)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(n)]  # 0 1 -1 2 -2 ...
    return [[arms[(step + start) % n] for step in zigzag] for start in range(n if n % 2 else n // 2)]


def cost(rounds: Sequence[Round], arm: str) -> Estimate:
    """Return by how much the arm's steps last longer than those without a sidecar, as a share."""
    return _estimate(rounds, lambda times: math.log(times[arm]) - _log_off(times))


def off_against_off(rounds: Sequence[Round]) -> Estimate:
    """Return the A/A comparison."""
    return _estimate(rounds, lambda times: math.log(times[OFF[1]]) - math.log(times[OFF[0]]))


def median_cost(rounds: Sequence[Round], arm: str) -> float:
    """Return the median of the rounds' costs, a share."""
    return math.expm1(statistics.median(math.log(times[arm]) - _log_off(times) for times in rounds))


def _log_off(times: Round) -> float:
    return statistics.fmean(math.log(times[name]) for name in OFF)


def _estimate(rounds: Sequence[Round], log_ratio: Callable[[Round], float]) -> Estimate:
    logs, low, high = [log_ratio(times) for times in rounds], None, None
    mean = statistics.fmean(logs)
    if len(logs) > 1:
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.expm1(mean - half), math.expm1(mean + half)
    return Estimate(value=math.expm1(mean), low=low, high=high, n=len(logs))


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A block far from the others of its arm."""

    round: int  # its index
    arm: str
    above_median: float  # how much longer its steps are than the median of the arm's blocks, as a share


def outliers(rounds: Sequence[Round]) -> list[Outlier]:
    """Return the blocks beyond Tukey's outer fences: three interquartile ranges outside of the quartiles.

    The ratios of all blocks to the median of their arm are ranked together. Fewer than six rounds have no outliers.
    Simulated with blocks that scatter alike, 600 trials each: one is found in 5 of 100 trials of 8 rounds and in 2 of
    100 of 12; a block that takes 10 % longer is found in every one.
    """
    if len(rounds) < MIN_ROUNDS_FOR_OUTLIERS:
        return []
    medians = {arm: statistics.median(math.log(times[arm]) for times in rounds) for arm in rounds[0]}
    deviations = [
        (math.log(ms) - medians[arm], index, arm) for index, times in enumerate(rounds) for arm, ms in times.items()
    ]
    low, _, high = statistics.quantiles([deviation for deviation, _, _ in deviations], n=4, method="inclusive")
    fence = 3 * (high - low)
    return [
        Outlier(round=index, arm=arm, above_median=math.expm1(deviation))
        for deviation, index, arm in deviations
        if deviation < low - fence or deviation > high + fence
    ]


def verdict(estimate: Estimate, max_overhead_pct: float) -> str:
    """Return whether the cost is below the limit, and what the interval says of a cost; never that it is zero."""
    limit = f"below {max_overhead_pct:g} %"
    if estimate.low is None or estimate.high is None:
        return f"{limit}: not shown, a single round has no interval."
    value, low, high = 100 * estimate.value, 100 * estimate.low, 100 * estimate.high
    if high < max_overhead_pct:
        below = f"shown, the interval ends at {high:.3g} %."
    elif low > max_overhead_pct:
        below = f"not shown; the cost is above, the interval begins at {low:.3g} %."
    elif value < max_overhead_pct:
        # The interval narrows with the square root of the number of rounds.
        rounds = 2 * math.ceil(estimate.n / 2 * ((high - value) / (max_overhead_pct - value)) ** 2)
        below = f"not shown, the interval ends at {high:.3g} %; about {rounds:,} such rounds could show it."
    else:
        below = f"not shown, the interval ends at {high:.3g} %."
    if estimate.includes_zero:
        cost_phrase = f"No cost is shown; the scatter could hide up to {high:.3g} %."
    elif low > 0:
        cost_phrase = f"A cost is shown, {low:.3g} to {high:.3g} %."
    else:
        cost_phrase = "Steps were faster with it on, which it cannot cause: chance (1 in 40) or another change."
    return f"{limit}: {below} {cost_phrase}"
