"""The best batch of each GPU: which is fastest, which needs the least energy, which to use, what to run next.

The batch to use is the smallest one that the runs do not distinguish from the fastest.
"""

import json
import math
from dataclasses import dataclass

import polars as pl

from inpaint_bench.core.estimates.memory import least_weights_mib
from inpaint_bench.core.schema import Reason, Status

from .cells import CELL_KEYS, COMPUTATION_KEYS, Cell, compare, is_distinguishable, same_comparability_key
from .intervals import MIN_DF, TIE_THRESHOLD

MIN_RUNS = MIN_DF + 1  # runs of one card, for an interval
_RATE = "images_per_s"
EXTRA_SEEDS = MIN_RUNS - 1  # beside the first run


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best batch by one metric, and those that the runs do not distinguish from it."""

    metric: str
    cell: Cell
    ties: list[int]
    open_ties: list[int]  # those of the ties that may still differ by more than `TIE_THRESHOLD`
    ranking: list[int]  # all batches by their means, the best first
    n: int  # runs of the two best batches, of the one that has fewer

    @property
    def batch(self) -> int:
        return self.ranking[0]

    @property
    def smallest(self) -> int:
        return min([self.batch, *self.ties])


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """The decision for one series: a GPU and whatever else distinguishes it from the other series."""

    series: str
    fastest: Choice | None
    cheapest: Choice | None
    cell: Cell  # cell of the batch to use; the first cell if no batch has a rate
    largest_completed: int | None
    smallest_oom: int | None
    next_run: str  # overrides of a launch command; empty if no run would change the decision
    next_run_reason: str  # why that run, or why none


def decide_batches(cells: pl.DataFrame, runs: pl.DataFrame) -> list[BatchDecision]:
    """Return a decision per series, in the order of the cells. Failed `runs` show where memory ended."""
    decisions = []
    for (series,), group in cells.drop_nulls("batch").group_by("series", maintain_order=True):
        fastest = choose_batch(group, _RATE, lower_is_better=False)
        cheapest = choose_batch(group, "joules_per_image", lower_is_better=True)
        largest, oom = memory_limit(group.row(0, named=True), runs)
        next_run, reason = _next_run(group, runs, [choice for choice in (fastest, cheapest) if choice], largest, oom)
        decisions.append(
            BatchDecision(
                series=str(series),
                fastest=fastest,
                cheapest=cheapest,
                cell=next(c for c in group.to_dicts() if not fastest or c["batch"] == fastest.smallest),
                largest_completed=largest,
                smallest_oom=oom,
                next_run=next_run,
                next_run_reason=reason,
            )
        )
    return decisions


def choose_batch(group: pl.DataFrame, metric: str, *, lower_is_better: bool) -> Choice | None:
    """Return the best cell of one series by its mean, and its ties; None if no cell has the metric."""
    known = group.filter(pl.col(metric).is_not_null())
    if known.is_empty():
        return None
    best, *others = known.sort(metric, descending=not lower_is_better).to_dicts()
    ties = [cell for cell in others if not is_distinguishable(best, cell, metric, lower_is_better=lower_is_better)]
    return Choice(
        metric=metric,
        cell=best,
        ties=sorted(cell["batch"] for cell in ties),
        open_ties=sorted(cell["batch"] for cell in ties if not _is_equivalent(best, cell, metric)),
        ranking=[cell["batch"] for cell in (best, *others)],
        n=min(cell[f"{metric}_n"] for cell in [best, *others][:2]),
    )


def _is_equivalent(best: Cell, cell: Cell, metric: str) -> bool:
    """Return whether the ratio's interval lies within 2 %: no further run would show a relevant difference."""
    ratio = compare(cell, best, metric)
    ends = (ratio.low, ratio.high) if ratio else (None, None)
    return all(end is not None and abs(end) <= TIE_THRESHOLD for end in ends)


def memory_limit(cell: Cell, runs: pl.DataFrame) -> tuple[int | None, int | None]:
    """Return the largest batch that completed and the smallest that ran out of GPU memory, in the cell's series.

    A run that ran out of memory early may not know its precision, resolution or inactive levers: it belongs to all.
    """
    same_series = same_comparability_key(cell["comparability_key"])
    for name in CELL_KEYS:
        if name not in ("batch", "comparability_key"):
            equal = pl.col(name).eq_missing(pl.lit(cell[name]))
            unknown = pl.col(name).is_null() & (pl.col("reason") == Reason.OOM_GPU)
            same_series &= (equal | unknown) if name in (*COMPUTATION_KEYS, "inactive_levers") else equal
    rows = runs.filter(same_series & pl.col("batch").is_not_null())
    completed = rows.filter(pl.col("status") == Status.COMPLETED)["batch"].max()
    oom = rows.filter(pl.col("reason") == Reason.OOM_GPU)["batch"].min()
    return completed, oom  # type: ignore[return-value]


