"""Names of recipes that a reader can say, and the legend that lists their levers.

A recipe of many levers is named by its bundle, by `cached`, `compiled` and `graph`, and by its other levers only if
two recipes would read alike: `compile+cuda_graph+adamw_fused+cache_image+cache_text` becomes `cached+compiled+graph`.
Levers that are common to all recipes which would read alike are left out. Without any of these words a recipe is named
by its first levers and the number of the others. No recipe gets a name by which `recipe=` would take another one.

Levers that are the content of a bundle bear the bundle's name: they execute the same, so they are one cell. Runs of
versions in which `baseline` had no lever bear the name of today, `earlier_baseline`.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterable

import polars as pl

from inpaint_bench.core.config import recipe as recipes_of_launch
from inpaint_bench.core.config.levers import LEVERS
from inpaint_bench.core.recipe_names import current_names
from inpaint_bench.core.schema import COMMAND

NAMED = 2  # levers that a name spells out if none of the words below fits and there are more than twice as many
FEWEST = 4  # levers from which on a name is shortened
BASELINE = recipes_of_launch.BASELINE  # the plain loop
_OF_SEVERAL_GPUS = {lever.name for lever in LEVERS.values() if lever.needs.startswith("several GPUs")}
EARLIER = recipes_of_launch.EARLIER
COLUMN = "recipe_short"
_WORDS = {
    "cached": ("cache_image", "cache_masked", "cache_text", "on_gpu"),
    "compiled": ("compile", "compile_blocks"),
    "graph": ("cuda_graph",),
}


def on_one_gpu(recipe: str) -> str:
    """Return what a recipe is on one GPU, where levers of several GPUs have no effect."""
    return "+".join(part for part in recipe.split("+") if part not in _OF_SEVERAL_GPUS) or BASELINE


def short_names(recipes: Iterable[str]) -> dict[str, str]:
    """Return the short name of each recipe, unique among these recipes: the shortest that no other one has."""
    recipes, taken = list(recipes), set(recipes_of_launch.choices())
    names = dict.fromkeys(recipes, "")
    common: dict[str, set[str]] = {}  # levers without a word of all recipes that would have this name
    for recipe in recipes:
        name, others = _short(recipe), set(_words(recipe.split("+"))[1])
        common[name] = common.get(name, others) & others

    def differing(recipe: str) -> str:
        words, others = _words(recipe.split("+"))
        return "+".join([*words, *(lever for lever in others if lever not in common[_short(recipe)])])

    def is_fit(name: str, recipe: str) -> bool:
        return name == recipe or not all(part in taken or "=" in part for part in name.split("+"))

    for form in (_short, differing, str):
        proposed = {recipe: form(recipe) for recipe in recipes if not names[recipe]}
        used = Counter([*proposed.values(), *names.values()])
        names |= {recipe: name for recipe, name in proposed.items() if used[name] == 1 and is_fit(name, recipe)}
    return {recipe: name or recipe for recipe, name in names.items()}


def add_short_names(runs: pl.DataFrame) -> pl.DataFrame:
    """Add the recipes' short names; an existing column stays, so that parts of a dataset agree."""
    if COLUMN in runs.columns:
        return runs
    return rename_together(runs)[0]


def _name_bundles(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs, those with the levers of a bundle under its name.

    The levers are those of its YAML today, or those that runs of the bundle recorded.
    """
    runs = runs.with_columns(pl.Series("recipe", current_names(runs), pl.String))
    if "levers" not in runs.columns:
        return runs
    by_levers = {}
    recorded = runs.filter(pl.col("recipe").is_in(recipes_of_launch.bundles())).select("recipe", "levers").drop_nulls()
    for name, text in recorded.unique().iter_rows():
        by_levers[frozenset(lever["name"] for lever in json.loads(text))] = name
    names = {name: frozenset(name.split("+")) - {EARLIER} for name in runs["recipe"].drop_nulls().unique()}
    new = {name: by_levers[each] for name, each in names.items() if len(each) > 1 and each in by_levers}
    return runs.with_columns(pl.col("recipe").replace(new))


def rename_together(*tables: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the tables of runs with short names that are unique among the recipes of all of them."""
    tables = tuple(map(_name_bundles, tables))
    recipes = pl.concat([runs["recipe"] for runs in tables]).drop_nulls().unique().sort()
    names = short_names(recipes)
    short = pl.col("recipe").replace_strict(list(names), list(names.values()), default=None, return_dtype=pl.String)
    return [runs.with_columns(short.alias(COLUMN)) for runs in tables]


def count_parts(recipe: str | None) -> int:
    """Return of how many levers and bundles a recipe consists, the plain loop not counted."""
    return len([part for part in (recipe or "").split("+") if part not in ("", BASELINE, EARLIER)])


def launch_overrides(runs: pl.DataFrame) -> dict[str, str]:
    """Return the overrides, to paste into a shell, of every recipe whose shown name is not one that `recipe=` takes."""
    known = runs.filter(pl.col("workload") != COMMAND).select(COLUMN, "recipe", "recipe_parts").drop_nulls("recipe")
    rows = known.sort(pl.all(), nulls_last=True).unique(COLUMN, keep="first", maintain_order=True).rows()
    taken = recipes_of_launch.choices()
    return {short: shlex.join(overrides(recipe, parts)) for short, recipe, parts in rows if short not in taken}


def requested_parts(recipe: str | None, parts: str | None) -> list[str]:
    """Return the bundles and levers that were requested for a run, in the names of today."""
    names = (recipe or "").split("+")
    # An earlier version requested `baseline` for what is `earlier_baseline` today.
    if parts and names[0] != EARLIER:
        return parts.split(",")
    return [BASELINE, *names] if names[0] in LEVERS else names  # a workload for which `baseline` is no bundle


def overrides(recipe: str | None, parts: str | None) -> list[str]:
    """Return the overrides of a launch command that choose a recipe; none if the recipe is not known.

    `parts` is what the point requested, separated by commas; without it the name has to tell.
    """
    names = requested_parts(recipe, recipe if recipe in recipes_of_launch.bundles() else parts)
    files = [name for name in names if "=" not in name]
    keys = [f"recipe.{name}" for name in names if "=" in name]
    return [f"recipe=[{','.join(files)}]", *keys] if any(files) else []


def _short(recipe: str) -> str:
    levers = recipe.split("+")
    if len(levers) < FEWEST:
        return recipe
    words, others = _words(levers)
    if words and (words != levers[:1] or not others):
        return "+".join(words)
    # The name of a bundle alone would be that of another recipe.
    if len(levers) <= 2 * NAMED:
        return recipe
    return f"{'+'.join(levers[:NAMED])} and {len(levers) - NAMED} more"


def _words(levers: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for levers, after the name of a bundle, and the levers that have no word."""
    bundle = [] if levers[0] in LEVERS or len(levers) == 1 else levers[:1]
    rest = levers[len(bundle) :]
    words = [word for word, names in _WORDS.items() if set(names) & set(rest)]
    known = {name for word in words for name in _WORDS[word]}
    return [*bundle, *words], [lever for lever in rest if lever not in known]
