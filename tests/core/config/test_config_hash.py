"""What a configuration's hash depends on, now and when fields are added."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core import workloads
from inpaint_bench.core.config.config_hash import ALWAYS_HASHED, config_hash
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir

# Hashes of measured cells: the time limits and repetitions of their next runs are found by them.
EARLIER = {
    "gpu=h200": "75a1ad1e08be",
    "batch=auto": "73e03ed3816e",
    "recipe=tuned": "a5013b4106dd",
    "model=sdxl_inpaint": "b0ee1d6d2f64",
    "profile=demo": "b561d98e42c0",
    "workload=denoise_patch": "2e1f93e32cda",
    "workload=denoise_shape": "384864b55f44",
    "workload=fid_clip": "9eade2272ec4",
    "workload=sd_inference": "72f585efb4f1",
    "workload=volume3d_sample": "4c7d645e734f",
    "workload=volume3d_train": "e7750020ad73",
}


def compose(*overrides: str) -> DictConfig:
    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose("config", overrides=list(overrides))


def with_new_field(block: str, value: int) -> DictConfig:
    """Return the default configuration, as if the class of a block had one more field, of default 3."""
    config = compose()
    kind = OmegaConf.get_type(config[block])
    grown = make_dataclass(kind.__name__, [("newer", int, field(default=3))], bases=(kind,), kw_only=True)
    grown.__module__ = kind.__module__
    config[block] = OmegaConf.merge(
        OmegaConf.structured(grown), OmegaConf.to_container(config[block]), {"newer": value}
    )
    return config


@pytest.mark.parametrize(("override", "expected"), EARLIER.items())
def test_hash_of_an_earlier_configuration_stays(override: str, expected: str) -> None:
    chosen = override.startswith(("recipe=", "workload=", "profile="))
    default = [] if chosen else ["recipe=earlier_baseline"]  # called `baseline` then
    assert config_hash(compose(*default, override)) == expected


@pytest.mark.slow  # composes with Hydra
@pytest.mark.parametrize("block", ["recipe", "workload", "data"])
def test_new_field_changes_the_hash_only_where_it_is_set(block: str) -> None:
    earlier = config_hash(compose())
    assert config_hash(with_new_field(block, 3)) == earlier
    assert config_hash(with_new_field(block, 4)) != earlier


def test_hashed_fields_exist() -> None:
    """A field that is removed or renamed changes every hash."""
    config = compose()
    declared = {
        block: set(config[block]) if block else set(config) for block in ALWAYS_HASHED if block in ("", *config)
    }
    for name, module in workloads.declarations().items():
        declared[name] = {spec.name for spec in fields(module.Config)}
    missing = {block: names - declared[block] for block, names in ALWAYS_HASHED.items()}
    assert {block: names for block, names in missing.items() if names} == {}
