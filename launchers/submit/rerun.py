"""Sending points a second time: what a sweep still lacks, or what another machine left in a plan file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.attempt_state import AttemptState
from inpaint_bench.core.console import console
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import MULTIRUN, SWEEP, PointState, Reason
from launchers.points.compose import composer
from launchers.points.point import Point
from launchers.points.repetitions import Order
from launchers.remote import plan_file
from launchers.status.survey import PointStatus, poll_sweep, sites_of
from launchers.sweep.launch_context import Surroundings
from launchers.sweep.ledger import Ledger, PointRecord, sweeper_params

from .recovery import rebuilt
from .rerun_overrides import check_changes
from .rerun_policy import Asked, decide, decisions_table, merged
from .submit import Sending, new_sweep, send

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What one `rerun` did. `unknown`: points that were left alone because nobody could say how they stand."""

    sent: int
    unknown: list[PointStatus]


def rerun(
    folder: Path,
    task: TaskFunction,
    *,
    only: frozenset[Reason] | None,
    changes: Sequence[str] = (),
    dry_run: bool,
    wait: bool,
) -> Rerun:
    """Send what is missing or failed again, each as a further attempt.

    Which points, and with what changes, is for the policies (`rerun.<reason>`) to say; `only` names reasons instead.
    Composed from the configuration files as they are now (a mended site file takes effect), the overrides as
    they were then, and `changes` to them. Also heals a launcher that died, and a sweep of which only Hydra's record and
    run directories are left: what the grid holds, and neither the ledger nor a run directory knows, is sent for the
    first time. Points that wait in a plan are left to it, and what may be in a queue to Slurm.
    """
    folder = folder.absolute()
    fresh = not (folder / SWEEP).is_file()
    if fresh and not (folder / MULTIRUN).is_file():
        raise UserError(f"{folder}: not a sweep directory (neither {SWEEP} nor {MULTIRUN})")
    check_changes(changes)
    sweep = _found(folder) | {"params": sweeper_params(folder)} if fresh else Ledger(folder).sweep
    cells = _grid([*sweep.get("params", []), *sweep["overrides"]])
    with composer(Surroundings.recorded(sweep.get("surroundings"))) as compose:
        order = Order.recorded(sweep.get("order"))
        if fresh and cells:
            benches = [compose(num, cell).bench for num, cell in enumerate(cells)]
            if any(bench.dry_run for bench in benches):
                raise UserError(f"{folder}: was a dry run; launch it without dry_run")
            order = Order.asked(benches)
            sweep["order"] = order.record() if order else None
        grid = order.grid(cells) if order and cells else cells
        if fresh:
            sweep |= rebuilt(folder, grid, compose)
        ledger = Ledger(folder, instead=sweep)
        unknown: list[PointStatus] = []

        def choose() -> list[Point]:
            if sweep["points"] and fresh and not dry_run:
                ledger.create(**sweep)
            standings = poll_sweep(ledger, holding_lock=not dry_run).points
            unknown[:] = [s for s in standings if s.state is PointState.UNKNOWN]
            known, sites = {s.record.num for s in standings}, sites_of(ledger)
            carried = [s.record for s in standings if s.record.plan and sites[s.record.site].connect.method != "ssh"]
            waiting = {record.num: record.plan for record in carried}  # ssh: what waits for an answer is tried again
            if only is None or Reason.NEVER_STARTED in only:
                standings += [_untold(num, overrides) for num, overrides in enumerate(grid) if num not in known]
                for plan in sorted({str(plan) for plan in waiting.values()}):
                    away = "is left alone: its points are for another machine to send"
                    log.info(f"{plan} {away} ({plan_file.launch_command(plan)})")
            standings = sorted((s for s in standings if s.record.num not in waiting), key=lambda s: s.record.num)
            outcomes = decide(standings, Asked(only=only, changes=tuple(changes)), compose)
            asked_of = next((s.record.overrides for s in standings), cells[0] if cells else [])
            if changes and not outcomes:  # what is wrong with them is said though nothing is sent
                compose(0, merged(asked_of, changes))
            if outcomes:
                console().print(decisions_table([decision for decision, _ in outcomes]))
            return [point for _, point in outcomes if point is not None]

        sending = Sending(
            folder=folder,
            hydra_context=compose.context,
            task_function=task,
            wait=wait,
            dry_run=dry_run,
            sweep=sweep if fresh else None,
        )
        return Rerun(sent=len(send(choose, sending)), unknown=unknown)


def run_plan(path: Path, task: TaskFunction, *, config_dir: Path | None, dry_run: bool, wait: bool) -> None:
    """Send the points of a plan file from here, under their own numbers.

    Their folder is named after the plan's sweep, so the same plan is not sent twice by mistake. `config_dir` holds here
    what --config-dir held where the sweep was launched.
    """
    plan = plan_file.read(path)
    around = replace(Surroundings.recorded(plan.launch_context), working_dir=str(Path.cwd()))
    if config_dir is not None:
        around = replace(around, config_dirs=(str(config_dir.absolute()),))
    with composer(around) as compose:
        points = [compose(planned.num, [*planned.overrides, f"site={plan.site}"]) for planned in plan.points]
        for point, planned in zip(points, plan.points, strict=True):
            point.attempt = planned.attempt
        away = [point for point in points if not point.reachable]
        if away and not dry_run:
            raise UserError(f"{path}: {plan.site} cannot be reached from here ({away[0].why})")
        bench = points[0].bench
        folder = Path(bench.out, f"{plan.sweep_id}-{plan.site}").absolute()
        if (folder / SWEEP).exists() and not dry_run:
            raise UserError(f"{path}: was sent already, into {folder}; `status` and `rerun` take that folder")
        sending = Sending(
            folder=folder,
            hydra_context=compose.context,
            task_function=task,
            wait=wait,
            dry_run=dry_run,
            sweep=new_sweep(plan.sweep_id, order=Order.recorded(plan.order), around=around),
        )
        send(lambda: points, sending)


def _untold(num: int, overrides: list[str]) -> PointStatus:
    """A point of the grid of which nothing tells: the launcher died before it wrote it down."""
    record = PointRecord(num=num, overrides=overrides, gpu=None, batch=None, site="")
    word = AttemptState(state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message="its launcher died")
    return PointStatus(record=record, resolved=word)


def _found(folder: Path) -> dict[str, Any]:
    """A new sweep from Hydra's record, where the launcher died before it wrote its own."""
    config = OmegaConf.load(folder / MULTIRUN)
    assert isinstance(config, DictConfig)
    return new_sweep(overrides=list(config.hydra.overrides.task), around=Surroundings.of(config))


def _grid(overrides: Sequence[str]) -> list[list[str]]:
    """The points of a sweep as Hydra's basic sweeper expands it, in order; none for the points of a plan."""
    if not overrides:
        return []
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(filter_overrides(point)) for batch in batches for point in batch]
