"""Hydra's door: compose every point of a sweep, place it, and hand all of them to `submit`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from inpaint_bench.config import BenchConfig
from inpaint_bench.contract import SWEEP
from inpaint_bench.errors import UserError

from .catalogue import Catalogue
from .place import place


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
        from .submit import Sending, new_sweep, new_sweep_id, send

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        configs = [self._compose(initial_job_idx + i, list(o)) for i, o in enumerate(job_overrides)]
        if OmegaConf.get_type(configs[0]) is not BenchConfig:
            return run_foreign(configs, folder, self._context, self._task)
        if (folder / SWEEP).exists() and not self._sweep_made:
            raise UserError(f"{folder} holds a sweep already: choose another hydra.sweep.dir, or `rerun` that one")
        catalogue = Catalogue(self._context.config_loader)
        points = [
            place(config.hydra.job.num, list(filter_overrides(overrides)), config, catalogue)
            for config, overrides in zip(configs, job_overrides, strict=True)
        ]
        bench = points[0].bench
        sending = Sending(
            folder=folder,
            hydra_context=self._context,
            task_function=self._task,
            wait=bench.wait,
            dry_run=bench.dry_run,
            budget=bench.budget,
        )
        results = send(points, sending, sweep=None if self._sweep_made else new_sweep(new_sweep_id()))
        self._sweep_made = not sending.dry_run
        return results

    def _compose(self, num: int, overrides: list[str]) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with read_write(config), open_dict(config):
            config.hydra.job.num = num
            config.hydra.job.id = f"{config.hydra.job.name}_{num}"
        return config


def run_foreign(
    configs: Sequence[DictConfig], folder: Path, context: HydraContext, task: TaskFunction
) -> list[JobReturn]:
    """An application that is not ours: every point runs on this machine, nothing is recorded."""
    from .job import PointJob
    from .local import LocalCall, run_all

    singletons = Singleton.get_state()
    calls = [
        LocalCall(
            call=PointJob(
                hydra_context=context,
                task_function=task,
                config=config,
                singletons=singletons,
                raise_failure=False,
            ),
            time_min=60 * 24,
        )
        for config in configs
    ]
    with tempfile.TemporaryDirectory(prefix=".jobs-", dir=_made(folder)) as jobs:
        run_all(calls, folder=Path(jobs), code=None)
    for call in calls:
        if isinstance(call.result, Exception):
            raise call.result
    return [call.result for call in calls if isinstance(call.result, JobReturn)]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
