"""A configuration that is written for a job and read there again has the same types, values and hash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from inpaint_bench.core.composed_file import plain_config, read_yaml, typed_config, write_yaml
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_unchecked
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir

GROUPS = ("gpu", "site", "model", "data", "recipe", "telemetry", "workload", "profile", "study", "track")
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]
HOSTILE = [
    *("012345", "1e5", "1_200", "null", "on", "~", "1:30:00", "2026-01-01", "0x1f", ".inf", "", " x ", "- a", "a: b"),
    *("${batch}", "\\${batch}", "a\\\\${x}", "${oc.env:HOME}", "??", "!!python/object:os.system x", "&a *a"),
    *("# x", "%TAG", "'\"", "line\nbreak\t", "\x85\x00", "\u2028\ud7ff\ufeff\U0001f600", "=", "<<", "y", "0b1", "1__0"),
]


@contextmanager
def composing() -> Iterator[None]:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        yield


def again(config: DictConfig, folder: Path) -> DictConfig:
    content = {**plain_config(config), "hydra": OmegaConf.to_container(config.hydra, enum_to_str=True)}
    write_yaml(folder / "0.yaml", content)
    return typed_config(read_yaml(folder / "0.yaml"), hydra=HydraConf)


def types_and_values(value: Any) -> Any:
    """Return the values with their types, since 1 == True == 1.0."""
    if isinstance(value, dict):
        return {key: types_and_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [types_and_values(item) for item in value]
    return type(value), repr(value)


def check(config: DictConfig, folder: Path) -> None:
    read = again(config, folder)
    before, after = parse_unchecked(config), parse_unchecked(read)
    assert after == before
    assert type(after.workload) is type(before.workload)
    values = [types_and_values(OmegaConf.to_container(OmegaConf.structured(bench))) for bench in (before, after)]
    assert values[0] == values[1]
    assert config_hash(read) == config_hash(config)
    assert OmegaConf.to_container(read.hydra) == OmegaConf.to_container(config.hydra)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_configuration_file_is_read_again(choice: str, tmp_path: Path) -> None:
    with composing():
        config = compose("config", overrides=[choice], return_hydra_config=True)
    check(config, tmp_path)


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with composing():
        overrides = ["+note=x", "+sites.delta.account=1", "~batch", "gpu=a40"]
        return compose("config", overrides=overrides, return_hydra_config=True)


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_that_yaml_takes_for_something_else_keep_type_and_value(
    composed: DictConfig, tmp_path: Path, text: str
) -> None:
    check_text(composed, tmp_path, text)


def check_text(composed: DictConfig, folder: Path, text: str) -> None:
    config = composed.copy()
    OmegaConf.set_struct(config, False)
    # Not an interpolation: that a text is none takes backslashes.
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    config.sites.delta.account = {"value": text, "key " + text: [text, 1, True, None, 1e-5, "1"]}
    config.study.levers = [text]
    config.quality.lpips_weights = text
    config.note = {"a": text}
    check(config, folder)


def test_text_that_is_not_unicode_is_refused(composed: DictConfig, tmp_path: Path) -> None:
    config = composed.copy()
    config.note = "a\udcff"
    with pytest.raises(UserError, match=r"'a.udcff': is not Unicode"):
        again(config, tmp_path)


def test_secrets_of_the_environment_are_left_to_the_job(
    composed: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc-def")
    monkeypatch.setenv("PLAIN", "1_2")
    config = composed.copy()
    config.note = {"a": "${oc.env:HF_TOKEN}", "b": "${oc.env:PLAIN}"}
    config.sites.delta = {
        "environment": {"variables": {"API_KEY": "pqr-pqr", "B": "x"}, "setup": ["export DB_PASSWORD=stu-stu"]}
    }
    read = again(config, tmp_path)
    text = (tmp_path / "0.yaml").read_text()
    assert not any(secret in text for secret in ("abc-def", "pqr-pqr", "stu-stu"))
    monkeypatch.delenv("PLAIN")
    monkeypatch.setenv("API_KEY", "pqr-pqr")
    assert dict(read.note) == {"a": "abc-def", "b": "1_2"}
    assert dict(read.sites.delta.environment.variables) == {"API_KEY": "pqr-pqr", "B": "x"}
