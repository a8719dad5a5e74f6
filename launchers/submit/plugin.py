"""Hydra's door: compose every point of a sweep, place it, and hand all of them to `submit`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.console import shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import MULTIRUN
from launchers.points.composition import Composed, Composition
from launchers.points.placement import place
from launchers.points.repetitions import AUTO, Order
from launchers.points.site_catalog import Catalogue
from launchers.points.time_limit import Histories
from launchers.sweep.launch_context import Surroundings

log = logging.getLogger(__name__)


@dataclass
class LauncherConf:
    """Nothing per GPU or site lives here: Hydra 1.3 ignores what a point changes below hydra.launcher."""

    _target_: str = "hydra_plugins.inpaint_bench_launcher.launcher.InpaintBenchLauncher"


def register() -> None:
    ConfigStore.instance().store(
        group="hydra/launcher", name="inpaint_bench", node=LauncherConf, provider="inpaint_bench"
    )


class SweepLauncher(Launcher):
    """Sends points of our own application to their sites; any other application runs on this machine."""

    ended: ClassVar[list[Path]] = []  # sweeps with repeats=auto whose points were waited for: Hydra returns nothing

    def __init__(self) -> None:
        self._config: DictConfig
        self._context: HydraContext
        self._task: TaskFunction
        self._sweep_made = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._context = hydra_context
        self._task = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        try:
            return self._launch([list(o) for o in job_overrides], initial_job_idx, folder)
        except (UserError, HydraException, OmegaConfBaseException):
            _forget_refused(folder)
            raise

    def _launch(self, job_overrides: list[list[str]], initial_job_idx: int, folder: Path) -> list[JobReturn]:
        from .submit import Sending, new_sweep, send

        if OmegaConf.get_type(self._config) is not BenchConfig:
            composed = [self._foreign(initial_job_idx + i, overrides) for i, overrides in enumerate(job_overrides)]
            return run_foreign(composed, folder, self._context, self._task)
        composition = Composition(
            lambda overrides: self._context.config_loader.load_sweep_config(self._config, overrides),
            loader=self._context.config_loader,
            config_name=self._config.hydra.job.config_name,
            hydra_overrides=list(self._config.hydra.overrides.hydra),
        )
        catalogue, histories = Catalogue(self._context.config_loader), Histories()
        points = [
            place(initial_job_idx + i, list(filter_overrides(overrides)), composition, catalogue, histories)
            for i, overrides in enumerate(job_overrides)
        ]
        order = self._order([point.bench for point in points])
        if order and not order.as_typed:
            points = order.points(points)
            log.info(f"order: {order}")
        bench = points[0].bench
        typed_in = list(self._config.hydra.overrides.task)
        asked = [one for one in typed_in if one.split("=")[0] == "recipe"]
        if bench.study.name != "none" and asked:
            raise UserError(
                f"{asked[0]}: study={bench.study.name} makes the recipes itself; study.base=<recipe> names its base"
            )
        for key in ("wait", "dry_run", "budget"):
            if len({getattr(point.bench, key) for point in points}) > 1:
                raise UserError(f"{key} differs between points: it is one for the whole sweep")
        sending = Sending(
            folder=folder,
            hydra_context=self._context,
            task_function=self._task,
            wait=bench.wait,
            dry_run=bench.dry_run,
            sweep=None
            if self._sweep_made
            else new_sweep(overrides=typed_in, order=order, around=Surroundings.of(self._config)),
        )
        try:
            results = send(lambda: points, sending)
        finally:
            if sending.waited and bench.repeats == AUTO:
                self.ended.append(folder)
        self._sweep_made = not sending.dry_run
        if bench.dry_run and order and order.order_seed != bench.order_seed:
            log.info(f"A launch draws an order of its own; order_seed={order.order_seed} makes it this one.")
        if bench.repeats == AUTO and not sending.waited:
            log.info(f"When these have ended: {shell_command('rerun', folder, '--repeats', 'auto')}")
        return results

    def _order(self, cells: Sequence[BenchConfig]) -> Order | None:
        """None for a sweep that comes in batches: none of them knows how many cells there are."""
        order = Order.asked(cells)
        if self._config.hydra.sweeper.get("max_batch_size") is None:
            return order
        if order and not order.as_typed:
            raise UserError("hydra.sweeper.max_batch_size: repetitions need the whole sweep at once; leave it out")
        return None

    def _foreign(self, num: int, overrides: list[str]) -> Composed:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        return Composed.whole(config).edited({"hydra.job.num": num, "hydra.job.id": f"{config.hydra.job.name}_{num}"})


def run_foreign(points: Sequence[Composed], folder: Path, context: HydraContext, task: TaskFunction) -> list[JobReturn]:
    """An application that is not ours: every point runs on this machine, nothing is recorded."""
    from launchers.slurm.job import HydraState, PointJob
    from launchers.slurm.local_executor import LocalCall, run_all

    hydra = HydraState.now(context, task)
    calls = [
        LocalCall(call=PointJob(hydra=hydra, composed=composed, raise_failure=False), time_min=60 * 24)
        for composed in points
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".jobs-", dir=folder) as jobs:
        run_all(calls, folder=Path(jobs), code=None)
    for call in calls:
        if isinstance(call.result, Exception):
            raise call.result
    return [call.result for call in calls if isinstance(call.result, JobReturn)]


def _forget_refused(folder: Path) -> None:
    """Hydra's sweeper leaves its record before we see a point; of a sweep that never was, nothing shall stay."""
    record = folder / MULTIRUN
    if record.exists() and {file.name for file in folder.iterdir()} <= {MULTIRUN, ".lock"}:
        record.unlink()
