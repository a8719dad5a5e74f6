"""The best batch of each GPU as a decision: which is fastest, which is cheapest, which to take, what to run next.

To take is the smallest batch that the runs do not tell from the fastest: a smaller one leaves memory, and nothing
that was seen is lost. A next run is proposed where it could change the decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from inpaint_bench.core.schema import Reason, Status

from . import cells as aggregate
from .intervals import MIN_DF

EXTRA_SEEDS = 2  # with a first run of each, three: the fewest that give an interval worth the name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best batch by one figure, and those that the runs do not tell from it."""

    metric: str
    cell: dict[str, Any]
    ties: list[int]
    open_ties: list[int]  # of these, the ones that may still be more than 2 % apart
    next_best: int | None  # the next best batch by the mean
    n: int  # runs of the cell with the fewest
    candidates: int

    @property
    def batch(self) -> int:
        return int(self.cell["batch"])

    @property
    def smallest(self) -> int:
        return min([self.batch, *self.ties])


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Of one series: a GPU and whatever else tells it from the others."""

    series: str
    fastest: Choice | None
    cheapest: Choice | None
    largest_completed: int | None
    smallest_oom: int | None
    next_run: str  # in the words of a launch command; empty where none would change anything
    next_run_reason: str  # next_run_reason that run, or next_run_reason none


def decide_batches(cells: pl.DataFrame, runs: pl.DataFrame) -> list[Decision]:
    """Per series, in the order of the cells. `runs` holds those that failed too: they show where memory ends."""
    found = []
    for (series,), group in cells.group_by("series", maintain_order=True):
        fastest = choice(group, "images_per_s", lower_is_better=False)
        cheapest = choice(group, "joules_per_image", lower_is_better=True)
        ran, oom = memory_limit(group.row(0, named=True), runs)
        command, next_run_reason = _next(group, [one for one in (fastest, cheapest) if one], ran, oom)
        found.append(
            Decision(
                series=str(series),
                fastest=fastest,
                cheapest=cheapest,
                largest_completed=ran,
                smallest_oom=oom,
                next_run=command,
                next_run_reason=next_run_reason,
            )
        )
    return found


def choice(group: pl.DataFrame, metric: str, *, lower_is_better: bool) -> Choice | None:
    """The best cell of one series by its mean, and its ties; None where no cell has the figure."""
    known = group.filter(pl.col(metric).is_not_null())
    if known.is_empty():
        return None
    top, *others = known.sort(metric, descending=not lower_is_better).to_dicts()
    tied = [
        row for row in others if not aggregate.is_distinguishable(top, row, metric, lower_is_better=lower_is_better)
    ]
    return Choice(
        metric=metric,
        cell=top,
        ties=sorted(row["batch"] for row in tied),
        open_ties=sorted(row["batch"] for row in tied if not _same(top, row, metric)),
        next_best=others[0]["batch"] if others else None,
        n=min(row[f"{metric}_n"] for row in [top, *others]),
        candidates=len(others) + 1,
    )


def _same(top: dict[str, Any], row: dict[str, Any], metric: str) -> bool:
    """Whether the interval of the ratio lies within 2 %: no further run would show a difference that matters."""
    found = aggregate.compare(row, top, metric)
    ends = (found.low, found.high) if found else (None, None)
    return all(end is not None and abs(end) <= aggregate.TIE_THRESHOLD for end in ends)


def memory_limit(cell: dict[str, Any], runs: pl.DataFrame) -> tuple[int | None, int | None]:
    """Largest batch that ran to its end and smallest that ended out of GPU memory, of the runs of one series.

    A run that ran out early may not say its precision or resolution: it belongs to every one.
    """
    same = pl.lit(True)
    for name in aggregate.CELL_KEYS:
        if name not in ("batch", "comparability_key"):
            equal = pl.col(name).eq_missing(pl.lit(cell[name]))
            same &= (equal | pl.col(name).is_null()) if name in aggregate.COMPUTATION_KEYS else equal
    same &= aggregate.same_comparability_key(cell["comparability_key"])
    mine = runs.filter(same & pl.col("batch").is_not_null())
    ran = mine.filter(pl.col("status") == Status.COMPLETED)["batch"].max()
    oom = mine.filter(pl.col("reason") == Reason.OOM_GPU)["batch"].min()
    return ran, oom  # type: ignore[return-value]


def _next(group: pl.DataFrame, choices: list[Choice], ran: int | None, oom: int | None) -> tuple[str, str]:
    tied = {batch for one in choices if one.open_ties for batch in (one.batch, *one.open_ties)}
    if tied:
        return _repeat(group, tied), "to break the tie"
    largest = max((one.batch for one in choices), default=None)
    if largest is not None and largest == ran and oom is None:
        return f"batch={2 * largest}", "the best is the largest tried, and memory did not end there"
    few = [one for one in choices if one.n <= MIN_DF and one.next_best is not None]
    if few:
        batches = {batch for one in few for batch in (one.batch, one.next_best) if batch is not None}
        return _repeat(group, batches), "fewer than three runs have no interval"
    return "", "no tie that matters"


def _repeat(group: pl.DataFrame, batches: set[int]) -> str:
    """These batches with seeds that no run of the series has."""
    seeds = [seed for row in group["seeds"].to_list() for seed in row if seed is not None]
    start = max(seeds) + 1 if seeds else max(group["n"])
    return f"batch={','.join(map(str, sorted(batches)))} seed={','.join(str(start + i) for i in range(EXTRA_SEEDS))}"
