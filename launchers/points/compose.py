"""Compose and place the points of a sweep, from the configuration files as they are now.

Hydra composes a point in about 0.1 s, nearly all of which goes into the defaults list and the files that it names. Both
depend only on the groups that a point chooses; every other override is set on the result. So points that choose the
same groups share one composition, and their values are set on a copy of it, in their order, by the function with which
Hydra sets them. The only difference is that Hydra's own node is complete by then, which a value can see only through an
interpolation. Hence a point is composed by Hydra alone if

- the key of an override has a package (`+` and `~` are fine); in Hydra's own node a point may only change values, which
  then belong to the shared composition;
- there is an interpolation in the value of an override, at its key or above it;
- Hydra copies environment variables (`hydra.job.env_copy`), whose names may be interpolations.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_repository import IConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import configure_log, setup_globals
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.composed_file import holds_secret
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_config, without_hydra
from inpaint_bench.core.config.site import SOONEST, check_account
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.config.yaml_file import refuse_guessed_text
from inpaint_bench.core.console import output
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import refuse_hidden_files, register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from launchers.sweep.sweep_record import LaunchContext

from . import hydra_internals
from .input_paths import InputPaths
from .placement import AUTO, candidates, choose_site, read_minutes, service_units, slurm_request, time_limit
from .point import ComposedConfig, Point
from .site_catalog import EVERY, SiteCatalog, refuse_unused_keys

# Chooses a site by a point's forms at each, and says what each site says; beside them why other sites do not take it
Soonest = Callable[[Sequence[Point], Mapping[str, str]], tuple[str, str]]

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


class Composition:
    """Composes points. `compose` is Hydra's own way from a point's overrides to its configuration."""

    def __init__(self, compose: Callable[[list[str]], DictConfig], files: IConfigRepository) -> None:
        self._compose = lambda lines: _with_environment(compose(lines))
        self._group_exists = cache(files.group_exists)
        self._shared_for = cache(self._compose_choices)

    def __call__(self, lines: Sequence[str]) -> ComposedConfig:
        """Compose one point. Raises Hydra's and OmegaConf's errors for overrides that do not fit."""
        if composed := self._compose_shared(lines):
            return composed
        config = self._compose(list(lines))
        return ComposedConfig(base=config, app=without_hydra(config))

    def _compose_shared(self, lines: Sequence[str]) -> ComposedConfig | None:
        """Compose on a shared base; None if Hydra has to compose the point alone."""
        # Split the overrides: those that the composition depends on, and those that are set on a copy of it.
        choices: list[str] = []
        values: list[Override] = []
        for line in lines:
            override = parsed(line)
            if self._is_group_choice(override):
                choices.append(line)
            elif not _is_plain(override):
                return None
            elif override.key_or_group.split(".")[0] != "hydra":
                # batch=16
                values.append(override)
            elif override.type is OverrideType.CHANGE:
                choices.append(line)
            else:
                return None
        shared = self._shared_for(tuple(choices))
        # At or below an interpolation the result could depend on what Hydra sets only after the overrides.
        if shared is None or any(_is_interpolated(shared.app, value.key_or_group) for value in values):
            return None
        # The point's own overrides in Hydra's node: the shared composition has recorded the choices of groups alone.
        task = [override for override in map(parsed, lines) if not override.is_hydra_override()]
        edits = {
            "hydra.overrides.task": [override.input_line for override in task],
            "hydra.job.override_dirname": hydra_internals.override_dirname(task, shared.base),
        }
        return replace(shared, values=tuple(values), edits=edits)

    def _compose_choices(self, choices: tuple[str, ...]) -> ComposedConfig | None:
        try:
            config = self._compose(list(choices))
        except (HydraException, OmegaConfBaseException, ValueError):
            return None  # composed alone, the point raises the error that names what is wrong with it
        if config.hydra.job.env_copy:
            return None
        return ComposedConfig(base=config, app=without_hydra(config))

    def _is_group_choice(self, override: Override) -> bool:
        """Return whether it chooses a configuration file; Hydra takes `group={...}` for values."""
        return self._group_exists(override.key_or_group) and not isinstance(override.value(), dict)


def _with_environment(config: DictConfig) -> DictConfig:
    """Set what comes from environment variables to its value here, as a job may lack them; secrets are left to it."""

    def visit(block: DictConfig | ListConfig) -> None:
        for key in range(len(block)) if isinstance(block, ListConfig) else list(block):
            node: Any = block._get_node(key)
            if isinstance(node, DictConfig | ListConfig):
                visit(node)
            elif "${oc.env:" in str(node) and not holds_secret(str(node)):
                node._set_value(block[key])

    with read_write(config):
        visit(config)
    return config


@cache  # Hydra's parser takes as long for a line as setting its value, and most lines of a sweep are equal
def parsed(line: str) -> Override:
    """Parse the override of one point. Raises Hydra's error for a line that is none."""
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def _is_plain(override: Override) -> bool:
    plain = override.package is None and not override.is_sweep_override() and "${" not in str(override.value())
    return plain and _PLAIN_KEY.fullmatch(override.key_or_group) is not None


