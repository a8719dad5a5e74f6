"""Hydra's basic sweeper without its second composing of every point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import MULTIRUN

from .plugin import SweepLauncher


@dataclass
class SweeperConf:
    _target_: str = "hydra_plugins.inpaint_bench_launcher.launcher.InpaintBenchSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None


def register() -> None:
    ConfigStore.instance().store(
        group="hydra/sweeper", name="inpaint_bench", node=SweeperConf, provider="inpaint_bench"
    )


class SweepSweeper(Sweeper):
    """Expands a sweep into the same points, in the same order and batches, and leaves the same record.

    Hydra's composes every point to see that it can be, drops it, and lets the launcher compose it again: 0.1 s each.
    Our launcher composes all points in this process before it sends any; only for another one they are checked here.
    Not a subclass of Hydra's: its class is made anew whenever Hydra looks for plugins.
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        self._max_batch_size = max_batch_size
        self._params = params or {}
        self.hydra_context: HydraContext
        self.config: DictConfig
        self.launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        asked = parser.parse_overrides([*(f"{key}={value}" for key, value in self._params.items()), *arguments])
        batches: list[list[list[str]]] = BasicSweeper.split_arguments(asked, self._max_batch_size)
        folder = Path(self.config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            file = next(one for one in (folder, *folder.parents) if one.exists())
            raise UserError(f"hydra.sweep.dir={folder}: {file} is a file; a sweep needs a folder") from None
        OmegaConf.save(self.config, folder / MULTIRUN)
        results: list[Sequence[JobReturn]] = []
        begun = 0
        for batch in batches:
            if not isinstance(self.launcher, SweepLauncher):
                self.validate_batch_is_legal(batch)
            results.append(self.launcher.launch(batch, initial_job_idx=begun))
            begun += len(batch)
            for result in results[-1]:
                _: Any = result.return_value  # raises where the job failed
        return results
