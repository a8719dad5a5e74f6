"""Sending points a second time: what a sweep still lacks, or what another machine left in a plan file."""

from __future__ import annotations

import logging
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf

from inpaint_bench.contract import SWEEP, PointState, Reason
from inpaint_bench.errors import UserError

from . import plans
from .compose import composer
from .ledger import Ledger
from .point import Point
from .submit import Sending, new_sweep, new_sweep_id, send
from .watch import Standing, look

log = logging.getLogger(__name__)

MULTIRUN = "multirun.yaml"  # what Hydra's sweeper leaves


def rerun(folder: Path, task: TaskFunction, *, only: set[Reason] | None, dry_run: bool, wait: bool) -> int:
    """Send what is missing or failed again, each as a further attempt. Returns how many points that was.

    Composed from the configuration files as they are now (a mended site file takes effect) and the overrides
    as they were then. Also heals a launcher that died: what Hydra's own record of the grid holds and our
    ledger does not is sent for the first time.
    """
    folder = folder.absolute()
    grid = _grid(folder)
    fresh = not (folder / SWEEP).is_file()
    if fresh and grid is None:
        raise UserError(f"{folder}: not a sweep directory (neither {SWEEP} nor {MULTIRUN})")
    standings = [] if fresh else look(Ledger.open(folder))
    records = {s.record.num: s.record for s in standings}
    chosen = {s.record.num: s.record.overrides for s in standings if _wanted(s, only)}
    if only is None or Reason.NEVER_STARTED in only:
        chosen |= {num: overrides for num, overrides in enumerate(grid or []) if num not in records}
    points = []
    with composer() as compose:
        for num, overrides in sorted(chosen.items()):
            point = compose(num, overrides)
            record = records.get(num)
            if record and record.plan and not point.reachable:
                log.info(f"point {num} still waits in {record.plan} ({point.why})")
                continue
            point.attempt = record.last.attempt + 1 if record and record.last else 1
            points.append(point)
        if points:
            sending = _sending(folder, compose.context, task, points, dry_run=dry_run, wait=wait)
            send(points, sending, sweep=new_sweep(new_sweep_id()) if fresh else None)
    return len(points)


def run_plan(path: Path, task: TaskFunction, *, dry_run: bool, wait: bool) -> Path:
    """Send the points of a plan file from here, under their own numbers. Returns the new sweep's folder."""
    plan = plans.read(path)
    with composer() as compose:
        points = [compose(num, [*overrides, f"site={plan.site}"]) for num, overrides in plan.points]
        away = [point for point in points if not point.reachable]
        if away and not dry_run:
            raise UserError(f"{path}: {plan.site} cannot be reached from here ({away[0].why})")
        folder = Path(str(points[0].config.hydra.sweep.dir)).absolute()
        sending = _sending(folder, compose.context, task, points, dry_run=dry_run, wait=wait)
        send(points, sending, sweep=new_sweep(plan.sweep_id))
    return folder


def _wanted(standing: Standing, only: set[Reason] | None) -> bool:
    word = standing.verdict
    if word.state not in (PointState.FAILED, PointState.PLANNED):
        return False
    return only is None or word.reason in only


def _grid(folder: Path) -> list[list[str]] | None:
    """The sweep's points as Hydra expands its overrides, in order; None where Hydra left no record."""
    if not (folder / MULTIRUN).is_file():
        return None
    config = OmegaConf.load(folder / MULTIRUN)
    overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [list(filter_overrides(point)) for batch in batches for point in batch]


def _sending(
    folder: Path, context: HydraContext, task: TaskFunction, points: list[Point], *, dry_run: bool, wait: bool
) -> Sending:
    bench = points[0].bench
    return Sending(
        folder=folder,
        hydra_context=context,
        task_function=task,
        wait=wait or bench.wait,
        dry_run=dry_run or bench.dry_run,
        budget=bench.budget,
    )
