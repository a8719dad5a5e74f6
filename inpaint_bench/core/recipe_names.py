"""Recipes whose meaning depends on the workload: what `baseline` is, as typed and as earlier versions recorded it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .config.levers import LEVERS
from .config.recipe import BASELINE, EARLIER, bundles_by_levers, has_plain_bundle, list_parts
from .errors import UserError
from .workloads import declarations

if TYPE_CHECKING:
    import polars as pl


def current_name(name: str, workload: str, levers: str | None) -> str:
    """Return how a recorded recipe is called today; `levers` is the JSON of what was recorded of them.

    Runs of versions before `baseline` was a bundle are those without its levers: `tf32` is `earlier_baseline+tf32`. The
    levers of a bundle bear its name.
    """
    if bundle := bundles_by_levers().get(frozenset(name.split("+")) - {EARLIER}):
        return bundle
    first, declared = name.split("+")[0], declarations().get(workload)
    if declared is None or not has_plain_bundle(declared.Config) or '"encoders"' in (levers or ""):
        return name
    return EARLIER if name == BASELINE else f"{EARLIER}+{name}" if first in LEVERS or "=" in first else name


def current_names(runs: pl.DataFrame) -> list[str | None]:
    """Return the recipes of a table of runs as they are called today; the table may lack any of the columns."""
    keys = ("recipe", "workload", "levers")
    columns = (runs[key] if key in runs.columns else [None] * runs.height for key in keys)
    return [recipe and current_name(recipe, *rest) for recipe, *rest in zip(*columns, strict=True)]


def split_choices(overrides: Sequence[str]) -> list[str]:
    """Replace `recipe=[tf32,num_workers=8]`, a point of a study, by what Hydra composes.

    That is `recipe=[baseline,tf32]` and `recipe.num_workers=8`; no `baseline` for a workload without such a bundle.
    Raises UserError for a key that is given beside the recipe too.
    """
    values = dict(override.partition("=")[::2] for override in overrides)
    declared = declarations().get(values.get("workload", "finetune_inpaint"))
    plain = declared is None or not has_plain_bundle(declared.Config)
    split = [[*_split_choice(list_parts(override), without_bundle=plain)] for override in overrides]
    given = {override.lstrip("+").partition("=")[0]: override for override in overrides}
    for override, made in zip(overrides, split, strict=True):
        keys = [part.partition("=")[0] for part in made[1:]]
        if twice := [key for index, key in enumerate(keys) if key in given or key in keys[:index]]:
            others = f" and {given[twice[0]]}" if twice[0] in given else ""
            raise UserError(f"{twice[0]} is given twice, in {override}{others}; keep one of them".replace("\\", ""))
    return [part for made in split for part in made]


def _split_choice(override: str, *, without_bundle: bool) -> Iterator[str]:
    key, _, value = override.partition("=")
    if key != "recipe" or "(" in value or ("," in value and not value.startswith("[")):
        yield override
        return
    # The value as `sweep` wrote it, with Hydra's quotes and escapes or without.
    parts = [part.strip().strip("'\"").replace("\\", "") for part in value.strip("[]").split(",") if part]
    if parts and all(part in LEVERS or "=" in part for part in parts):
        parts.insert(0, BASELINE)
    chosen = [part for part in parts if "=" not in part and not (without_bundle and part == BASELINE)]
    yield override if [value] == chosen else f"recipe=[{','.join(chosen)}]"
    yield from (f"recipe.{part}" for part in parts if "=" in part)
