"""Points without Hydra's command line: what `rerun` and plans compose, from the configuration as it is now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import configure_log, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig

from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from launchers.sweep.launch_context import Surroundings

from .composition import Composition
from .placement import place
from .point import Point
from .site_catalog import Catalogue
from .time_limit import Histories


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
def composer(around: Surroundings | None = None) -> Iterator[Composer]:
    """Composes as from `around`, and leads there while it does: what is sent meanwhile starts there too."""
    register()
    around = around or Surroundings()
    with around.entered(), _initialized(around):
        setup_globals()
        loader = GlobalHydra.instance().config_loader()
        hydra_overrides = list(around.hydra_overrides)

        def composed(overrides: list[str]) -> DictConfig:
            return compose(around.config_name, overrides=[*hydra_overrides, *overrides], return_hydra_config=True)

        configure_log(composed([]).hydra.hydra_logging)
        composition = Composition(
            composed, loader=loader, config_name=around.config_name, hydra_overrides=hydra_overrides
        )
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        yield Composer(context, composition, Catalogue(loader), Histories())


@contextmanager
def _initialized(around: Surroundings) -> Iterator[None]:
    """Hydra, with the folders of `around` on its search path, as its own command line puts them there."""
    main = around.config_path or str(conf_dir())
    with initialize_config_dir(version_base="1.3", config_dir=main, job_name="inpaint_bench"):
        path = create_config_search_path(main)
        for folder in around.config_dirs:
            path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2(task_name="inpaint_bench", config_search_path=path)
        yield
