"""When a cell has been run often enough: `repeats=auto`.

A cell is looked at after fixed numbers of runs, 3, 5, 7, 10, 14, 20 ... up to `repeats_max`, and no further run
is sent once the half width of the 95 % interval of its images/s is at most `repeats_target` of the mean.

Stopping by the interval makes the interval somewhat too short: a cell whose first runs happen to lie close together
ends early. Few looks, far apart, keep that small, and no correction is made: the interval at the end holds the truth
in 94 to 95 of 100 cells whose runs scatter (standard deviation over mean) by up to half the target, and in 91 in the
worst case, a scatter of one and a half times the target (simulated by `benchmarks/stopping.py`, runs of one card).
Who needs the full 95 % fixes the number beforehand, with `repeats=<n>`.
"""

from __future__ import annotations

FIRST = 3  # runs before the first look: two give an interval of twelve times their scatter


def looks(most: int) -> list[int]:
    """How many runs a cell has each time it is looked at, the last being `most`; each step adds two fifths."""
    found = [min(FIRST, most)]
    while found[-1] < most:
        found.append(min(most, (7 * found[-1] + 4) // 5))
    return found


def next_look(runs: int, most: int) -> int | None:
    """The first look after `runs` runs; None where there is none left."""
    return next((look for look in looks(most) if look > runs), None)


def half_width(low: float, high: float) -> float:
    """Of an interval around its mean, relative to it."""
    return (high - low) / (high + low)


def enough(width: float | None, target: float) -> bool:
    """Whether an interval of this half width ends a cell. One run has none."""
    return width is not None and width <= target
