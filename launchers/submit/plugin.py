"""Hydra's sweeper and launcher: expand a sweep, compose and place every point, and submit all of them.

The command line chooses from the points of a study's grid, and adds to them.
"""

import logging
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.config.bench import BenchConfig, StudyConfig
from inpaint_bench.core.config.recipe import STUDIES, list_parts
from inpaint_bench.core.config.recipe import name as recipe_name
from inpaint_bench.core.config.validation import override_key
from inpaint_bench.core.console import list_some, output, pluralize, shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import refuse_wrong_overrides
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from launchers.points.compose import Composer, Soonest
from launchers.points.hydra_internals import expand_sweep
from launchers.points.point import Point
from launchers.points.repetitions import AUTO, SWEEP_KEYS, choose_order, initial_points
from launchers.sweep.sweep_record import (
    LaunchContext,
    SweepRecord,
    check_path,
    check_unused,
    new_sweep_id,
    save_multirun,
)

log = logging.getLogger(__name__)

MAX_COUNTED = 10**6  # values of one key; more are not counted
# Keys that other launchers of Hydra ignore.
_LAUNCHER_KEYS = ("dry_run", "repeats", "notify", "budget", "points_per_job", "order_seed")
_OF_THE_SWEEP = (*SWEEP_KEYS, "hydra", "study")


# Nothing about GPUs or sites: Hydra 1.3 ignores what a point changes below hydra.launcher.
@dataclass
class LauncherConf:
    """Hydra's configuration of our launcher."""

    _target_: str = "hydra_plugins.inpaint_bench_launcher.launcher.InpaintBenchLauncher"


@dataclass
class SweeperConf:
    """Hydra's configuration of our sweeper."""

    _target_: str = "hydra_plugins.inpaint_bench_launcher.launcher.InpaintBenchSweeper"
    params: dict[str, str] | None = None  # overrides that a study adds


def register() -> None:
    """Make launcher and sweeper known to Hydra."""
    for group, node in (("hydra/launcher", LauncherConf), ("hydra/sweeper", SweeperConf)):
        ConfigStore.instance().store(group=group, name="inpaint_bench", node=node, provider="inpaint_bench")


