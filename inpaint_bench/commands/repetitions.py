"""Add repetitions to the cells of a sweep: `rerun --repeats`, and `repeats=auto` of a launch that waits.

A cell is judged by what the report would say about it: its runs are merged and audited, and the interval is the
report's. Only runs of the cell as it would be submitted now count, from the same site and with the same `config_hash`.
A cell is left alone while points of it are queued or run elsewhere, and if points failed: `rerun` submits those
again, and no repetition makes up for a failure. launchers/points/repetitions.py describes the stopping rule.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.console import console, pluralize, table
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.compose import Composer
from launchers.points.point import Point
from launchers.points.repetitions import next_examined_size, relative_half_width, repetition_of
from launchers.status import tables
from launchers.status.cost import check_budget, rate_note
from launchers.status.survey import PointStatus, poll_sweep, sites_of, slowest_site
from launchers.submit.equal_points import refuse_equal
from launchers.submit.rerun import check_changes, submit_again
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import RunOrder

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Cell:
    """One combination of the sweep with the points that it has so far, and what it gets."""

    number: int  # its position among the combinations
    next: Point  # its next repetition
    repetitions: int  # submitted so far
    points: list[PointStatus]
    more: int = 0  # repetitions that it gets
    reason: str = ""  # why it gets no more
    runs: int = 0  # those that count
    half_width: float | None = None  # half width of the interval of images/s, over its mean; a single run has none

    def in_state(self, state: PointState) -> list[PointStatus]:
        return [point for point in self.points if point.state is state]

    @property
    def service_units(self) -> float | None:
        """Return what its points cost at most; None if the site's charging rule is not known."""
        if self.next.service_units is None:
            return None
        # Every attempt that was not refused counts; a point without one will still run once.
        attempts = [sum(attempt.refused is None for attempt in point.record.attempts) for point in self.points]
        return self.next.service_units * sum(max(1, number) for number in attempts)


def add_repetitions(
    folder: Path,
    *,
    target: int | None = None,
    changes: Sequence[str] = (),
    dry_run: bool = False,
    wait: bool = False,
) -> None:
    """Submit what the cells lack of `target` repetitions, or, without a target, of a narrow interval.

    With `wait` the cells are judged again when the jobs have ended, until none lacks anything. Raises UserError, and at
    the end PointsFailedError if a repetition failed or was refused.
    """
    check_changes(changes, repeating=True)
    choose_points = partial(_choose_points, folder, target=target, changes=changes)
    advice = "launch your own to repeat its points"
    failure: PointsFailedError | None = None
    submitted = True
    # Every turn judges the cells anew, with the runs that have ended since.
    while submitted:
        try:
            _, submitted = submit_again(folder, choose_points, advice=advice, dry_run=dry_run, wait=wait)
        except PointsFailedError as error:
            failure = failure or error  # its cell is left alone from now on, the others are not
        if submitted and wait and (site := slowest_site(sites_of(Ledger.open(folder)).values())):
            time.sleep(site.limits.poll_s)  # Slurm was queried when the waiting ended, and is queried again now
    if failure:
        raise failure


def _choose_points(
    folder: Path, ledger: Ledger, compose: Composer, *, target: int | None, changes: Sequence[str]
) -> list[Point]:
    """Judge every cell, print the table and return the repetitions that they lack."""
    order = ledger.sweep.order
    if order is None:
        raise UserError(f"{folder}: its seed was swept, so its cells cannot be repeated; launch with repeats= instead")
    cells = _cells(ledger, order, compose, changes)
    if target is None:
        _judge(cells)
    else:
        _fill_up(cells, target)
    _apply_budget(cells)
    console().print(_table(cells))
    if not any(cell.more for cell in cells):
        log.info("No cell gets a further repetition.")
    points = [
        repetition_of(cell.next, order, cell.number, repetition)
        for cell in cells
        for repetition in range(cell.repetitions, cell.repetitions + cell.more)
    ]
    return sorted(points, key=lambda point: point.num)


def _cells(ledger: Ledger, order: RunOrder, compose: Composer, changes: Sequence[str]) -> list[Cell]:
    """Return the cells as they stand. A cell is composed as it was first launched, with `changes`."""
    by_cell: dict[int, dict[int, PointStatus]] = {}
    for point in poll_sweep(ledger).points:
        number, repetition = order.locate(point.record.num)
        by_cell.setdefault(number, {})[repetition] = point
    launched = {point.point: point.overrides or [] for point in ledger.sweep.points}
    cells, recorded = [], dict[int, list[str]]()
    for number, points in sorted(by_cell.items()):
        repetitions = max(points) + 1
        # The first repetition that is recorded, with the seed of the next one.
        overrides = order.overrides(launched[points[min(points)].record.num], repetitions)
        num = order.number(number, repetitions)
        recorded[num], following = overrides, compose(num, [*overrides, *changes])
        cells.append(Cell(number=number, next=following, repetitions=repetitions, points=list(points.values())))
    refuse_equal([cell.next for cell in cells], recorded, compose, changes)
    return cells


