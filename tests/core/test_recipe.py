"""Names of recipes, and the studies that compare them."""

from __future__ import annotations

from pathlib import Path

import pytest

from inpaint_bench import levers
from inpaint_bench.core import recipe
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir
from tests.run.support import bench

BUNDLES = {"baseline", "cpu", "poster_baseline", "poster_optimized", "tuned"}
LEVERS = sorted({path.stem for path in (conf_dir() / "recipe").glob("*.yaml")} - BUNDLES)


def named(*names: str) -> str:
    return recipe.name(bench(f"recipe=[{','.join(names)}]").recipe)


class TestAName:
    @pytest.mark.parametrize("lever", LEVERS)
    def test_of_a_levers_file_is_that_of_the_recipe_it_makes(self, lever: str) -> None:
        base = "cpu" if lever == "amp_bf16" else "baseline"  # on a GPU bf16 autocast is the baseline
        assert named(base, lever) == (f"cpu+{lever}" if base == "cpu" else lever)

    def test_lists_the_levers_in_one_order_whatever_the_command_line_says(self) -> None:
        assert named("baseline", "tf32", "channels_last") == named("baseline", "channels_last", "tf32")

    def test_changes_with_a_key_set_by_hand(self) -> None:
        assert recipe.name(bench("recipe=baseline", "recipe.num_workers=3").recipe) == "workers_3"

    @pytest.mark.parametrize("bundle", sorted(BUNDLES))
    def test_of_a_bundle_is_its_own(self, bundle: str) -> None:
        assert named(bundle) == bundle
        assert named("baseline", bundle) == bundle

    def test_of_a_bundle_with_another_lever_says_which(self) -> None:
        """Regression: every recipe of a study on a bundle was called like the bundle, and they were one cell."""
        assert named("tuned", "tf32") == "tuned+tf32"
        assert named("tuned", "channels_last", "workers_8") == "tuned+channels_last+workers_8"
        assert named("tuned", "compile") == "tuned", "it has that lever already"

    def test_of_a_bundle_with_a_lever_taken_out_says_which(self) -> None:
        assert recipe.name(bench("recipe=tuned", "recipe.cuda_graph=false").recipe) == "tuned+no_cuda_graph"
        assert recipe.name(bench("recipe=tuned", "recipe.optimizer=adamw").recipe) == "tuned+adamw"

    def test_of_a_bundle_on_a_processor_says_so(self) -> None:
        assert named("poster_baseline", "cpu").startswith("cpu+poster_baseline")

    def test_given_by_hand_does_not_hide_the_levers(self) -> None:
        assert recipe.name(bench("recipe=baseline", "recipe.name=mine", "recipe.tf32=true").recipe) == "mine+tf32"

    @pytest.mark.parametrize("study", sorted(recipe.STUDIES))
    @pytest.mark.parametrize("base", ["baseline", "tuned", "poster_optimized"])
    def test_differs_between_recipes_of_a_study_that_differ(self, study: str, base: str) -> None:
        steps = ["tf32", "grad_checkpoint+accumulate_2", "workers_2", "attn_flash"]
        found: dict[str, set[str]] = {}
        for parts in recipe.STUDIES[study](base, steps):
            one = bench(f"recipe=[{','.join(parts)}]").recipe
            found.setdefault(recipe.name(one), set()).add(str(one))
        assert len(found) == len(steps) + 1
        assert all(len(recipes) == 1 for recipes in found.values())

    def test_of_no_lever_is_the_baseline(self) -> None:
        assert named("baseline") == "baseline"
        assert named("cpu") == "cpu"


def test_every_field_of_a_recipe_is_a_lever() -> None:
    assert {lever.field for lever in levers.REGISTRY} == set(recipe._switches())


def test_every_lever_has_a_file() -> None:
    found = {next(iter(recipe.levers(bench("recipe=baseline", f"recipe={one}").recipe)), "precision") for one in LEVERS}
    assert found | {"mask_pool"} == {lever.field for lever in levers.REGISTRY}


class TestAStudy:
    def test_one_at_a_time_is_the_base_and_each_lever_alone(self) -> None:
        made = recipe.sweep("one_at_a_time", "baseline", ["ema", "tf32+dali"])
        assert made == "[baseline],[baseline,ema],[baseline,tf32,dali]"

    def test_ladder_adds_one_more_each_time(self) -> None:
        made = recipe.sweep("ladder", "baseline", ["ema", "tf32+dali"])
        assert made == "[baseline],[baseline,ema],[baseline,ema,tf32,dali]"

    def test_leave_one_out_is_all_and_all_but_each(self) -> None:
        made = recipe.sweep("leave_one_out", "cpu", ["ema", "tf32", "dali"])
        assert made == "[cpu,ema,tf32,dali],[cpu,tf32,dali],[cpu,ema,dali],[cpu,ema,tf32]"

    def test_without_levers_or_with_one_twice_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"study\.levers"):
            recipe.sweep("ladder", "baseline", [])
        with pytest.raises(UserError, match="none twice"):
            recipe.sweep("ladder", "baseline", ["a", "a"])

    def test_is_swept_with_repeats_outermost(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from inpaint_bench import launch

        code = launch.main(
            ["-m", "study=ladder", "study.levers=[tf32,compile]", "repeats=2", "gpu=h200", "dry_run=true",
             f"hydra.sweep.dir={tmp_path}"]
        )  # fmt: skip
        assert code == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "recipe=[" in line]
        seeds = [line.split("seed=")[1].split()[0] for line in lines]
        recipes = [line.split("recipe=")[1].split()[0] for line in lines]
        assert seeds == ["0", "0", "0", "1", "1", "1"]
        for repetition in (recipes[:3], recipes[3:]):
            assert set(repetition) == {"[baseline]", "[baseline,tf32]", "[baseline,tf32,compile]"}
