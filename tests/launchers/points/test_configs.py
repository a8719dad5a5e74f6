"""Every configuration file composes, and every command that the README shows."""

import re
from dataclasses import fields

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from benchmarks.campaign import read_plan
from inpaint_bench.cli import advise
from inpaint_bench.core.config.bench import NEEDS_ROOT, BenchConfig
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.conflicts import lever_problem
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.config.recipe import STUDIES, lever_names, levers, list_parts
from inpaint_bench.core.config.site import SiteBlock
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import rates
from inpaint_bench.core.estimates.rates import work_of
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import ROOT, conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.workloads.finetune_inpaint import TRAINING_ONLY, Config
from launchers.points.compose import composer
from launchers.points.hydra_internals import expand_sweep
from launchers.submit.estimates import estimate, leave_out
from launchers.submit.plugin import grid_points, merge_typed
from tests.docs.pages import PAGES, blocks, code, simple_commands

pytestmark = pytest.mark.slow

GROUPS = ["gpu", "site", "model", "data", "recipe", "telemetry", "workload", "profile"]
CHOICES = [(group, file.stem) for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _hydra():
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_configuration_file_composes(group, choice):
    root = ["data.root=photos"] if choice in NEEDS_ROOT else []
    root += ["workload=volume3d_train"] if choice == "nifti" else []
    root += ["recipe=half", "recipe.lora_rank=4"] if choice.startswith(("flux", "sd35")) else []
    root += ["workload=finetune_text2image"] if choice == "flux2_klein_text" else []
    files = ("model.weights", "quality.inception_weights", "quality.clip_model")
    root += [f"{key}=weights" for key in files] if choice == "fid_clip" else []
    bench = parse_config(compose("config", overrides=split_choices([f"{group}={choice}", *root])))
    assert bench.batch in (1, 16)  # a workload may have a batch size of its own


def _commands() -> list[list[str]]:
    """Return the arguments of every launch command in the README and in docs.

    Without those that need files of the user's: --plan, --config-dir and site=mine have tests of their own.
    """
    lines = [line for page in PAGES for block in blocks(page.read_text()) for line, _ in block.commands()]
    commands = [words for line in lines for words in simple_commands(line)]
    found = [words[2:] for words in commands if words[:2] == ["inpaint-bench", "launch"]]
    found += [words[3:] for words in commands if words[:3] == ["python", "-m", "inpaint_bench.launch"]]
    unique = [list(words) for words in dict.fromkeys(map(tuple, found))]
    return [words for words in unique if not {"--plan", "--config-dir", "site=mine"} & set(words)]


def _points(arguments: list[str]) -> list[list[str]]:
    """Return every point's overrides, as Hydra expands them: a study adds sweeps of its own, a list is a value."""
    overrides = [list_parts(argument, swept="-m" in arguments) for argument in arguments if argument != "-m"]
    if "-m" not in arguments:
        return [overrides]
    parameters, grid = list[str](), list[list[str]]([[]])
    if any(override.startswith("study") for override in overrides):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", overrides, run_mode=RunMode.MULTIRUN)
        params = config.hydra.sweeper.params or {}
        parameters = [f"{key}={value}" for key, value in params.items()]
        grid = grid_points(config.study) if config.study.grid else grid
    parsed = OverridesParser.create().parse_overrides([*parameters, *overrides])
    return [list(filter_overrides(point)) for point in merge_typed(grid, expand_sweep(parsed))]


def _place(commands: list[list[str]]) -> tuple[dict[str, list[BenchConfig]], dict[str, object]]:
    """Return the composed points of each command, and what keeps commands from running."""
    points = {" ".join(words): _points(words) for words in commands}
    GlobalHydra.instance().clear()
    composed, problems = {}, dict[str, object]()
    with composer() as compose_point:
        for words, overrides in points.items():
            try:
                placed = [compose_point(num, point) for num, point in enumerate(overrides)]
                left_out = leave_out(placed, estimate(placed))[1]
                composed[words] = [point.bench for point in placed]
                if found := [*filter(None, (lever_problem(bench) for bench in composed[words])), *left_out]:
                    problems[words] = found
            except (UserError, HydraException, OmegaConfBaseException) as error:
                problems[words] = str(error)
    return composed, problems


def test_every_command_of_the_studies_composes_has_a_site_and_fits_its_card():
    lines = [
        text for text in code((ROOT / "docs" / "studies.md").read_text()) if text.startswith("inpaint-bench launch ")
    ]
    commands = [words[2:] for line in lines for words in simple_commands(line)]
    assert len(commands) > 50
    assert _place(commands)[1] == {}


def test_every_command_of_the_campaign_composes_and_makes_the_cell_of_its_line():
    lines = {}
    for line in read_plan():
        (words,) = simple_commands(line["command"])
        assert words[:5] == ["inpaint-bench", "launch", "-m", "site=local", "gpu=h200"]
        lines[" ".join(["-m", "gpu=h200", *words[5:]])] = line  # site=local would read the data
    composed, problems = _place([words.split(" ") for words in lines])
    assert problems == {}
    for words, line in lines.items():
        (bench,) = composed[words]
        work = work_of(bench)
        made = {"workload": work.workload, "model": re.match(r"\w+", work.model)[0], "gpus": str(bench.gpus)}
        made |= {"batch": str(bench.batch), "resolution_px": str(work.resolution_px)}
        assert {key: value for key, value in made.items() if line[key]} == {key: line[key] for key in made if line[key]}
        assert {*levers(bench.recipe).values()} == lever_names(line["recipe"]), words
        assert ("variant" in line["where"]) == (f"variant = '{work.variant}'" in line["where"]), words


@pytest.mark.parametrize("model", ["sd15_inpaint", "sd2", "sdxl_inpaint", "flux_fill", "sd35_medium", "flux2_klein"])
def test_every_command_that_advise_prints_composes_and_fits_its_card(model):
    """Regression: two GPUs with a CUDA graph lacked steps of warm-up, all weights of FLUX their type."""
    wish = {"model": model, "images": 6500, "epochs": 16, "gpu": "h200", "site": "delta"}
    lines = {option.command for option in advise._options(wish, rates.committed(), {})}
    assert lines
    commands = [words[2:] for line in lines for words in simple_commands(line.replace("site=delta ", ""))]
    assert _place(commands)[1] == {}


@pytest.mark.parametrize("arguments", _commands(), ids=" ".join)
def test_every_point_of_every_readme_command_composes(arguments):
    points = _points(arguments)
    for overrides in points:
        parse_config(compose("config", overrides=split_choices(overrides)))
    assert points


def test_readme_has_commands_of_every_study():
    commands = _commands()
    assert len(commands) >= 8
    studies = {argument for command in commands for argument in command if argument.startswith("study=")}
    assert studies == {f"study={name}" for name in (*STUDIES, "poster")}


def test_config_hash_ignores_placement_and_repetitions():
    base = config_hash(compose("config"))
    repeated = ["repeats=auto", "repeats_target=0.01", "repeats_max=5", "order_seed=1"]
    assert config_hash(compose("config", overrides=repeated)) == base
    assert config_hash(compose("config", overrides=["site=delta", "wait=true", "out=elsewhere", "seed=3"])) == base
    assert config_hash(compose("config", overrides=["batch=8"])) != base


@pytest.mark.parametrize(
    ("overrides", "variant"),
    [
        (["profile=demo"], None),
        (["workload.measure_steps=7", "workload.min_warmup_s=3", "workload.epochs=2"], None),
        (["workload.learning_rate=1e-4"], "learning_rate=0.0001"),
        (["workload=denoise_shape", "recipe=fp32", "workload.models=[drunet]", "workload.min_measure_s=3"], None),
        (
            ["workload=denoise_shape", "workload.tiling=off", "workload.width_steps_px=[64]"],
            "tiling=off, width_steps_px=[64]",
        ),
        (["workload=sd_inference", "workload.steps=20"], None),  # in the name of the model
    ],
)
def test_variant_of_a_workload_names_what_changes_the_work(overrides, variant):
    assert parse_config(compose("config", overrides=split_choices(overrides))).workload.variant() == variant


def test_training_only_keys_exist():
    assert set(TRAINING_ONLY) <= {spec.name for spec in fields(Config)}


def test_every_block_of_a_site_file_has_source_and_date():
    for name in ("grace", "delta"):
        site = yaml.safe_load((conf_dir() / "site" / f"{name}.yaml").read_text())
        blocks = [v for k, v in site.items() if isinstance(v, dict) and k != "gpus"] + list(site["gpus"].values())
        assert blocks
        for block in blocks:
            assert block.get("source"), (name, block)
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(block["checked_on"])), (name, block)
            if block["source"].startswith(("Slurm's default", "not stated")):
                continue
            for source in SiteBlock(source=block["source"]).sources or [""]:
                assert re.match(r"https://|[\w-]+/[\w-]+(@[0-9a-f]{7})? |TAMU Libraries' guide", source), (name, source)


def test_account_pattern_of_grace_takes_both_lengths_that_are_in_use():
    site = yaml.safe_load((conf_dir() / "site" / "grace.yaml").read_text())
    accounts = ("132667767747", "1228000223136", "12345", "bbxx-delta-gpu")
    assert [bool(re.fullmatch(site["account"]["pattern"], account)) for account in accounts] == [
        True,
        True,
        False,
        False,
    ]