def _is_interpolated(node: Any, key: str) -> bool:
    """Return whether there is an interpolation at a key or above it."""
    for name in key.split("."):
        if not isinstance(node, DictConfig):
            return False
        node = node._get_node(name, validate_access=False)
        if OmegaConf.is_interpolation(node):
            return True
    return False


class Composer:
    """Composes and places points, sharing what they have in common.

    `compose_config` is Hydra's own way from a point's overrides to its configuration.
    """

    soonest: Soonest | None = None  # chooses the site of points with site=soonest, once for each request

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
        self._minutes = cache(read_minutes)
        self._input_paths = InputPaths()
        self._chosen: dict[object, tuple[str, str]] = {}

    def __call__(self, num: int, overrides: Sequence[str]) -> Point:
        """Compose, check and place one point. Raises UserError, and Hydra's errors for overrides that do not fit."""
        overrides = split_choices(overrides)
        for override in map(parsed, overrides):
            refuse_guessed_text(override.key_or_group, override.value(), str(override.input_line).partition("=")[2])
        composed = self._composition(overrides)
        config = composed.build_app()
        bench = parse_config(config)
        refuse_unused_keys(bench.site, overrides)
        if bench.site.name == SOONEST:
            return self._at_soonest(num, overrides, bench, config)
        # The site is chosen first: the time limit depends on what it has for this GPU.
        site, reachability = choose_site(bench, config, self.catalog)
        # Also of sites that this point does not go to: the key was given for one that it might.
        for each in [site, *(self.catalog.site(name, config) for name in bench.sites if name != EVERY)]:
            check_account(each)
        self._input_paths.check(bench, site, reachability)
        gpu = site.gpus[bench.gpu.name]
        edits: dict[str, Any] = {"hydra.job.num": num}
        limit_basis, earlier = "", list[float]()
        if AUTO in (bench.time_min, bench.points_per_job):
            earlier = self._minutes(Path(bench.out)).get((site.name, bench.gpu.name, config_hash(config)), [])
        if bench.time_min == AUTO:
            edits["time_min"], limit_basis = time_limit(earlier, bench.out, gpu.max_minutes)
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
            likely_min=max(earlier, default=None),
            reachability=reachability,
            service_units=service_units(bench, site, request),
        )

    def _at_soonest(self, num: int, overrides: Sequence[str], bench: BenchConfig, config: DictConfig) -> Point:
        """Compose a point at the site that starts its request first, as if that site had been named."""
        sites = [site for _, site, _ in candidates(bench, config, self.catalog)]
        others = [override for override in overrides if override_key(override) != "site"]
        card = (bench.gpu.name, bench.gpus, bench.nodes, bench.mem_gb, bench.profiler, *map(id, sites))
        if card not in self._chosen:
            if self.soonest is None:
                raise UserError("site=soonest: is chosen by a launch of a sweep; name a site")
            points, problems = list[Point](), dict[str, str]()
            for site in sites:
                try:
                    points.append(self(num, [*others, f"site={site.name}"]))
                except UserError as error:
                    problems[site.name] = str(error)
                    if site is sites[-1] and not points:
                        raise
            self._chosen[card] = self.soonest(points, problems)
        name, basis = self._chosen[card]
        return replace(self(num, [*others, f"site={name}"]), site_basis=basis)


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
