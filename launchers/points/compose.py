"""Points composed without Hydra's command line, from the configuration files as they are now: rerun, plans, tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import compose
from hydra.core.utils import configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig

from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from launchers.sweep.sweep_record import LaunchContext

from . import hydra_internals
from .composition import Composition
from .placement import place
from .point import Point
from .site_catalog import SiteCatalog
from .time_limit import RunHistories


@dataclass(frozen=True)
class Composer:
    """Composes and places points, sharing what they have in common."""

    context: HydraContext
    composition: Composition
    catalog: SiteCatalog
    histories: RunHistories

    def __call__(self, num: int, overrides: Sequence[str]) -> Point:
        """Return one placed point. Raises UserError, or Hydra's own errors for overrides that do not fit."""
        return place(num, list(overrides), self.composition, self.catalog, self.histories)


@contextmanager
def composer(launch_context: LaunchContext | None = None) -> Iterator[Composer]:
    """Compose as the launch did. The working directory is the launch's meanwhile, so jobs start there too."""
    register()
    launched = launch_context or LaunchContext()
    config_dir = launched.config_path or str(conf_dir())
    hydra_overrides = list(launched.hydra_overrides)

    def compose_config(overrides: list[str]) -> DictConfig:
        return compose(launched.config_name, overrides=[*hydra_overrides, *overrides], return_hydra_config=True)

    with launched.activated(), hydra_internals.initialized(config_dir, launched.config_dirs) as loader:
        setup_globals()
        configure_log(compose_config([]).hydra.hydra_logging)
        composition = Composition(
            compose_config, loader=loader, config_name=launched.config_name, hydra_overrides=hydra_overrides
        )
        yield Composer(hydra_internals.new_context(loader), composition, SiteCatalog(loader), RunHistories())