def _judge(cells: Sequence[Cell]) -> None:
    """Give the cells whose interval is too wide the repetitions up to their next examination."""
    for cell, figures in zip(cells, _report_figures(cells), strict=True):
        bench, cell.runs = cell.next.bench, int(figures.get("n") or 0)
        if figures.get("images_per_s_low") is not None:
            cell.half_width = relative_half_width(figures["images_per_s_low"], figures["images_per_s_high"])
        size = next_examined_size(cell.repetitions, bench.repeats_max)
        # An interval may still change while runs are pending or missing, so these reasons come first.
        if pending := _undecided(cell):
            cell.reason = pending
        elif not cell.runs:
            cell.reason = "none of its runs counts; the report shows why"
        elif cell.half_width is not None and cell.half_width <= bench.repeats_target:
            cell.reason = "narrow enough"
        elif size is None:
            cell.reason = f"repeats_max={bench.repeats_max} is reached"
        else:
            cell.more = size - cell.repetitions


def _undecided(cell: Cell) -> str:
    """Return why the cell cannot be judged yet; empty if all its points completed."""
    failed = cell.in_state(PointState.FAILED)
    if any(point.reason is Reason.UNAVAILABLE for point in failed):
        return "unavailable on that machine"
    if failed:
        return f"{len(failed)} failed: `rerun` without --repeats submits them again"
    if planned := cell.in_state(PointState.PLANNED):
        return planned[0].message
    if pending := len(cell.points) - len(cell.in_state(PointState.COMPLETED)):
        return f"waits for {pluralize(pending, 'run')}"
    if remote := sum(not point.is_collected for point in cell.points):
        return f"`collect` has to bring {pluralize(remote, 'run')} first"
    return ""


def _report_figures(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the report's row about each cell's runs that count; of several boards or batches, that of most runs."""
    import polars as pl

    from analysis.comparability import ATTRIBUTES
    from analysis.dataset import open_dataset
    from analysis.merge import merge
    from analysis.stats.cells import build_cells

    completed = [point for cell in cells for point in cell.in_state(PointState.COMPLETED)]
    folders = [point.run_dir for point in completed if point.run_dir and point.is_collected]
    if not folders:
        return [{} for _ in cells]
    with TemporaryDirectory(prefix="inpaint-bench-") as place:
        merge(folders, Path(place, "dataset"), allow_mixed=ATTRIBUTES)  # rows keep incomparable runs apart
        runs = open_dataset(Path(place, "dataset")).runs
    figures = []
    for cell in cells:
        run_ids = [point.record.last.run_id for point in cell.points if point.record.last]
        # Only runs of what would be submitted now: an attempt with other overrides or at another site is another cell.
        same_config = pl.col("run_id").is_in(run_ids) & (
            pl.col("config_hash") == config_hash(cell.next.composed.build())
        )
        rows = build_cells(runs.filter(same_config & (pl.col("site") == cell.next.site.name)))
        figures.append(max(rows.to_dicts(), key=lambda row: int(row["n"]), default={}))
    return figures


def _fill_up(cells: Sequence[Cell], target: int) -> None:
    for cell in cells:
        cell.more = max(0, target - cell.repetitions)
        cell.reason = "" if cell.more else f"has {cell.repetitions}"
        cell.runs = len(cell.in_state(PointState.COMPLETED))


def _apply_budget(cells: Sequence[Cell]) -> None:
    """Take back what `budget` does not allow beside all that was submitted; the widest intervals have priority.

    Raises UserError if the site's charging rule is not known.
    """
    budget = cells[0].next.bench.budget if cells else None
    if budget is None:
        return
    check_budget([cell.next for cell in cells if cell.next.service_units is None], budget)
    spent = sum(cell.service_units or 0 for cell in cells)
    # A single run has no interval yet, which counts as the widest.
    for cell in sorted((cell for cell in cells if cell.more), key=lambda cell: -(cell.half_width or float("inf"))):
        cost = cell.more * (cell.next.service_units or 0)
        if spent + cost > budget:
            unit = cell.next.site.charging.unit
            cell.more = 0
            cell.reason = f"budget={budget:g}: {spent:.1f} {unit} so far, {cost:.1f} {unit} more would exceed it"
            cell.reason += rate_note([cell.next])
        else:
            spent += cost


def _table(cells: Sequence[Cell]) -> Any:
    overrides = [[o for o in cell.next.overrides if not o.startswith("seed=")] for cell in cells]
    rows = [
        (
            cell.next.bench.gpu.name,
            cell.next.bench.batch,
            others,
            cell.next.site.name,
            cell.repetitions,
            cell.runs,
            None if cell.half_width is None else f"{100 * cell.half_width:.2f} %",
            f"{100 * cell.next.bench.repeats_target:g} %",
            cell.more,
            cell.reason,
        )
        for cell, others in zip(cells, tables.differing(overrides), strict=True)
    ]
    columns = ("gpu", "batch", "overrides", "site", "repetitions", "counted", "half width", "target", "adds", "why not")
    return table(columns, rows)
