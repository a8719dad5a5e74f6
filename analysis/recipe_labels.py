"""Short names of recipes for figures and tables, and the legend that lists their levers.

`compile+cuda_graph+adamw_fused+cache_text` becomes `compile+cuda_graph +2`: its first levers, and how many more. Two
recipes that would read alike keep their full names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import polars as pl

NAMED = 2  # levers that a short name still spells out
FEWEST = 4  # levers from which on a name is shortened
COLUMN = "recipe_short"


def short_names(recipes: Iterable[str]) -> dict[str, str]:
    """Return the short name of each recipe, unique among these recipes."""
    short = {recipe: _short(recipe) for recipe in recipes}
    used = Counter(short.values())
    return {recipe: name if used[name] == 1 else recipe for recipe, name in short.items()}


def add_short_names(runs: pl.DataFrame) -> pl.DataFrame:
    """Add the recipes' short names; an existing column stays, so that parts of a dataset agree."""
    if COLUMN in runs.columns:
        return runs
    names = short_names(runs["recipe"].drop_nulls().unique().sort())
    short = pl.col("recipe").replace_strict(list(names), list(names.values()), default=None, return_dtype=pl.String)
    return runs.with_columns(short.alias(COLUMN))


def legend(runs: pl.DataFrame) -> dict[str, str]:
    """Return the recipe of every short name in these runs or cells that was shortened."""
    pairs = runs.select(COLUMN, "recipe").drop_nulls().unique().sort(COLUMN, "recipe").rows()
    return {short: recipe for short, recipe in pairs if short != recipe}


def legend_text(runs: pl.DataFrame) -> str:
    """Return the legend as a sentence for a caption or a note; empty where no name was shortened."""
    entries = [f"{short} = {recipe.replace('+', ', ')}" for short, recipe in legend(runs).items()]
    return f"Recipes: {'; '.join(entries)}." if entries else ""


def _short(recipe: str) -> str:
    levers = recipe.split("+")
    rest = len(levers) - NAMED
    return recipe if len(levers) < FEWEST else f"{'+'.join(levers[:NAMED])} +{rest}"
