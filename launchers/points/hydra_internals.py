"""All use of Hydra's private API, but for the reading of files in core/hydra_support.py.

Hydra has no public way to share work between the points of a sweep, or to compose outside its own command line with a
search path of one's own. A test of this module names the versions and the signatures that it was tested with.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from hydra import initialize_config_dir
from hydra._internal import utils
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext
from omegaconf import DictConfig


class _Parser(argparse.ArgumentParser):
    """Takes the help of Hydra 1.3 for --shell-completion, an object in which Python 3.14 looks for a percent sign."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        lazy: Any = type(options.get("help"))
        if lazy is not type(None) and not hasattr(lazy, "__contains__"):
            lazy.__contains__ = lambda *_: False
        return super().add_argument(*names, **options)


utils.argparse = cast(Any, SimpleNamespace(**vars(argparse) | {"ArgumentParser": _Parser}))


def args_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's own options."""
    return utils.get_args_parser()


def apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set values in place, by the function with which Hydra sets them."""
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def config_repository(loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> IConfigRepository:
    """Return the configuration files that a composition sees, `hydra.searchpath` included."""
    assert isinstance(loader, ConfigLoaderImpl)
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, list(overrides))
    return repository


def override_dirname(overrides: Sequence[Override], config: DictConfig) -> str:
    """Return `hydra.job.override_dirname` for these overrides, in the style that the configuration asks for."""
    style = config.hydra.job.config.override_dirname
    return get_overrides_dirname(
        overrides=list(overrides), kv_sep=style.kv_sep, item_sep=style.item_sep, exclude_keys=style.exclude_keys
    )


def expand_sweep(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of every point, in the order of Hydra's basic sweeper."""
    # Without a largest batch size all points are in one batch.
    (points,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    return points


def job_context(config: DictConfig) -> HydraContext:
    """Return what Hydra hands to a job, which composes nothing."""
    return HydraContext(config_loader=cast(ConfigLoader, None), callbacks=Callbacks(config))


@contextmanager
def initialized(config_dir: str, extra_dirs: Sequence[str]) -> Iterator[ConfigLoader]:
    """Initialise Hydra with `extra_dirs` on its search path, as `--config-dir` puts them there."""
    with initialize_config_dir(version_base="1.3", config_dir=config_dir, job_name="inpaint_bench"):
        path = create_config_search_path(config_dir)
        for folder in extra_dirs:
            path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        # initialize_config_dir takes one folder: Hydra is initialised again, with the longer search path.
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2(task_name="inpaint_bench", config_search_path=path)
        yield GlobalHydra.instance().config_loader()
