"""The points of a study's grid, from which the command line chooses and to which it adds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from inpaint_bench.core.config.bench import StudyConfig
from inpaint_bench.core.config.recipe import STUDIES, list_parts
from inpaint_bench.core.console import list_some
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import refuse_wrong_overrides
from inpaint_bench.core.paths import conf_dir

from .hydra_internals import expand_sweep
from .repetitions import SWEEP_KEYS

_OF_THE_SWEEP = (*SWEEP_KEYS, "out", "name", "hydra", "study")


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
        except (UserError, ValueError) as error:  # ValueError: a quote is not closed
            raise UserError(f"study.grid[{number}]: {error}") from None
        for override in overrides:
            if _key(override).partition(".")[0] in _OF_THE_SWEEP:
                raise UserError(f"study.grid[{number}]: {override}: holds for a whole sweep; give it to the launch")
        points += expand_sweep(OverridesParser.create().parse_overrides(overrides))
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
        own = {_key(override): override for override in point}
        for combination in typed:
            if all(own.get(_key(override), override) == override for override in combination):
                merged.append([*point, *(override for override in combination if override not in point)])
                chosen.update(combination)
    keys = {_key(override) for point in points for override in point}
    given = dict.fromkeys(override for combination in typed for override in combination if _key(override) in keys)
    if unused := [override for override in given if override not in chosen]:
        known = [" ".join(point) for point in points]
        raise UserError(f"{' '.join(unused)}: no point of study.grid has this; it has {list_some(known)}")
    return merged


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
