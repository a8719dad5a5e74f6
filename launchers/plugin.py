"""Hydra's door: compose every point of a sweep, place it, and hand all of them to `submit`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from inpaint_bench.config import BenchConfig, Reach, SiteConfig
from inpaint_bench.contract import SWEEP
from inpaint_bench.errors import UserError

from .catalogue import Catalogue
from .place import place
from .point import Point, Request


@dataclass
class LauncherConf:
    """Nothing per GPU or site lives here: Hydra 1.3 ignores what a point changes below hydra.launcher."""

    _target_: str = "hydra_plugins.inpaint_bench_launcher.launcher.InpaintBenchLauncher"


def register() -> None:
    ConfigStore.instance().store(group="hydra/launcher", name="inpaint_bench", node=LauncherConf, provider="inpaint_bench")


class SweepLauncher(Launcher):
    """Sends points of our own application to their sites; any other application runs on this machine."""

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
        from .submit import Sending, new_sweep_id, send

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        if (folder / SWEEP).exists() and not self._sweep_made:
            raise UserError(f"{folder} holds a sweep already: choose another hydra.sweep.dir, or `rerun` that one")
        catalogue = Catalogue(self._context.config_loader)
        points = [
            self._point(initial_job_idx + index, list(overrides), catalogue)
            for index, overrides in enumerate(job_overrides)
        ]
        bench = points[0].bench
        sending = Sending(folder=folder, hydra_context=self._context, task_function=self._task)
        if bench is not None:
            sending.wait, sending.dry_run, sending.budget = bench.wait, bench.dry_run, bench.budget
        sweep: dict[str, Any] = {
            "sweep_id": new_sweep_id(),
            "created_unix": round(time.time(), 3),
            "command": sys.argv,
            "overrides": list(OmegaConf.to_container(self._config.hydra.overrides.task)),
        }
        results = send(points, sending, sweep=None if self._sweep_made else sweep)
        self._sweep_made = not sending.dry_run
        return results

    def _point(self, num: int, overrides: list[str], catalogue: Catalogue) -> Point:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with read_write(config), open_dict(config):
            config.hydra.job.num = num
            config.hydra.job.id = f"{config.hydra.job.name}_{num}"
        shown = list(filter_overrides(overrides))
        if OmegaConf.get_type(config) is BenchConfig:
            return place(num, shown, config, catalogue)
        return foreign_point(num, shown, config)


def foreign_point(num: int, overrides: list[str], config: DictConfig) -> Point:
    """A point of an application that is not ours: no site, no request, it runs here."""
    site = SiteConfig(name="local", reach=Reach(method="local"))
    request = Request(partition=None, gpu_option=None, cpus_per_task=1, mem_gb=1, time_min=60 * 24)
    return Point(
        num=num,
        overrides=overrides,
        config=config,
        bench=None,
        site=site,
        request=request,
        reachable=True,
        why="runs on this machine",
    )