def _next_run(
    group: pl.DataFrame, runs: pl.DataFrame, choices: list[Choice], completed: int | None, oom: int | None
) -> tuple[str, str]:
    """Return overrides of the run that could change the decision, and the reason."""
    # First the range, if it is known that more fits: the curve may go on rising.
    is_best = any(completed in (choice.batch, *choice.ties) for choice in choices)
    larger = 2 * completed if is_best and completed is not None and (oom is None or 2 * completed < oom) else None
    needed, about = None, ""
    if larger is not None:
        needed, about = most_memory_pct(group, runs, larger), "may need up to"
        if needed is not None and needed <= 100:
            return f"batch={larger}", f"it needs at most {needed:.0f} % of the memory"
        line = _memory_on_line_pct(group, larger)
        needed, about = (needed, about) if line is None else (line, "would need about")
    tied = {batch for choice in choices if choice.open_ties for batch in (choice.batch, *choice.open_ties)}
    # Then the decision itself: a tie that may hide more than 2 % is broken by further seeds.
    if tied:
        rates = any(choice.open_ties for choice in choices if choice.metric == _RATE)
        return _more_seeds(group, tied), "to break the tie" if rates else "to break the tie in energy"
    # Then the range if the memory in use does not say that the next batch is too large.
    if larger is not None and oom is None and (needed is None or needed <= 100):
        return f"batch={larger}", "the best batch is the largest tried, and it did not run out of memory"
    # Last the certainty: the two best batches with too few runs for an interval.
    few = [choice.ranking[:2] for choice in choices if choice.n < MIN_RUNS and len(choice.ranking) > 1]
    if few:
        return _more_seeds(group, {batch for best in few for batch in best}), "fewer than three runs have no interval"
    if needed is not None and needed > 100:
        return "", f"batch {larger} {about} {needed:.0f} % of the memory"
    return "", "no tie that matters"


def most_memory_pct(group: pl.DataFrame, runs: pl.DataFrame, batch: int) -> float | None:
    """Return the most that a batch can take in the whole run, by the largest one measured below it.

    What a run needs grows no faster than the batch, and weights do not grow. cuDNN's search takes more if it is free.
    """
    known = runs.filter(pl.col("run_id").is_in(group["run_ids"].explode()) & (pl.col("batch") < batch))
    known = known.drop_nulls("vram_run_pct").filter(pl.col("batch") == pl.col("batch").max())
    bounds = []
    for run in known.iter_rows(named=True):
        recipe = {lever["field"]: lever["requested"] for lever in json.loads(run["levers"] or "[]")}
        weights = least_weights_mib(run["parameters"] or 0, recipe, (run["gpus"] or 1) * (run["nodes"] or 1))
        grows = 1 - weights / (run["vram_run_mib_peak"] or math.inf)
        bounds.append(run["vram_run_pct"] * (1 + grows * (batch / run["batch"] - 1)))
    return max(bounds, default=None)


def _memory_on_line_pct(group: pl.DataFrame, batch: int) -> float | None:
    """Return the memory of a whole run with a batch, on the line through the two largest ones measured."""
    known = group.drop_nulls("vram_run_pct").sort("batch").tail(2).select("batch", "vram_run_pct").rows()
    if len(known) < 2:
        return None
    (smaller, low), (larger, high) = known
    return float(high + (high - low) * (batch - larger) / (larger - smaller))


def _more_seeds(group: pl.DataFrame, batches: set[int]) -> str:
    """Return overrides for these batches with seeds that no run of the series has."""
    seeds = [seed for row in group["seeds"].to_list() for seed in row if seed is not None]
    # If no run recorded its seed, as many as the largest cell has runs count as used.
    first = max(seeds) + 1 if seeds else max(group["n"])
    return f"batch={','.join(map(str, sorted(batches)))} seed={','.join(str(first + i) for i in range(EXTRA_SEEDS))}"
