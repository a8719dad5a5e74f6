"""A crossover trial: every round runs each arm once, and an arm is compared with the two off blocks of its round.

What drifts slowly (clocks, temperature, other users) is dealt with three times over. Ratios are taken within a
round, so that what lies between rounds falls out. Each order is followed by its mirror image, so that a drift
that is linear over those two rounds falls out exactly. And orders come from Williams squares with shuffled
labels: over a square every arm stands at every place, and behind every other arm, equally often, so that neither
a bent drift nor what an arm leaves behind for the next one goes to one side.

One observation is a round's logarithm of arm over off; the interval is Student's t over rounds. Two mirrored
rounds err against each other where there is drift, which makes the interval too wide, never too narrow.

Simulated, 2,000 trials each of 4, 8 and 12 rounds with noise, steady or bent drift, or a random walk: the interval
holds the truth in 94 to 100 of 100, and no drift shifted the mean. Blocks that scatter by 0.1 % give an interval of
+/- 0.10 % after 8 rounds and +/- 0.08 % after 12.

One disturbed block, of whatever cause, makes an interval useless: one of eight that took 10 % longer moves the mean by
1.3 % and the upper end to 4 %. It stays in every figure, since nobody can tell it from a rare cost of the sidecar, but
it is named (`outlying`), and beside the mean stands the median of the rounds, which it hardly moves.

Two off blocks per round cost time and give two things: a reference with less scatter, and an A/A comparison
of off with off, whose true value is zero, by the same method in the same minutes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from analysis.stats.intervals import Gain, gain

OFF = ("off a", "off b")

_FEW = 6  # rounds
Round = Mapping[str, float]  # time per step by arm, both of OFF among them


def orders(arms: Sequence[str], rounds: int, random: Random) -> list[list[str]]:
    """The arms' order in every round. `rounds` is even: an order and its mirror image belong together."""
    assert rounds % 2 == 0
    found: list[list[str]] = []
    while len(found) < rounds:
        pairs = [(row, row[::-1]) for row in _rows(random.sample(arms, len(arms)))]
        random.shuffle(pairs)
        for pair in pairs:
            found += random.sample(pair, 2)
    return found[:rounds]


def _rows(arms: Sequence[str]) -> list[list[str]]:
    """Half a Williams square; the mirror images of its rows are the other half."""
    n = len(arms)
    zigzag = [(place + 1) // 2 if place % 2 else -place // 2 for place in range(n)]  # 0 1 -1 2 -2 ...
    return [[arms[(step + start) % n] for step in zigzag] for start in range(n if n % 2 else n // 2)]


def cost(rounds: Sequence[Round], arm: str) -> Gain:
    """By how much the arm's steps last longer than those without, as a share; no interval from a single round."""
    return _ratio(rounds, (arm,), OFF)


def median(rounds: Sequence[Round], arm: str) -> float:
    """The median of the rounds' costs, a share: what a single disturbed block does not move."""
    return math.expm1(statistics.median(math.log(one[arm]) - _log_off(one) for one in rounds))


def _log_off(one: Round) -> float:
    return statistics.fmean(math.log(one[name]) for name in OFF)


@dataclass(frozen=True, kw_only=True)
class Outlying:
    """A block far from the others of its arm."""

    place: int  # of its round
    arm: str
    above_median: float  # by how much its steps are longer than the median of the arm's blocks, as a share


def outlying(rounds: Sequence[Round]) -> list[Outlying]:
    """Blocks beyond Tukey's outer fences: three interquartile ranges outside of the quartiles.

    What is ranked is each block's ratio to the median of its arm, of all arms together. Of fewer than six rounds
    none is named. Simulated with blocks that scatter alike, 600 trials each: one is named in 5 of 100 trials of 8
    rounds and in 2 of 100 of 12; a block that takes 10 % longer is named in every one.
    """
    if len(rounds) < _FEW:
        return []
    middle = {arm: statistics.median(math.log(one[arm]) for one in rounds) for arm in rounds[0]}
    away = [(math.log(ms) - middle[arm], place, arm) for place, one in enumerate(rounds) for arm, ms in one.items()]
    low, _, high = statistics.quantiles([by for by, _, _ in away], n=4, method="inclusive")
    fence = 3 * (high - low)
    return [
        Outlying(place=place, arm=arm, above_median=math.expm1(by))
        for by, place, arm in away
        if by < low - fence or by > high + fence
    ]


def nothing(rounds: Sequence[Round]) -> Gain:
    """The A/A comparison: off over off."""
    return _ratio(rounds, OFF[1:], OFF[:1])


def _ratio(rounds: Sequence[Round], new: Sequence[str], old: Sequence[str]) -> Gain:
    sides = [[(number, one[arm]) for number, one in enumerate(rounds) for arm in side] for side in (new, old)]
    found = gain(*sides)
    assert found is not None  # steps take time
    return found


def verdict(found: Gain, limit_pct: float) -> str:
    """Whether the cost is below the limit, and what the interval says of a cost at all. Zero is never claimed."""
    if found.low is None or found.high is None:
        return f"below {limit_pct:g} %: not shown, a single round has no interval."
    value, low, high = 100 * found.value, 100 * found.low, 100 * found.high
    if high < limit_pct:
        below = f"shown, the interval ends at {high:.3g} %."
    elif low > limit_pct:
        below = f"not shown; that it is above is shown, the interval begins at {low:.3g} %."
    elif value < limit_pct:
        # The interval narrows with the root of the rounds.
        rounds = 2 * math.ceil(found.n / 2 * ((high - value) / (limit_pct - value)) ** 2)
        below = f"not shown, the interval ends at {high:.3g} %; about {rounds:,} such rounds could show it."
    else:
        below = f"not shown, the interval ends at {high:.3g} %."
    if found.tie:
        seen = f"No cost is shown; up to {high:.3g} % could hide in the scatter."
    elif low > 0:
        seen = f"A cost is shown, {low:.3g} to {high:.3g} %."
    else:
        seen = "Steps were faster with the sidecar, which it cannot cause: chance (1 in 40), or something else changed."
    return f"below {limit_pct:g} %: {below} {seen}"
