"""Sending points a second time: what a sweep still lacks, or what another machine left in a plan file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf, open_dict, read_write

from inpaint_bench.config import register
from inpaint_bench.contract import SWEEP, PointState, Reason
from inpaint_bench.errors import UserError
from inpaint_bench.paths import conf_dir

from . import plans
from .catalogue import Catalogue
from .ledger import Ledger
from .place import place
from .point import Point
from .submit import Sending, new_sweep_id, send
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
    with _hydra() as context:
        catalogue = Catalogue(context.config_loader)
        for num, overrides in sorted(chosen.items()):
            point = _compose(num, overrides, catalogue)
            record = records.get(num)
            if record and record.plan and not point.reachable:
                log.info(f"point {num} still waits in {record.plan} ({point.why})")
                continue
            point.attempt = record.last.attempt + 1 if record and record.last else 1
            points.append(point)
        if points:
            sending = _sending(folder, context, task, points, dry_run=dry_run, wait=wait)
            send(points, sending, sweep=_new_sweep(new_sweep_id()) if fresh else None)
    return len(points)


def run_plan(path: Path, task: TaskFunction, *, dry_run: bool, wait: bool) -> Path:
    """Send the points of a plan file from here, under their own numbers. Returns the new sweep's folder."""
    plan = plans.read(path)
    with _hydra() as context:
        catalogue = Catalogue(context.config_loader)
        points = [_compose(num, [*overrides, f"site={plan.site}"], catalogue) for num, overrides in plan.points]
        away = [point for point in points if not point.reachable]
        if away and not dry_run:
            raise UserError(f"{path}: {plan.site} cannot be reached from here ({away[0].why})")
        folder = Path(str(points[0].config.hydra.sweep.dir)).absolute()
        sending = _sending(folder, context, task, points, dry_run=dry_run, wait=wait)
        send(points, sending, sweep=_new_sweep(plan.sweep_id))
    return folder


def _wanted(standing: Standing, only: set[Reason] | None) -> bool:
    word = standing.verdict
    if word.state not in (PointState.FAILED, PointState.PLANNED):
        return False
    return only is None or word.reason in only


def _new_sweep(sweep_id: str) -> dict[str, Any]:
    return {"sweep_id": sweep_id, "created_unix": round(time.time(), 3), "command": sys.argv, "overrides": []}


def _grid(folder: Path) -> list[list[str]] | None:
    """The sweep's points as Hydra expands its overrides, in order; None where Hydra left no record."""
    if not (folder / MULTIRUN).is_file():
        return None
    config = OmegaConf.load(folder / MULTIRUN)
    overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [list(filter_overrides(point)) for batch in batches for point in batch]


@contextmanager
def _hydra() -> Iterator[HydraContext]:
    """Hydra without its command line."""
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="inpaint_bench"):
        setup_globals()
        yield HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())


def _compose(num: int, overrides: Sequence[str], catalogue: Catalogue) -> Point:
    config = compose("config", overrides=list(overrides), return_hydra_config=True)
    with read_write(config), open_dict(config):
        config.hydra.job.num = num
    configure_log(config.hydra.hydra_logging)
    return place(num, list(overrides), config, catalogue)


def _sending(
    folder: Path, context: HydraContext, task: TaskFunction, points: list[Point], *, dry_run: bool, wait: bool
) -> Sending:
    bench = points[0].bench
    assert bench is not None
    return Sending(
        folder=folder,
        hydra_context=context,
        task_function=task,
        wait=wait or bench.wait,
        dry_run=dry_run,
        budget=bench.budget,
    )
