"""Every configuration file composes, and every command that the README shows."""

import re
from itertools import product

import pytest
import yaml
from hydra import compose, initialize_config_dir

from inpaint_bench.config import NEEDS_ROOT, SiteConfig, SiteGpu, check, config_hash, typed
from inpaint_bench.errors import UserError
from inpaint_bench.paths import ROOT, conf_dir
from inpaint_bench.schema import register

GROUPS = ["gpu", "site", "model", "data", "recipe", "telemetry", "workload", "profile"]
CHOICES = [(group, file.stem) for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _hydra():
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_file_of_every_group_composes_and_is_typed(group, choice):
    root = ["data.root=photos"] if choice in NEEDS_ROOT else []
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


def test_the_hash_of_a_configuration_ignores_where_it_is_sent_and_the_seed_but_not_what_it_does():
    base = config_hash(compose("config"))
    assert config_hash(compose("config", overrides=["site=delta", "wait=true", "out=elsewhere", "seed=3"])) == base
    assert config_hash(compose("config", overrides=["batch=8"])) != base


def test_an_impossible_value_deep_in_a_site_file_names_its_key():
    with pytest.raises(UserError, match=r"site\.here\.gpus\.x\.max_per_node=0: must lie between 1 and 64"):
        check(SiteConfig(name="here", gpus={"x": SiteGpu(max_per_node=0)}), "site.here")


def test_every_fact_of_a_site_file_says_where_it_comes_from():
    for name in ("grace", "delta"):
        site = yaml.safe_load((conf_dir() / "site" / f"{name}.yaml").read_text())
        blocks = [v for k, v in site.items() if isinstance(v, dict) and k != "gpus"] + list(site["gpus"].values())
        assert blocks
        for block in blocks:
            assert block.get("source"), (name, block)
            assert block.get("checked_on"), (name, block)
