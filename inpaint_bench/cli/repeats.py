"""Further repetitions of a sweep: `repeats=auto`, and `rerun --repeats`.

A cell is judged by what the report would say of it: its runs are merged and audited, and the interval is the report's.
Only runs of the cell as it would be sent now count, on the same site and with the same `config_hash`. A cell is left
alone while something of it is queued or waits elsewhere, and where something failed: `rerun` sends that again, and no
cell is repeated to make up for a failure. When a cell is looked at, and what that does to its interval: stopping.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.config import config_hash
from inpaint_bench.core.console import console, pluralize, table
from inpaint_bench.core.errors import PointsFailedError
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.stopping import enough, half_width, next_look
from launchers.status import budget as budgets
from launchers.status import tables
from launchers.status.survey import sites_of, slowest_site
from launchers.submit.add_repeats import Cell, extend
from launchers.sweep.ledger import Ledger

if TYPE_CHECKING:
    import polars as pl
    from hydra.types import TaskFunction

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Decision:
    """What becomes of one cell."""

    more: int = 0  # repetitions to send
    why: str = ""
    runs: int = 0  # those that count
    width: float | None = None  # half width of the interval of images/s over its mean; one run has none


def repeat(
    folder: Path,
    task: TaskFunction,
    *,
    wanted: int | None = None,
    changes: Sequence[str] = (),
    dry_run: bool = False,
    wait: bool = False,
) -> None:
    """Send what the cells lack of `wanted` repetitions, or else of a narrow interval; say per cell what and why.

    Where the points are waited for, the cells are looked at again until none lacks anything. Raises UserError, and
    at the end PointsFailedError where a repetition failed or was refused.
    """

    def judge(cells: list[Cell]) -> list[int]:
        decisions = decide(cells) if wanted is None else [_up_to(wanted, cell) for cell in cells]
        _keep_to_budget(cells, decisions)
        console().print(_table(cells, decisions))
        if not any(decision.more for decision in decisions):
            log.info("No cell gets a further repetition.")
        return [decision.more for decision in decisions]

    failed: PointsFailedError | None = None
    going_on = True
    while going_on:
        try:
            going_on = extend(folder, task, judge, changes=changes, dry_run=dry_run, wait=wait)
        except PointsFailedError as error:
            failed = failed or error  # its cell is left alone from now on, the others are not
        if going_on and wait and (site := slowest_site(sites_of(Ledger.open(folder)).values())):
            time.sleep(site.limits.poll_s)  # the waiting ended with a look, and the next begins with one
    if failed:
        raise failed


def decide(cells: Sequence[Cell]) -> list[Decision]:
    """Which cells have an interval that is narrow enough, and which get the repetitions up to their next look."""
    completed = [standing for cell in cells for standing in cell.of(PointState.COMPLETED)]
    folders = [standing.run_dir for standing in completed if standing.run_dir and standing.is_collected]
    runs = _merged(folders) if folders else None
    return [_decide(cell, runs) for cell in cells]


def _decide(cell: Cell, runs: pl.DataFrame | None) -> Decision:
    bench = cell.next.bench
    found = _figures(cell, runs)
    low, high = found.get("images_per_s_low"), found.get("images_per_s_high")
    result = Decision(runs=found.get("n", 0), width=None if low is None or high is None else half_width(low, high))
    look = next_look(cell.sent, bench.repeats_max)
    if why := _left_alone(cell):
        result.why = why
    elif not result.runs:
        result.why = "none of its runs counts, which the report explains"
    elif enough(result.width, bench.repeats_target):
        result.why = "narrow enough"
    elif look is None:
        result.why = f"repeats_max={bench.repeats_max} is reached"
    else:
        result.more = look - cell.sent
    return result


def _left_alone(cell: Cell) -> str:
    """Why nothing can be said of the cell yet; empty where all its points completed."""
    failed = cell.of(PointState.FAILED)
    if any(standing.reason is Reason.UNAVAILABLE for standing in failed):
        return "unavailable there"
    if failed:
        return f"{len(failed)} failed: `rerun` without --repeats sends that again"
    if planned := cell.of(PointState.PLANNED):
        return planned[0].message
    if pending := len(cell.standings) - len(cell.of(PointState.COMPLETED)):
        return f"waits for {pluralize(pending, 'run')}"
    if away := sum(not standing.is_collected for standing in cell.standings):
        return f"`collect` has to bring {pluralize(away, 'run')} first"
    return ""


def _merged(folders: list[Path]) -> pl.DataFrame:
    """The runs of these directories as the report would have them; what must not be averaged it keeps apart."""
    from analysis.comparability import ATTRIBUTES
    from analysis.dataset import open_dataset
    from analysis.merge import merge

    with TemporaryDirectory(prefix="inpaint-bench-") as place:
        merge(folders, Path(place, "dataset"), allow_mixed=ATTRIBUTES)
        return open_dataset(Path(place, "dataset")).runs


def _figures(cell: Cell, runs: pl.DataFrame | None) -> dict[str, Any]:
    """The report's figures of the cell's runs that count: of the most that may be averaged, of one batch and board."""
    import polars as pl

    from analysis.stats.cells import build_cells

    if runs is None:
        return {}
    own = [standing.record.last.run_id for standing in cell.standings if standing.record.last]
    mine = pl.col("run_id").is_in(own) & (pl.col("config_hash") == config_hash(cell.next.config))
    found = build_cells(runs.filter(mine & (pl.col("site") == cell.next.site.name)))
    return max(found.to_dicts(), key=lambda row: int(row["n"]), default={})


def _up_to(wanted: int, cell: Cell) -> Decision:
    completed = len(cell.of(PointState.COMPLETED))
    more = max(0, wanted - cell.sent)
    return Decision(more=more, why="" if more else f"has {cell.sent}", runs=completed)


def _keep_to_budget(cells: Sequence[Cell], decisions: Sequence[Decision]) -> None:
    """Take back what `budget` does not allow, beside all that was sent so far: the widest intervals go first.

    Raises UserError where the site's charging rule is not known.
    """
    budget = cells[0].next.bench.budget if cells else None
    if budget is None:
        return
    budgets.check([cell.next for cell in cells if cell.next.service_units is None], budget)
    spent = sum(cell.service_units or 0 for cell in cells)
    lacking = [pair for pair in zip(cells, decisions, strict=True) if pair[1].more]
    for cell, decision in sorted(lacking, key=lambda pair: -(pair[1].width or float("inf"))):
        cost = decision.more * (cell.next.service_units or 0)
        if spent + cost > budget:
            decision.more = 0
            unit = cell.next.site.charging.unit
            decision.why = (
                f"budget={budget:g}: {cost:.1f} {unit} more, beside {spent:.1f} {unit}, may cost more than that"
            )
        spent += decision.more * (cell.next.service_units or 0)


def _table(cells: Sequence[Cell], decisions: Sequence[Decision]) -> Any:
    names = tables.differing([[one for one in cell.next.overrides if not one.startswith("seed=")] for cell in cells])
    rows = [
        (
            cell.next.bench.gpu.name,
            cell.next.bench.batch,
            also,
            cell.next.site.name,
            cell.sent,
            decision.runs,
            None if decision.width is None else f"{100 * decision.width:.2f} %",
            f"{100 * cell.next.bench.repeats_target:g} %",
            decision.more,
            decision.why,
        )
        for cell, decision, also in zip(cells, decisions, names, strict=True)
    ]
    columns = ("gpu", "batch", "also", "site", "sent", "count", "half width", "target", "sends", "why not")
    return table(columns, rows)
