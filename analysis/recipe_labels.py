"""Names of recipes that a reader can say, and the legend that lists their levers.

A recipe of many levers is named by its bundle, by `cached`, `compiled` and `graph`, and by its other levers only where
two recipes would read alike: `compile+cuda_graph+adamw_fused+cache_image+cache_text` becomes `cached+compiled+graph`.
Without any of these words it is named by its first levers and the number of the others.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable

import polars as pl

from inpaint_bench.core.config.levers import LEVERS
from inpaint_bench.core.config.recipe import choices as recipe_choices
from inpaint_bench.core.schema import COMMAND

NAMED = 2  # levers that a name spells out where none of the words below fits
FEWEST = 4  # levers from which on a name is shortened
BASELINE = "baseline"  # the plain training loop: the recipe without a lever
COLUMN = "recipe_short"
_WORDS = {
    "cached": ("cache_image", "cache_masked", "cache_text", "on_gpu"),
    "compiled": ("compile",),
    "graph": ("cuda_graph",),
}


def short_names(recipes: Iterable[str]) -> dict[str, str]:
    """Return the short name of each recipe, unique among these recipes: the shortest that no other one has."""
    recipes = list(recipes)
    names = dict.fromkeys(recipes, "")
    for form in (_short, _with_other_levers, str):
        proposed = {recipe: form(recipe) for recipe in recipes if not names[recipe]}
        used = Counter([*proposed.values(), *names.values()])
        names |= {recipe: name for recipe, name in proposed.items() if used[name] == 1}
    return {recipe: name or recipe for recipe, name in names.items()}


def add_short_names(runs: pl.DataFrame) -> pl.DataFrame:
    """Add the recipes' short names; an existing column stays, so that parts of a dataset agree."""
    if COLUMN in runs.columns:
        return runs
    return rename_together(runs)[0]


def rename_together(*tables: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the tables of runs with short names that are unique among the recipes of all of them."""
    recipes = pl.concat([runs["recipe"] for runs in tables]).drop_nulls().unique().sort()
    names = short_names(recipes)
    short = pl.col("recipe").replace_strict(list(names), list(names.values()), default=None, return_dtype=pl.String)
    return [runs.with_columns(short.alias(COLUMN)) for runs in tables]


def count_parts(recipe: str | None) -> int:
    """Return of how many levers and bundles a recipe consists: 0 for the baseline, with which all begin."""
    return len([part for part in (recipe or "").split("+") if part not in ("", BASELINE)])


def launch_overrides(runs: pl.DataFrame) -> dict[str, str]:
    """Return the overrides, to paste into a shell, of every recipe whose shown name is not one that `recipe=` takes."""
    known = runs.filter(pl.col("workload") != COMMAND).select(COLUMN, "recipe", "recipe_parts").drop_nulls("recipe")
    rows = known.sort(pl.all(), nulls_last=True).unique(COLUMN, keep="first", maintain_order=True).rows()
    taken = recipe_choices()
    return {short: shlex.join(overrides(recipe, parts)) for short, recipe, parts in rows if short not in taken}


def legend_text(runs: pl.DataFrame) -> str:
    """Return the levers of every shortened name as a sentence for a caption or a note; empty where there is none."""
    pairs = runs.select(COLUMN, "recipe").drop_nulls().unique().sort(COLUMN, "recipe").rows()
    entries = [f"{short} = {recipe.replace('+', ', ')}" for short, recipe in pairs if short != recipe]
    return f"Recipes: {'; '.join(entries)}." if entries else ""


def overrides(recipe: str | None, parts: str | None) -> list[str]:
    """Return the overrides of a launch command that choose a recipe; none where the recipe is not known.

    `parts` is what the point requested, separated by commas; without it the name has to tell.
    """
    names = parts.split(",") if parts else (recipe or "").split("+")
    if not parts and names[0] in LEVERS:  # a name leaves the baseline out
        names = [BASELINE, *names]
    files = [name for name in names if "=" not in name]
    keys = [f"recipe.{name}" for name in names if "=" in name]
    return [f"recipe=[{','.join(files)}]", *keys] if any(files) else []


def _short(recipe: str) -> str:
    levers = recipe.split("+")
    if len(levers) < FEWEST:
        return recipe
    words, others = _words(levers)
    return "+".join(words) if words else f"{'+'.join(others[:NAMED])} and {len(others) - NAMED} more"


def _with_other_levers(recipe: str) -> str:
    words, others = _words(recipe.split("+"))
    return "+".join([*words, *others])


def _words(levers: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for levers, after the name of a bundle, and the levers that have no word."""
    bundle = [] if levers[0] in LEVERS or len(levers) == 1 else levers[:1]
    rest = levers[len(bundle) :]
    words = [word for word, names in _WORDS.items() if set(names) & set(rest)]
    known = {name for word in words for name in _WORDS[word]}
    return [*bundle, *words], [lever for lever in rest if lever not in known]
