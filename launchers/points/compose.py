"""Points without Hydra's command line: what `rerun` and plans compose, from the configuration as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig

from inpaint_bench.paths import conf_dir
from inpaint_bench.schema import register

from .catalogue import Catalogue
from .composition import Composition
from .history import Histories
from .place import place
from .point import Point


@dataclass(frozen=True)
class Composer:
    context: HydraContext
    composition: Composition
    catalogue: Catalogue
    histories: Histories

    def __call__(self, num: int, overrides: Sequence[str]) -> Point:
        """One placed point. Raises UserError, or Hydra's own errors for overrides that do not fit."""
        return place(num, list(overrides), self.composition, self.catalogue, self.histories)


@contextmanager
def composer() -> Iterator[Composer]:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir()), job_name="inpaint_bench"):
        setup_globals()
        loader = GlobalHydra.instance().config_loader()
        configure_log(_compose([]).hydra.hydra_logging)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        yield Composer(context, Composition(_compose, loader=loader), Catalogue(loader), Histories())


def _compose(overrides: list[str]) -> DictConfig:
    return compose("config", overrides=overrides, return_hydra_config=True)
