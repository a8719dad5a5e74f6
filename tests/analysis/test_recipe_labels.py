"""Short names of recipes: another one for every other recipe, and a key that says what they stand for."""

from __future__ import annotations

import polars as pl

from analysis import recipe_labels
from analysis.report.tables import TableBuilder
from analysis.stats import cells
from tests.analysis.report.test_tables import frame

LONG = "adamw_fused+cache_image+cache_masked+cache_text+on_gpu"


def test_few_levers_are_spelt_out_and_of_many_the_first_with_the_number_of_the_rest() -> None:
    names = recipe_labels.short_names(["baseline", "tf32+compile", "tf32+compile+on_gpu", LONG])
    assert list(names.values())[:3] == ["baseline", "tf32+compile", "tf32+compile+on_gpu"]
    assert names[LONG] == "adamw_fused+cache_image +3"


def test_recipes_that_would_read_alike_keep_their_full_names() -> None:
    alike = {"a+b+c+d": "a+b+c+d", "a+b+c+e": "a+b+c+e"}
    assert recipe_labels.short_names([*alike, LONG]) == alike | {LONG: "adamw_fused+cache_image +3"}


def test_a_part_of_the_runs_has_the_names_of_the_whole() -> None:
    """Regression of the overview: alone a recipe would be short, beside its like it is not."""
    runs = recipe_labels.add_short_names(pl.DataFrame({"recipe": ["a+b+c+d", "a+b+c+e", None]}))
    part = recipe_labels.add_short_names(runs.head(1))
    assert part[recipe_labels.COLUMN].to_list() == ["a+b+c+d"]
    assert runs[recipe_labels.COLUMN][2] is None


def test_the_tables_have_a_key_and_none_where_nothing_is_short() -> None:
    build = TableBuilder(runs=frame({"recipe": LONG}, {"run_id": "r-2", "recipe": "baseline"}))
    (key,) = build.recipes()
    assert key.rows == [["adamw_fused+cache_image +3", "adamw_fused, cache_image, cache_masked, cache_text, on_gpu"]]
    assert [row[3] for row in build.throughput().rows] == ["adamw_fused+cache_image +3", "baseline"]
    assert TableBuilder(runs=frame({"recipe": "baseline"})).recipes() == []
    assert set(cells.build_cells(build.runs)["recipe"]) == {LONG, "baseline"}
