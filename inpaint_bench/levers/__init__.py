"""Levers: each one switch of a recipe, with `available`, `apply` and `verify`.

To add one: a class in a module of this package with `field` set to its field in `RecipeConfig`. The field says what the
lever needs of a workload. A lever that cannot run is an error with its reason; nothing is substituted.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.conflicts import conflict
from inpaint_bench.core.config.levers import is_active
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.core.records import LeverReport
from inpaint_bench.models.execution import Execution, set_switches

from .base import REGISTRY, Lever, observe

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")


def of_recipe(bench: BenchConfig) -> dict[Lever[Any], str]:
    """Return the levers of a recipe, with their names."""
    names = recipes.levers(bench.recipe)
    return {lever: names[lever.field] for lever in REGISTRY if lever.field in names}


def require(bench: BenchConfig, device: torch.device) -> None:
    """Raise UnavailableError for the first lever that cannot run here, with the reason."""
    for lever, name in of_recipe(bench).items():
        if reason := conflict(lever.field, bench) or lever.available(bench, device):
            raise UnavailableError(f"lever {name}: {reason}")


def apply(execution: Execution) -> None:
    """Change switches and parts from their defaults into the recipe's."""
    execution.fp32_precision = set_switches(execution.recipe)
    for lever in of_recipe(execution.bench):
        lever.apply(execution)


def requested(bench: BenchConfig) -> list[LeverReport]:
    """Return the levers of the recipe, before anything is read back."""
    return [
        LeverReport(
            name=name, field=lever.field, requested=getattr(bench.recipe, lever.field), evidence="not read back"
        )
        for lever, name in of_recipe(bench).items()
    ]


def verify(execution: Execution | None, probe: Callable[[], Callable[[], object]]) -> list[LeverReport]:
    """Return the levers with what is really in effect; `probe` makes another step or call, which is observed.

    It is used twice: only after the last step that counts.
    """
    # A recipe without levers has nothing to read back, and takes no further steps.
    if execution is None or not (reports := requested(execution.bench)):
        return []
    observed, facts = observe(execution, probe), {"precision": execution.recipe.precision}
    for report, lever in zip(reports, of_recipe(execution.bench), strict=True):
        report.effective, report.evidence, report.active = lever.verify(observed)
        if report.active:
            report.active = is_active(report.field, report.requested, report.effective, facts)
    return reports