class SweepSweeper(Sweeper):
    """Expands a sweep into the same points, in the same order, as Hydra's basic sweeper, and keeps the same record.

    Hydra's composes every point to check it, drops the result, and lets the launcher compose it again: 0.1 s each. Our
    launcher composes all points in this process before it submits any, so they are checked here only for another one.
    Not a subclass of Hydra's, whose class is made anew whenever Hydra looks for plugins.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}
        self.hydra_context: HydraContext
        self.config: DictConfig
        self.launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra passes, and create the launcher that the configuration names."""
        self.hydra_context = hydra_context
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Expand the overrides of the command line and of the study into points, and launch them all.

        Raises UserError for a sweep directory that cannot be made, and what the launcher and failed jobs raise.
        """
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        # The overrides of the study first, as Hydra's basic sweeper does with its `params`.
        parameters = [f"{key}={value}" for key, value in self._params.items()]
        overrides = parser.parse_overrides([*parameters, *arguments])
        study = self.config.get("study")
        grid = grid_points(study) if study and study.grid else [[]]
        _refuse_no_values(overrides)
        self._check_size(overrides, len(grid))
        points = [split_choices(point) for point in merge_typed(grid, expand_sweep(overrides))]
        for key in ("out", "hydra.sweep.dir"):  # as `out=$OUT` if the shell has no such variable
            if OmegaConf.select(self.config, key) == "":
                raise UserError(f"{key}: is empty; name a folder")
        folder = Path(self.config.hydra.sweep.dir)
        check_path(folder.absolute())
        # mkdir would fail only after all points are composed, and its message would not name the key.
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(f"hydra.sweep.dir={folder}: {nearest} is a file; a sweep needs a folder")
        check_unused(folder)
        # Our launcher checks every point itself, and writes the record under the sweep's lock.
        if not isinstance(self.launcher, SweepLauncher):
            for override in overrides:
                if override.key_or_group.partition(".")[0] in _LAUNCHER_KEYS and override.value() is not False:
                    raise UserError(f"{override.input_line}: only our launcher obeys it; leave hydra/launcher out")
            save_multirun(self.config, folder)
            self.validate_batch_is_legal(points)
        results = self.launcher.launch(points, initial_job_idx=0)
        for result in results:
            _: Any = result.return_value  # raises if the job failed
        return [results]

    def _check_size(self, overrides: Sequence[Override], grid: int) -> None:
        """Ask about more than `max_points` points, which a typing mistake makes of a few: they take long to compose.

        `grid` is the number of points of a study's grid, 1 without. Raises UserError if the answer is no or there is no
        terminal.
        """
        values = {key: self.config.get(key) for key in ("max_points", "repeats")}
        values |= {o.key_or_group: o.value() for o in overrides if not o.is_sweep_override()}
        limit, repeats = values["max_points"], values["repeats"]
        if not isinstance(limit, int):  # is refused with its type when the points are composed
            return
        swept = [override for override in overrides if override.is_sweep_override() and override.is_discrete_sweep()]
        numbers = [sum(1 for _ in islice(override.sweep_string_iterator(), MAX_COUNTED)) for override in swept]
        total = math.prod([grid, *numbers]) * (repeats if isinstance(repeats, int) else 1)
        if total <= limit:
            return
        largest = max(zip(numbers, (override.key_or_group for override in swept), strict=True), default=(1, "repeats"))
        count = pluralize(total, "point") + (f" ({largest[0]:,} values of {largest[1]})" if largest[0] > 1 else "")
        if sys.stdin.isatty() and sys.stderr.isatty():
            print(f"This launches {count}, more than max_points={limit}. Continue? [y/N] ", end="", file=sys.stderr)
            sys.stderr.flush()
            if sys.stdin.readline().strip().lower() in ("y", "yes"):
                return
            raise UserError("nothing was launched")
        raise UserError(f"{count} are more than max_points={limit}; with max_points={total} the launch takes them")


def _refuse_no_values(overrides: Sequence[Override]) -> None:
    for override in filter(Override.is_sweep_override, overrides):
        try:
            has_values = override.is_discrete_sweep() and next(override.sweep_string_iterator(), None) is not None
        except HydraException:  # glob() in a study's grid
            has_values = False
        if not has_values:
            raise UserError(f"{override.input_line}: gives no values; list them: {override.key_or_group}=a,b")


def grid_points(study: StudyConfig) -> list[list[str]]:
    """Return the overrides of every combination of every line, in order. Raises UserError."""
    if study.name in STUDIES or study.levers or study.base != StudyConfig.base:
        raise UserError(
            f"study.grid: takes no study.levers and no study.base, and a study.name other than {', '.join(STUDIES)}"
        )
    points: list[list[str]] = []
    for number, line in enumerate(study.grid):
        try:
            overrides = [list_parts(override) for override in shlex.split(line)]
            refuse_wrong_overrides(overrides, [conf_dir()], multirun=True)
            lines = OverridesParser.create().parse_overrides(overrides)
            _refuse_no_values(lines)
        except (UserError, ValueError) as error:  # ValueError: a quote is not closed
            raise UserError(f"study.grid[{number}]: {error}") from None
        for override in overrides:
            if override_key(override).partition(".")[0] in _OF_THE_SWEEP:
                raise UserError(f"study.grid[{number}]: {override}: holds for a whole sweep; give it to the launch")
        points += expand_sweep(lines)
    if twice := [point for index, point in enumerate(points) if set(point) in map(set, points[:index])]:
        raise UserError(f"study.grid: {' '.join(twice[0])} is in it twice; repeats=2 runs each point twice")
    return points


def merge_typed(points: Sequence[list[str]], typed: Sequence[list[str]]) -> list[list[str]]:
    """Return the points of a grid, each with all combinations of the command line that do not contradict it.

    So a key that the grid sets chooses among its points, and every other one holds for all of them. Raises UserError
    for values that choose none.
    """
    merged, chosen = [], set[str]()
    for point in points:
        own = {override_key(override): override for override in point}
        for combination in typed:
            if all(own.get(override_key(override), override) == override for override in combination):
                merged.append([*point, *(override for override in combination if override not in point)])
                chosen.update(combination)
    keys = {override_key(override) for point in points for override in point}
    given = dict.fromkeys(
        override for combination in typed for override in combination if override_key(override) in keys
    )
    if unused := [override for override in given if override not in chosen]:
        known = [" ".join(point) for point in points]
        raise UserError(f"{' '.join(unused)}: no point of study.grid has this; it has {list_some(known)}")
    return merged


def _refuse_equal(cells: Sequence[Point]) -> None:
    """Raise UserError for two points that would run the same at the same site, however each is written."""
    first: dict[str, Point] = {}
    for cell in cells:
        # A bundle has a name, and its levers do not.
        bench = replace(cell.bench, site=cell.site, sites={}, recipe=replace(cell.bench.recipe, name=""))
        if (other := first.setdefault(repr(bench), cell)) is cell:
            continue
        if sorted(cell.overrides) == sorted(other.overrides):
            raise UserError(f"two points are the same, with recipe {recipe_name(cell.bench)}; keep one of them")
        texts = []
        for point, equal in ((other, cell), (cell, other)):
            own = " ".join(line for line in point.overrides if line not in equal.overrides)
            texts.append(own.replace("\\", "").replace("recipe=[]", "recipe=baseline") or "no further override")
        raise UserError(f"{' and '.join(texts)} give the same point at {cell.site.name}; keep one of them")


class SweepLauncher(Launcher):
    """Submits the points of a sweep to their sites."""

    # sweeps with repeats=auto whose jobs have ended; Hydra has no way to return anything to `launch`
    ended_auto_sweeps: ClassVar[list[Path]] = []

    def __init__(self) -> None:
        self._config: DictConfig
        self._context: HydraContext

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra passes; `config` is the sweep's, before any point is composed. Raises UserError."""
        if OmegaConf.get_type(config) is not BenchConfig:
            raise UserError("hydra/launcher=inpaint_bench: submits inpaint_bench's own points; choose another launcher")
        self._config = config
        self._context = hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit a point for each list of overrides, and return the placeholder of a result for each.

        Raises UserError, Hydra's and OmegaConf's errors if nothing was submitted, else PointsFailedError.
        """
        from .soonest import soonest
        from .submit import Submission

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        output.adjust_log()
        folder = Path(str(self._config.hydra.sweep.dir)).absolute()
        cells = self._compose_cells(job_overrides, soonest)
        # The values read from the first cell are equal in all cells: `_check` makes sure of it.
        bench = cells[0].bench
        typed_overrides = list(self._config.hydra.overrides.task)
        self._check(cells, typed_overrides)
        order = choose_order([cell.bench for cell in cells])
        points = initial_points(order, cells) if order else cells
        if order and not order.is_plain:
            log.info(f"order: {order}")
        submission = Submission(
            folder=folder,
            wait_for_jobs=bench.wait,
            preview_only=bench.dry_run,
            multirun=self._config,
            new_sweep=SweepRecord(
                sweep_id=new_sweep_id(),
                overrides=typed_overrides,
                order=order,
                launch_context=LaunchContext.from_config(self._config),
            ),
        )
        try:
            submission.run(lambda _: points)
        finally:
            # Also if points failed: the cells that completed are examined all the same.
            if submission.waited and bench.repeats == AUTO:
                self.ended_auto_sweeps.append(folder)
        if bench.dry_run and order and order.order_seed != bench.order_seed:
            log.info(f"Pass order_seed={order.order_seed} to get this order; a launch without it draws another one.")
        if bench.repeats == AUTO and not (submission.waited or bench.dry_run):
            log.info(f"When the jobs have ended: {shell_command('rerun', folder, '--repeats', 'auto')}")
        # Hydra wants a result of each point; those that failed have raised PointsFailedError.
        return [JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED) for point in points]

    def _compose_cells(self, job_overrides: Sequence[Sequence[str]], soonest: Soonest) -> list[Point]:
        """Compose and place one point per cell, which repetitions are made from. Raises what `launch` does."""
        loader = self._context.config_loader
        compose = Composer(
            lambda overrides: loader.load_sweep_config(self._config, overrides),
            loader=loader,
            config_name=self._config.hydra.job.config_name,
            hydra_overrides=LaunchContext.from_config(self._config).hydra_overrides,
        )
        compose.soonest = soonest
        return [compose(num, list(filter_overrides(overrides))) for num, overrides in enumerate(job_overrides)]

    def _check(self, cells: Sequence[Point], typed_overrides: Sequence[str]) -> None:
        if self._config.hydra.sweeper.get("max_batch_size") is not None:
            raise UserError("hydra.sweeper.max_batch_size: a sweep is submitted as a whole; leave it out")
        study, grid = cells[0].bench.study.name, cells[0].bench.study.grid
        if grid and self._config.hydra.sweeper._target_ != SweeperConf._target_:
            raise UserError(
                f"study={study}: only hydra/sweeper=inpaint_bench expands its grid; choose no other sweeper"
            )
        recipes = [override for override in typed_overrides if override.split("=")[0] == "recipe"]
        if study != "none" and recipes and not grid:
            raise UserError(f"{recipes[0]}: study={study} makes the recipes itself; study.base=<recipe> names its base")
        _refuse_equal(cells)
        for key in SWEEP_KEYS:
            if len({getattr(cell.bench, key) for cell in cells}) > 1:
                raise UserError(f"{key} differs between points, and a sweep has one")
