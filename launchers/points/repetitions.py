"""Repetitions of a sweep's cells, and when `repeats=auto` has run a cell often enough.

With `repeats=auto` a cell is examined after a fixed number of runs, 3, 5, 7, 10, 14, 20 ... up to `repeats_max`, and
gets no further run once the half width of the 95 % interval of its images/s is at most `repeats_target` of the mean.

Stopping by the interval makes the interval somewhat too short: a cell whose first runs happen to lie close together
stops early. Few examinations, far apart, keep that small, and nothing is corrected: the interval at the end covers the
truth in 94 to 95 of 100 cells whose runs scatter (standard deviation over mean) by up to half the target, and in 91 in
the worst case, a scatter of one and a half times the target (simulated by `benchmarks/coverage.py`, runs of one card).
For the full 95 %, fix the number beforehand with `repeats=<n>`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.validation import check
from inpaint_bench.core.errors import UserError
from launchers.sweep.sweep_record import RunOrder

from .point import Point

# the same for all points of a sweep
SWEEP_KEYS = (
    *("out", "name", "wait", "dry_run", "max_points", "budget", "notify"),
    *("repeats", "repeats_target", "repeats_max", "order_seed", "points_per_job"),
)
AUTO = "auto"
MIN_RUNS = 3  # before the first examination: the interval of two runs is twelve times their scatter


def choose_order(cells: Sequence[BenchConfig]) -> RunOrder | None:
    """Return the order in which the cells run; None if the seed is swept, so that nothing can be repeated.

    The cells agree in `SWEEP_KEYS`. Raises UserError for repetitions or an order of a swept seed.
    """
    first = cells[0]
    # repeats=auto starts with as many repetitions as the first examination needs.
    repeats = examined_sizes(first.repeats_max)[0] if first.repeats == AUTO else int(first.repeats)
    if len({cell.seed for cell in cells}) > 1:
        if first.repeats == 1 and first.order_seed is None:
            return None
        key = "repeats" if first.repeats != 1 else "order_seed"
        raise UserError(
            f"{key}={getattr(first, key)}: the seed is swept too, and repetitions have seeds of their own. "
            "Leave the seed out, or set one to count from"
        )
    # Without repetitions the points run in the order typed, unless order_seed asks for another one.
    random_seed = None if first.repeats == 1 else secrets.randbelow(2**31)
    order_seed = random_seed if first.order_seed is None else first.order_seed
    return RunOrder(cells=len(cells), repeats=repeats, seed=first.seed, order_seed=order_seed)


def initial_points(order: RunOrder, cells: Sequence[Point]) -> list[Point]:
    """Return every point that the sweep starts with, in order of point numbers."""
    if order.is_plain:
        return list(cells)
    # Repetitions outside, cells inside: no cell runs a second time before all have run once.
    return [
        repetition_of(cells[cell], order, cell, repetition)
        for repetition in range(order.repeats)
        for cell in order.shuffled(repetition)
    ]


def repetition_of(point: Point, order: RunOrder, cell: int, repetition: int) -> Point:
    """Return a repetition of a cell, made from any other of its points: only number and seed differ.

    Composed anew it would be equal but for Hydra's override_dirname, which names no folder here. Raises UserError.
    """
    num, overrides = order.number(cell, repetition), order.overrides(point.overrides, repetition)
    bench = replace(point.bench, seed=order.seed + repetition)
    check(bench)
    edits = {"seed": bench.seed, "hydra.job.num": num, "hydra.overrides.task": overrides}
    return replace(point, num=num, overrides=overrides, composed=point.composed.with_edits(edits), bench=bench)


def examined_sizes(max_runs: int) -> list[int]:
    """Return the numbers of runs at which a cell is examined, the last being `max_runs`; each is two fifths more."""
    sizes = [min(MIN_RUNS, max_runs)]
    while sizes[-1] < max_runs:
        # ceil(1.4 * size) in integers
        sizes.append(min(max_runs, (7 * sizes[-1] + 4) // 5))
    return sizes


def next_examined_size(runs: int, max_runs: int) -> int | None:
    """Return the first such number above `runs`; None if there is none."""
    return next((size for size in examined_sizes(max_runs) if size > runs), None)


def relative_half_width(low: float, high: float) -> float:
    """Return half the width of an interval over its centre."""
    return (high - low) / (high + low)
