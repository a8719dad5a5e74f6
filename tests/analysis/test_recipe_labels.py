"""Short names of recipes: another one for every other recipe, and a key that says what they stand for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import polars as pl
import pytest

from analysis import recipe_labels
from analysis.dataset import open_dataset
from analysis.merge import merge
from analysis.report.tables import TableBuilder
from analysis.stats import cells
from inpaint_bench.core.config import recipe as recipe_of_launch
from launchers.points.compose import composer
from launchers.sweep.sweep_record import LaunchContext
from tests.analysis.build import write_run
from tests.analysis.report.test_tables import frame

LONG = "adamw_fused+cache_image+cache_masked+cache_text+on_gpu"


def test_few_levers_are_spelt_out_and_many_are_named_by_words_that_a_reader_can_say() -> None:
    few = ["baseline", "tf32+compile", "tf32+compile+on_gpu"]
    many = [
        LONG,
        f"compile+{LONG}",
        f"compile_blocks+cuda_graph+{LONG}",
        f"tuned+{LONG}",
        "tf32+ema+pdl+pin_memory+tensor",
    ]
    names = recipe_labels.short_names([*few, *many])
    assert [names[recipe] for recipe in few] == few
    expected = ["cached", "cached+compiled", "cached+compiled+graph", "tuned+cached", "tf32+ema and 3 more"]
    assert [names[recipe] for recipe in many] == expected


def test_the_name_of_a_bundle_alone_is_not_that_of_a_recipe_with_further_levers() -> None:
    """Regression: a pipeline of tuned_dit was called tuned_dit beside tuned_dit+attn_flash4."""
    for bundle in ("tuned_dit", "compiled"):
        recipe = f"{bundle}+attn_flash4+accumulate=4+pipeline"
        assert recipe_labels.short_names([recipe])[recipe] == recipe
        assert recipe_labels.short_names([f"{recipe}+ema"])[f"{recipe}+ema"] == f"{bundle}+attn_flash4 and 3 more"


def test_recipes_of_the_same_words_are_told_apart_by_their_other_levers() -> None:
    other = LONG.replace("adamw_fused", "tf32+ema")
    assert recipe_labels.short_names([LONG, other]) == {LONG: "cached+adamw_fused", other: "cached+tf32+ema"}


def test_what_recipes_that_read_alike_share_is_not_spelt_out() -> None:
    """The ends of longer names were cut in figures, so that three recipes had one name there."""
    shared = "earlier_baseline+grad_checkpoint+{}+pin_memory+non_blocking+cache_image+cache_masked+cache_text"
    recipes = [shared.format(lever) for lever in ("fsdp2", "tensor", "bucket_view+zero1")]
    names = recipe_labels.short_names([*recipes, "tuned"])
    expected = [
        "earlier_baseline+cached+fsdp2",
        "earlier_baseline+cached+tensor",
        "earlier_baseline+cached+bucket_view+zero1",
    ]
    assert [names[recipe] for recipe in recipes] == expected


@pytest.mark.parametrize(
    "recipe",
    ["compile+adamw_fused+tf32+ema", "tuned_dit+attn_flash4+ema+pipeline+tf32", "baseline+ema+tf32+tensor+pdl"],
)
def test_no_short_name_is_one_by_which_a_launch_takes_another_recipe(recipe: str) -> None:
    further = f"{recipe}+channels_last"
    for names in (recipe_labels.short_names([recipe]), recipe_labels.short_names([recipe, further])):
        for each, name in names.items():
            assert name == each or not set(name.split("+")) <= set(recipe_of_launch.choices())


@pytest.mark.parametrize(
    ("recipe", "parts", "words"),
    [
        ("tf32+compile", None, ["recipe=[baseline,tf32,compile]"]),
        ("tuned+tf32", None, ["recipe=[tuned,tf32]"]),
        ("x", "baseline,tf32,num_workers=8", ["recipe=[baseline,tf32]", "recipe.num_workers=8"]),
        (None, None, []),
    ],
)
def test_overrides_of_a_recipe_are_what_was_requested_or_else_follow_from_its_name(
    recipe: str | None, parts: str | None, words: list[str]
) -> None:
    assert recipe_labels.overrides(recipe, parts) == words


def test_a_recipe_of_several_levers_is_told_as_overrides_that_choose_it() -> None:
    """Regression: `compare` printed names such as cached+graph, which `recipe=` does not take."""
    recipes = [
        "baseline",
        "tf32",
        "tuned",
        "tf32+compile",
        f"compile+force_layout+cuda_graph+{LONG}",
        "tuned+num_workers=8",
        "cpu+lora",
    ]
    runs = recipe_labels.add_short_names(
        frame(*({"run_id": f"r-{i}", "recipe": name, "levers": None} for i, name in enumerate(recipes)))
    )
    assert runs["recipe"][0] == "earlier_baseline"  # a run of a version whose baseline had no lever
    pasted = recipe_labels.launch_overrides(runs)
    tf32 = {"earlier_baseline+tf32", "earlier_baseline+tf32+compile"}
    assert set(pasted) == {*tf32, "tuned+num_workers=8", "cpu+lora"}
    # The levers of a bundle bear its name, which `recipe=` takes.
    assert "compiled" in runs["recipe"]
    with composer(LaunchContext()) as compose:
        for short, text in pasted.items():
            (chosen,) = runs.filter(pl.col(recipe_labels.COLUMN) == short)["recipe"]
            gpu = "gpu=cpu" if chosen.startswith("cpu") else "gpu=h200"
            point = compose(0, [gpu, *shlex.split(text)])
            assert set(recipe_of_launch.name(point.bench).split("+")) == set(chosen.split("+"))


def test_names_are_unique_over_several_tables() -> None:
    old, new = (pl.DataFrame({"recipe": [name]}) for name in (LONG, LONG.replace("adamw_fused", "tf32+ema")))
    tables = recipe_labels.rename_together(*map(recipe_labels.add_short_names, (old, new)))
    assert [table[recipe_labels.COLUMN][0] for table in tables] == ["cached+adamw_fused", "cached+tf32+ema"]


def test_recipes_that_would_read_alike_keep_their_full_names() -> None:
    alike = {"a+b+c+d": "a+b+c+d", "a+b+c+e": "a+b+c+e"}
    assert recipe_labels.short_names([*alike, LONG]) == alike | {LONG: "cached"}


def test_a_part_of_the_runs_has_the_names_of_the_whole() -> None:
    """Regression of the overview: alone a recipe would be short, beside its like it is not."""
    runs = recipe_labels.add_short_names(pl.DataFrame({"recipe": ["a+b+c+d", "a+b+c+e", None]}))
    part = recipe_labels.add_short_names(runs.head(1))
    assert part[recipe_labels.COLUMN].to_list() == ["a+b+c+d"]
    assert runs[recipe_labels.COLUMN][2] is None


def test_the_tables_have_a_key_and_none_where_nothing_is_short() -> None:
    build = TableBuilder(runs=frame({"recipe": LONG}, {"run_id": "r-2", "recipe": "baseline"}))
    assert build.recipes().rows == [
        ["cached", "'recipe=[baseline,adamw_fused,cache_image,cache_masked,cache_text,on_gpu]'"]
    ]
    assert [row[3] for row in build.summary("throughput").rows] == ["cached", "baseline"]
    assert TableBuilder(runs=frame({"recipe": "baseline"})).recipes().rows == []
    assert set(cells.build_cells(build.runs)["recipe"]) == {LONG, "baseline"}


def test_runs_of_a_bundle_and_of_its_levers_are_one_cell_under_its_name() -> None:
    """Regression: the flagship's fastest recipe was tied with itself, under two names."""
    levers = f"compile+force_layout+cuda_graph+{LONG}"
    rows = [{"run_id": f"r-{i}", "recipe": name, "gpu_uuid": "GPU-1"} for i, name in enumerate(("compiled", levers))]
    (cell,) = cells.build_cells(frame(*rows)).to_dicts()
    assert (cell["recipe"], cell["n"]) == ("compiled", 2)


