"""Compose and place the points of a sweep, from the configuration files as they are now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import configure_log, setup_globals
from omegaconf import DictConfig

from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.config.site import check_account
from inpaint_bench.core.config.yaml_file import refuse_guessed_text
from inpaint_bench.core.console import output
from inpaint_bench.core.hydra_support import refuse_hidden_files, register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from launchers.sweep.sweep_record import LaunchContext

from . import hydra_internals
from .composition import Composition, parsed
from .input_paths import InputPaths
from .placement import choose_site, service_units, slurm_request
from .point import Point
from .site_catalog import SiteCatalog, refuse_unused_keys
from .time_limit import AUTO, RunHistory


class Composer:
    """Composes and places points, sharing what they have in common.

    `compose_config` is Hydra's own way from a point's overrides to its configuration.
    """

    def __init__(
        self,
        compose_config: Callable[[list[str]], DictConfig],
        *,
        loader: ConfigLoader,
        config_name: str,
        hydra_overrides: Sequence[str],
    ) -> None:
        files = hydra_internals.config_repository(loader, config_name, hydra_overrides)
        refuse_hidden_files(Path(source.path) for source in files.get_sources() if source.scheme() == "file")
        self.catalog = SiteCatalog(files)
        self._composition = Composition(compose_config, files)
        self._history = RunHistory()
        self._input_paths = InputPaths()

    def __call__(self, num: int, overrides: Sequence[str]) -> Point:
        """Compose, check and place one point. Raises UserError, and Hydra's errors for overrides that do not fit."""
        overrides = split_choices(overrides)
        for override in map(parsed, overrides):
            refuse_guessed_text(override.key_or_group, override.value(), str(override.input_line).partition("=")[2])
        composed = self._composition(overrides)
        config = composed.build_app()
        bench = parse_config(config)
        refuse_unused_keys(bench.site, overrides)
        # The site is chosen first: the time limit depends on what it has for this GPU.
        site, reachability = choose_site(bench, config, self.catalog)
        # Also of sites that this point does not go to: the key was given for one that it might.
        for each in [site, *(self.catalog.site(name, config) for name in bench.sites)]:
            check_account(each)
        self._input_paths.check(bench, site, reachability)
        gpu = site.gpus[bench.gpu.name]
        edits: dict[str, Any] = {"hydra.job.num": num}
        limit_basis = ""
        if bench.time_min == AUTO:
            cell = (site.name, bench.gpu.name, config_hash(config))
            edits["time_min"], limit_basis = self._history.limit(bench.out, cell, gpu.max_minutes)
            bench = replace(bench, time_min=edits["time_min"])
        request = slurm_request(bench, site)
        return Point(
            num=num,
            overrides=overrides,
            composed=composed.with_edits(edits),
            bench=bench,
            site=site,
            request=request,
            limit_basis=limit_basis,
            reachability=reachability,
            service_units=service_units(bench, site, request),
        )


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
        # Hydra sets up logging only in its own main function, and `rerun` does not start there.
        configure_log(compose_config([]).hydra.hydra_logging)
        output.adjust_log()
        yield Composer(compose_config, loader=loader, config_name=launched.config_name, hydra_overrides=hydra_overrides)
