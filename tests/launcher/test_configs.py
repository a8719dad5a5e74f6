"""Every configuration file composes, and impossible ones are refused before anything is submitted."""

import re
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from inpaint_bench.config import config_hash, register, typed
from inpaint_bench.errors import UserError
from inpaint_bench.launch import main
from inpaint_bench.paths import ROOT, conf_dir

GROUPS = ["gpu", "site", "model", "data", "recipe", "telemetry", "workload", "profile"]
CHOICES = [(group, file.stem) for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _hydra():
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_every_group_composes_and_is_typed(group, choice):
    root = ["data.root=photos"] if choice == "folder" else []
    bench = typed(compose("config", overrides=[f"{group}={choice}", *root]))
    assert bench.batch == 16


def _commands() -> list[list[str]]:
    """The override words of every launch command in the README."""
    lines = re.findall(r"(?:inpaint_bench\.launch|inpaint-bench launch) (.*)", (ROOT / "README.md").read_text())
    return [[word for word in line.split() if "=" in word] for line in lines]


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_every_command_of_the_readme_composes_at_every_point(words):
    swept = [[f"{key}={one}" for one in values.split(",")] for key, _, values in (w.partition("=") for w in words)]
    for overrides in product(*swept):
        typed(compose("config", overrides=list(overrides)))


def test_the_readme_names_commands():
    assert len(_commands()) >= 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("batchs=8", r"batchs: no such key.*Did you mean batch\?.*Valid: batch"),
        ("data.kinds=x", r"data\.kinds: no such key in data.*kind"),
        ("gpu=b200", r"gpu=b200: no such choice; have: a100, a40"),
        ("gpu=h100", r"gpu=h100: no site serves it \(delta: a100, a40, h200; grace"),
        ("gpu=h200 site=grace", r"gpu=h200: not on site grace; it has: a100, a40"),
        ("batch=abc", r"batch: .*'abc'.*Integer"),
        ("batch=0", r"batch=0: must lie between 1 and"),
        ("recipe.precision=int8", r"recipe\.precision=int8: not one of bf16, fp16, fp32"),
        ("time_min=9999 gpu=h200", r"time_min=9999: partition gpuH200x8 of delta allows 2880"),
        ("data=folder", r"data\.root is empty"),
        ("data.resolution_px=100", r"data\.resolution_px=100: must be a multiple of 8"),
        ("sites.nowhere.qos=x", r"sites\.nowhere: no such site; have: delta, grace, local"),
        ("sites.grace.gpus.a100.partitio=x", r"site grace: .*'partitio'"),
        ("sites.delta.account.value=me gpu=h200", r"account\.value=me: not an account of delta.*`accounts`"),
        ("budget=1 gpu=h200", r"budget=1: this sweep may cost 3\.0 SU"),
        ("budget=1 gpu=a100", r"charging rule of grace is not known"),
        ("batch=[", r"batch="),
    ],
)
def test_a_wrong_sweep_is_refused_in_a_sentence_with_exit_code_2(arguments, says, capsys, tmp_path):
    code = main(["-m", *arguments.split(), f"out={tmp_path}"])
    error = capsys.readouterr().err
    assert code == 2
    assert re.search(says, error)
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("sweep.json"))


def test_the_hash_of_a_configuration_ignores_where_it_is_sent_but_not_what_it_does():
    base = config_hash(compose("config"))
    assert config_hash(compose("config", overrides=["site=delta", "wait=true", "out=elsewhere"])) == base
    assert config_hash(compose("config", overrides=["batch=8"])) != base


def test_an_impossible_value_deep_in_a_site_file_names_its_key():
    from inpaint_bench.config import SiteConfig, SiteGpu, check

    with pytest.raises(UserError, match=r"site\.here\.gpus\.x\.max_per_node=0: must lie between 1 and 64"):
        check(SiteConfig(name="here", gpus={"x": SiteGpu(max_per_node=0)}), "site.here")


def test_every_fact_of_a_site_file_says_where_it_comes_from(tmp_path: Path):
    import yaml

    for name in ("grace", "delta"):
        site = yaml.safe_load((conf_dir() / "site" / f"{name}.yaml").read_text())
        blocks = [v for k, v in site.items() if isinstance(v, dict) and k != "gpus"] + list(site["gpus"].values())
        assert blocks
        for block in blocks:
            assert block.get("source"), (name, block)
            assert block.get("checked_on"), (name, block)