def test_levers_that_a_bundle_had_when_it_ran_bear_its_name() -> None:
    recorded = json.dumps([{"name": "tf32"}, {"name": "ema"}])
    runs = frame({"recipe": "compiled", "levers": recorded}, {"run_id": "r-2", "recipe": "ema+tf32"})
    assert recipe_labels.add_short_names(runs)["recipe"].to_list() == ["compiled"] * 2


def test_runs_of_the_earlier_baseline_and_of_the_baseline_of_today_are_two_cells(tmp_path: Path) -> None:
    fields = {"encoders": "half", "pin_memory": True, "non_blocking": True}
    types = {"vae": ["bf16"], "text_encoder": ["bf16"], "outputs": {"vae_encoder": "bf16"}}
    levers = [
        {"name": recipe_of_launch.lever_name(field, value), "field": field, "requested": value, "active": True,
         "evidence": "", "effective": types if field == "encoders" else value}
        for field, value in fields.items()
    ]  # fmt: skip
    write_run(tmp_path / "in", "r-1", recipe="baseline", levers=[])
    write_run(tmp_path / "in", "r-2", recipe="baseline", levers=levers)
    merge([tmp_path / "in"], tmp_path / "dataset")
    runs = open_dataset(tmp_path / "dataset").runs
    assert runs["valid"].all(), runs["invalid_reason"].to_list()
    assert sorted(cells.build_cells(runs)["recipe"]) == ["baseline", "earlier_baseline"]
