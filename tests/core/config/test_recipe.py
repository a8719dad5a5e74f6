"""Names of recipes, and the studies that compare them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from inpaint_bench import levers
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.conflicts import lever_problem
from inpaint_bench.core.config.levers import FIELDS, LEVERS, RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.recipe_names import current_name, split_choices
from tests.run.support import bench

BUNDLES = sorted(recipe.bundles())
DEVICES = ("cuda", "cpu")


def named(*names: str) -> str:
    return recipe.name(bench(f"recipe=[{','.join(names)}]"))


class TestRecipeName:
    def test_every_lever_is_named_after_its_recipe(self) -> None:
        point = bench()
        for lever in LEVERS.values():
            on_gpu, on_cpu = (
                recipe.name(replace(point, recipe=replace(recipe.without_levers(device), **{lever.field: lever.value})))
                for device in DEVICES
            )
            # A recipe without levers has the value already, on a GPU or on a CPU.
            assert on_gpu in (f"earlier_baseline+{lever.name}", "earlier_baseline")
            assert on_cpu in (f"cpu+{lever.name}", "cpu")
            assert {on_gpu, on_cpu} != {"earlier_baseline", "cpu"} or not lever.listed

    def test_every_lever_is_known_to_hydra(self) -> None:
        register()
        stored = ConfigStore.instance().repo["recipe"]
        for lever in LEVERS.values():
            merged = OmegaConf.merge(OmegaConf.structured(RecipeConfig), stored[f"{lever.name}.yaml"].node)
            assert merged == OmegaConf.structured(replace(RecipeConfig(), **{lever.field: lever.value})), lever.name
        assert named("baseline", "compile_max-autotune_plain") == "baseline+compile_max-autotune_plain"

    def test_order_of_levers_does_not_depend_on_the_command_line(self) -> None:
        assert named("baseline", "tf32", "channels_last") == named("baseline", "channels_last", "tf32")

    def test_includes_a_key_set_on_the_command_line(self) -> None:
        assert recipe.name(bench("recipe=baseline", "recipe.num_workers=3")) == "baseline+num_workers=3"

    @pytest.mark.parametrize("bundle", BUNDLES)
    def test_bundle_keeps_its_name(self, bundle: str) -> None:
        assert named(bundle) == bundle
        assert named("earlier_baseline", bundle) == bundle

    def test_bundle_with_an_added_lever_names_it(self) -> None:
        """Regression: every recipe of a study on a bundle was called like the bundle, and they were one cell."""
        assert named("tuned", "tf32") == "tuned+tf32"
        changed = bench("recipe=[tuned,channels_last]", "recipe.num_workers=8")
        assert recipe.name(changed) == "tuned+channels_last+num_workers=8"
        assert named("compiled", "compile") == "compiled", "it has that lever already"

    def test_bundle_with_a_removed_lever_names_it(self) -> None:
        assert recipe.name(bench("recipe=tuned", "recipe.cuda_graph=false")) == "tuned+no_cuda_graph"
        assert recipe.name(bench("recipe=compiled", "recipe.optimizer=adamw")) == "compiled+adamw"

    def test_bundle_on_a_cpu_is_marked(self) -> None:
        assert named("poster_baseline", "cpu").startswith("cpu+poster_baseline")

    def test_name_set_on_the_command_line_does_not_hide_the_levers(self) -> None:
        assert recipe.name(bench("recipe=baseline", "recipe.name=mine", "recipe.tf32=true")).startswith("mine+tf32+")

    @pytest.mark.parametrize("study", sorted(recipe.STUDIES))
    @pytest.mark.parametrize("base", ["baseline", "tuned", "poster_optimized"])
    def test_different_recipes_of_a_study_have_different_names(self, study: str, base: str) -> None:
        steps = ["tf32", "accumulate=2+grad_checkpoint", "num_workers=2", "attn_flash"]
        found: dict[str, set[str]] = {}
        for parts in recipe.STUDIES[study](base, steps):
            one = bench(*split_choices([f"recipe=[{','.join(parts)}]"]))
            found.setdefault(recipe.name(one), set()).add(str(one.recipe))
        assert len(found) == len(steps) + 1
        assert all(len(recipes) == 1 for recipes in found.values())

    def test_baseline_is_a_bundle_where_encoders_run_in_the_training_step(self) -> None:
        plain = bench("recipe=baseline").recipe
        assert (plain.encoders, plain.pin_memory, plain.non_blocking) == ("half", True, True)
        assert (named("baseline"), named("cpu"), named("earlier_baseline")) == ("baseline", "cpu", "earlier_baseline")
        assert bench("recipe=earlier_baseline").recipe == recipe.without_levers("cuda")

    @pytest.mark.parametrize("workload", ["sd_inference", "volume3d_train", "denoise_shape"])
    @pytest.mark.parametrize("typed", ["recipe=baseline", "recipe=[baseline]"])
    def test_baseline_of_other_workloads_has_no_lever(self, workload: str, typed: str) -> None:
        point = bench(f"workload={workload}", typed)
        assert point.recipe == recipe.without_levers("cuda")
        assert recipe.name(point) == "baseline"
        assert recipe.name(bench(f"workload={workload}", "recipe=[baseline,tf32]")) == "tf32"

    def test_levers_alone_are_added_to_the_baseline(self) -> None:
        assert split_choices(["recipe=tf32"]) == ["recipe=[baseline,tf32]"]
        assert named("tf32") == "baseline+tf32"
        (inference,) = split_choices(["workload=sd_inference", "recipe=[half]"])[1:]
        assert inference == "recipe=[half]"

    @pytest.mark.parametrize(
        ("recorded", "workload", "levers", "today"),
        [
            ("baseline", "finetune_inpaint", None, "earlier_baseline"),
            ("baseline", "finetune_text2image", "[]", "earlier_baseline"),
            ("baseline", "finetune_inpaint", '[{"field": "encoders"}]', "baseline"),
            ("encoders_half+pin_memory+non_blocking", "finetune_inpaint", '[{"field": "encoders"}]', "baseline"),
            ("tf32", "finetune_inpaint", '[{"field": "tf32"}]', "earlier_baseline+tf32"),
            ("num_workers=8", "finetune_inpaint", "[]", "earlier_baseline+num_workers=8"),
            *((name, "finetune_inpaint", "[]", name) for name in ("tuned+tf32", "cpu+lora", "poster_baseline", "mine")),
            *((name, "sd_inference", "[]", name) for name in ("baseline", "half")),
            ("baseline", "of_somebody", "[]", "baseline"),
        ],
    )
    def test_recorded_names_are_those_of_today(
        self, recorded: str, workload: str, levers: str | None, today: str
    ) -> None:
        assert current_name(recorded, workload, levers) == today
        assert current_name(today, workload, levers) == today


def test_every_field_of_a_recipe_is_a_lever() -> None:
    assert {lever.field for lever in levers.REGISTRY} == set(recipe.FIELDS)


def test_every_field_but_numbers_has_levers() -> None:
    numbers = {field for field in FIELDS if not isinstance(getattr(RecipeConfig(), field), bool | str)}
    assert {lever.field for lever in LEVERS.values() if lever.listed} | numbers == set(FIELDS)


def test_no_two_levers_or_bundles_have_one_name() -> None:
    values = sum(2 if isinstance(value, bool) else 1 for value in vars(RecipeConfig()).values())
    assert len({(lever.field, lever.value) for lever in LEVERS.values()}) == len(LEVERS) > values
    assert not set(LEVERS) & set(recipe.bundles())


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize(("field", "reason"), [("cuda_graph=true", "cannot enclose"), ("accumulate=2", "overwrite")])
def test_what_the_cuda_graphs_of_inductor_do_not_go_with(mode: str, field: str, reason: str) -> None:
    """Regression: a job ended in its first step with RuntimeError, accumulating gradients."""
    point = ("recipe=baseline", "batch=2", f"recipe.compile={mode}")
    assert lever_problem(bench(*point)) is None
    assert reason in (lever_problem(bench(*point, f"recipe.{field}")) or "")
    assert lever_problem(bench(*point[:2], "recipe.compile=default", f"recipe.{field}")) is None


class TestSpelling:
    @pytest.mark.parametrize(
        ("typed", "lists"),
        [
            ("recipe=baseline+tf32", "recipe=[baseline,tf32]"),
            ("recipe=tf32,tuned+num_workers=8,cpu", r"recipe=[tf32],[tuned,num_workers\=8],cpu"),
            ("recipe=[baseline,ema+tf32],tf32+pin_memory", "recipe=[baseline,ema,tf32],[tf32,pin_memory]"),
            ("recipe=tuned", "recipe=tuned"),
            ("recipe=[tf32,num_workers=8]", r"recipe=[tf32,num_workers\=8]"),
            ("study.levers=[tf32+num_workers=8,ema]", r"study.levers=[tf32+num_workers\=8,ema]"),
            ("study.levers=['num_workers=8']", "study.levers=['num_workers=8']"),
            ("recipe=choice(baseline+tf32,cpu)", "recipe=choice(baseline+tf32,cpu)"),
            ("batch=1+1", "batch=1+1"),
        ],
    )
    def test_recipe_of_a_report_becomes_a_list(self, typed: str, lists: str) -> None:
        assert recipe.list_parts(typed) == lists.replace("[tf32],[tuned", "tf32,[tuned")

    @pytest.mark.parametrize(
        "name",
        [
            "earlier_baseline+tf32+num_workers=8",
            "baseline+tf32",
            "tuned+no_cuda_graph",
            "cpu+adamw_fused",
            "compiled+adamw",
        ],
    )
    def test_every_name_of_a_recipe_can_be_launched(self, name: str) -> None:
        assert recipe.name(bench(*split_choices([f"recipe={name}"]))) == name

    def test_launch_takes_it_swept_or_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from inpaint_bench import launch

        sweep = ["-m", "recipe=tf32,ema+num_workers=8", "gpu=h200", "dry_run=true", f"hydra.sweep.dir={tmp_path}"]
        assert launch.main(sweep) == 0
        out = capsys.readouterr().out
        assert "recipe=[baseline,tf32]" in out
        assert "recipe=[baseline,ema] recipe.num_workers=8" in out
        assert launch.main(["recipe=baseline+tf23", "gpu=h200"]) == 2
        assert "recipe=tf23: no such choice. Did you mean tf32?" in capsys.readouterr().err

    @pytest.mark.parametrize("sweeps", [True, False])
    @pytest.mark.parametrize(
        "typed", ["tf32+num_workers=8", "[tf32,num_workers=8]", r"[tf32,num_workers\=8]", "'tf32+num_workers=8'"]
    )
    def test_number_of_a_single_recipe_becomes_a_key(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: str, sweeps: bool
    ) -> None:
        from inpaint_bench import launch

        how = ["-m", "--json", "dry_run=true", f"hydra.sweep.dir={tmp_path}"] if sweeps else ["--cfg", "job"]
        assert launch.main([*how, "gpu=h200", f"recipe={typed}"]) == 0
        out = capsys.readouterr().out
        expected = (
            ['"recipe=[baseline,tf32]"', '"recipe.num_workers=8"'] if sweeps else ["num_workers: 8", "tf32: true"]
        )
        assert all(part in out for part in expected), out


class TestFilesOfTheUsers:
    def test_recipe_of_the_users_stands_beside_levers(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from inpaint_bench import launch

        (tmp_path / "recipe").mkdir()
        (tmp_path / "recipe" / "mine.yaml").write_text("name: mine\nema: true\n")
        sweep = ["-m", "--config-dir", str(tmp_path), "gpu=h200", "dry_run=true", f"hydra.sweep.dir={tmp_path}/s"]
        assert launch.main([*sweep, "recipe=mine,mine+tf32"]) == 0
        assert "recipe=[mine,tf32]" in capsys.readouterr().out

    def test_file_named_as_a_lever_must_be_that_lever(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from inpaint_bench import launch

        (tmp_path / "recipe").mkdir()
        file = tmp_path / "recipe" / "tf32.yaml"
        sweep = ["-m", "--config-dir", str(tmp_path), "gpu=h200", "dry_run=true", f"hydra.sweep.dir={tmp_path}/s"]
        file.write_text("tf32: true\n")
        assert launch.main([*sweep, "recipe=tf32"]) == 0
        file.write_text("tf32: true\nema: true\n")
        assert launch.main([*sweep, "recipe=tf32"]) == 2
        assert "tf32 is the name of a lever; rename the file" in capsys.readouterr().err


class TestStudy:
    def test_one_at_a_time_is_the_base_and_each_lever_alone(self) -> None:
        made = recipe.sweep("one_at_a_time", "baseline", ["ema", "tf32+pin_memory"])
        assert made == "[baseline],[baseline,ema],[baseline,tf32,pin_memory]"

    def test_ladder_adds_one_lever_per_step(self) -> None:
        made = recipe.sweep("ladder", "baseline", ["ema", "tf32+pin_memory"])
        assert made == "[baseline],[baseline,ema],[baseline,ema,tf32,pin_memory]"

    def test_leave_one_out_omits_each_lever_once(self) -> None:
        made = recipe.sweep("leave_one_out", "cpu", ["ema", "tf32", "pin_memory"])
        assert made == "[cpu,ema,tf32,pin_memory],[cpu,tf32,pin_memory],[cpu,ema,pin_memory],[cpu,ema,tf32]"

    def test_key_with_value_is_a_lever_and_follows_the_files(self) -> None:
        made = recipe.sweep("ladder", "baseline", ["num_workers=8", "tf32"])
        assert made == r"[baseline],[baseline,num_workers\=8],[baseline,tf32,num_workers\=8]"

    def test_last_number_of_a_key_counts(self) -> None:
        made = recipe.sweep("ladder", "tf32+num_workers=4", ["num_workers=8"])
        assert made == r"[tf32,num_workers\=4],[tf32,num_workers\=8]"

    def test_choice_of_a_point_is_split_into_files_and_keys(self) -> None:
        point = ["batch=8", "recipe=[baseline,tf32,'num_workers=8',accumulate\\=2]", "seed=1"]
        split = split_choices(point)
        assert split == ["batch=8", "recipe=[baseline,tf32]", "recipe.num_workers=8", "recipe.accumulate=2", "seed=1"]
        assert split_choices(split) == split
        assert recipe.requested_parts(split) == ["baseline", "tf32", "num_workers=8", "accumulate=2"]

    def test_missing_and_repeated_levers_are_refused(self) -> None:
        with pytest.raises(UserError, match=r"study\.levers"):
            recipe.sweep("ladder", "baseline", [])
        with pytest.raises(UserError, match="none twice"):
            recipe.sweep("ladder", "baseline", ["a", "a"])

    def test_repeats_are_the_outermost_loop_of_the_sweep(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from inpaint_bench import launch

        code = launch.main(
            ["-m", "study=ladder", "study.levers=[tf32,'num_workers=8']", "repeats=2", "gpu=h200", "dry_run=true",
             f"hydra.sweep.dir={tmp_path}"]
        )  # fmt: skip
        assert code == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "recipe=[" in line]
        seeds = [line.split("seed=")[1].split()[0] for line in lines]
        recipes = [line.split("recipe=")[1].split()[0] for line in lines]
        assert seeds == ["0", "0", "0", "1", "1", "1"]
        for repetition in (recipes[:3], recipes[3:]):
            assert sorted(repetition) == ["[baseline,tf32]", "[baseline,tf32]", "[baseline]"]
        assert sum("recipe.num_workers=8" in line for line in lines) == 2


def test_a_broken_file_of_another_recipe_changes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = bench()
    folder = tmp_path / "conf" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("tf32: [true")
    monkeypatch.setattr(recipe, "conf_dir", lambda: tmp_path / "conf")
    assert recipe.name(replace(point, recipe=RecipeConfig())) == "earlier_baseline"
    with pytest.raises(UserError, match=r"mine\.yaml:1: not YAML"):
        recipe.read_bundle("mine")
