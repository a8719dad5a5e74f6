"""Shared composition equals what Hydra composes for each point, node by node."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from launchers.points import hydra_internals
from launchers.points.compose import Composition, _with_environment
from launchers.points.point import ComposedConfig

pytestmark = pytest.mark.slow

GROUPS = ("gpu", "site", "model", "data", "recipe", "telemetry", "workload", "profile", "study", "track")
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]

# Every kind of override, valid and invalid, alone and combined.
VALUES = (
    "batch=8",
    "batch=auto",
    "batch='8'",
    'name="a b, c=d"',
    "name='${batch}'",
    "name=${batch}",
    "name=${hydra:job.num}",
    "name=${hydra.job.config_name}",
    "name=a\\,b",
    "name=",
    "seed=${data.seed}",
    "budget=null",
    "budget=1.5",
    "budget=1e3",
    "wait=TRUE",
    "out=${oc.env:HOME,x}/${now:%Y}",
    "data.seed=3",
    "data.root=photos",
    "data={seed: 4, num_images: 7}",
    "+data={seed: 5}",
    "data.num_images=null",
    "workload.train_steps=9",
    "workload=finetune_inpaint",
    "recipe=[baseline,tf32,channels_last]",
    "recipe.optimizer=adamw_fused",
    "recipe.precision=bf16",
    "study.levers=[tf32,ema+compile]",
    "study.levers=[${name}]",
    "model.unet.layers_per_block=1",
    "model.unet=${model.vae}",
    "model.unet.extra=3",
    "+model.unet.extra=3",
    "++model.unet.extra={a: [1, {b: c}]}",
    "~model.unet.layers_per_block",
    "~model.unet.layers_per_block=2",
    "~model.weights",
    "~model.vae",
    "~budget=3",
    "sites.grace.qos=x",
    "sites.delta.limits={max_array_size: 5}",
    "+sites.delta.limits.max_submit_jobs=3",
    "sites={}",
    "sites.grace.environment.variables={A: '${name}'}",
    "~study",
    "~study=ladder",
    "+gpu@spare=a40",
    "gpu@gpu=h200",
    "+extra=1",
    "site.qos=high",
    "site.gpus={}",
    "telemetry.capture=http://node:9400",
    "hydra.job.name=other",
    "hydra.job.config.override_dirname.kv_sep=_",
    "hydra.job.config.override_dirname.exclude_keys=[batch]",
    "hydra.job.env_copy=[HOME]",
    "+hydra.job.env_set.X=${name}",
    "hydra={verbose: true}",
    "+hydra.sweep.dir=x",
    "~hydra.job.chdir=x",
    "hydra.job.env_set=${sites}",
    "study.levers[0]=ema",
    "batchs=8",
    "batch=abc",
    "data.kinds=x",
    "gpu=b200",
    "profile.x=1",
    "batch=1,2",
    "batch=[",
    "quality.lpips_weights='it''s'",
    "identity.attempt=2",
)


def by_hydra(lines: list[str]) -> DictConfig:
    """Compose as for a point of a sweep, which has the time of day, and the environment, of the sweep."""
    config = compose("config", overrides=lines, return_hydra_config=True)
    OmegaConf.set_cache(config, {"now": {("%Y",): "2026"}})
    return _with_environment(config)


@pytest.fixture
def composition() -> Iterator[Composition]:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        loader = GlobalHydra.instance().config_loader()
        yield Composition(by_hydra, hydra_internals.config_repository(loader, "config", []))


def nodes(node: Any) -> Any:
    """Return everything about a node and its content, in order: unresolved values, types, flags, caches."""
    if not isinstance(node, Node):
        return node
    about = {name: repr(value) for name, value in vars(node._metadata).items()}
    content = node.__dict__["_content"] if isinstance(node, Container) else node._value()
    if isinstance(content, dict):
        content = [(key, nodes(value)) for key, value in content.items()]
    elif isinstance(content, list):
        content = [nodes(value) for value in content]
    kind = type(node) if not isinstance(node, DictConfig | ListConfig) else (type(node), OmegaConf.get_type(node))
    return kind, about, content


def outcome(make: Any, *arguments: Any) -> Any:
    """Return the result, or type and text of the error."""
    try:
        return make(*arguments)
    except Exception as error:
        return type(error), str(error)


def typed_and_hash(config: DictConfig) -> tuple[BenchConfig, str]:
    return parse_config(config), config_hash(config)


def check(composition: Composition, lines: Sequence[str]) -> bool:
    """Compare with Hydra; return whether the composition was shared."""
    expected = outcome(by_hydra, list(lines))
    composed = outcome(composition, list(lines))
    if not isinstance(composed, ComposedConfig):
        assert composed == expected, lines
        return False
    result = outcome(composed.build)
    if isinstance(expected, DictConfig) and isinstance(result, DictConfig):
        assert nodes(result) == nodes(expected), lines
        assert outcome(typed_and_hash, composed.build_app()) == outcome(typed_and_hash, expected), lines
    else:
        assert result == expected, lines
    return bool(composed.edits)


def test_every_kind_of_override_equals_hydra(composition: Composition) -> None:
    shared = {line: check(composition, [line, "batch=4"]) for line in VALUES}
    assert sum(shared.values()) >= len(VALUES) / 2, shared


def test_interpolation_of_hydras_own_node_is_composed_by_hydra(composition: Composition) -> None:
    """Regression: set on a complete configuration, it saw choices that Hydra writes later."""
    assert not check(composition, ["+sites.grace=${hydra.runtime.choices}", "+sites.grace.gpu=x"])
    assert not check(composition, ["hydra.job.env_set=${sites}", "hydra.job.env_set.A=b", "+sites.A=c"])


@pytest.mark.faults
def test_random_mixtures_of_choices_and_overrides_equal_hydra(composition: Composition) -> None:
    chance = random.Random(5)
    shared = 0
    for _ in range(10):
        lines = [*chance.sample(CHOICES, chance.randrange(2)), *chance.sample(VALUES, chance.randrange(2, 5))]
        chance.shuffle(lines)
        shared += check(composition, lines)
    assert shared >= 3, "too few mixtures are shared to test anything"


def test_every_group_is_shared_with_values_beside_its_choice(composition: Composition) -> None:
    for group in ("gpu", "site", "data", "recipe", "profile", "study"):
        choice = [line for line in CHOICES if line.startswith(f"{group}=")][-1]
        assert check(composition, [choice, "batch=4", "seed=1", "data.root=photos", "+sites.grace.qos=x"]), choice


def test_points_of_equal_groups_share_one_base(composition: Composition) -> None:
    first, second = (composition(["gpu=a40", f"batch={batch}", f"name=n{batch}"]) for batch in (1, 2))
    assert first.base is second.base
    assert (first.build().batch, second.build().name) == (1, "n2")


def test_variables_have_the_values_of_the_launch(composition: Composition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1_2")
    lines = [
        "gpu=a40",
        "+sites.grace.exclude_nodes=[a,'${oc.env:HERE}']",
        "name=n${oc.env:HERE}",
    ]
    composed = composition([*lines, "workload.measure_steps=${oc.env:GONE,31}"])
    monkeypatch.delenv("HERE")
    config = composed.build()
    assert (config.name, config.workload.measure_steps) == ("n1_2", 31)
    assert config.sites.grace.exclude_nodes == ["a", "1_2"]


def test_edits_of_the_launcher_come_last(composition: Composition) -> None:
    composed = composition(["gpu=a40", "batch=3", "seed=1"]).with_edits(
        {"seed": 2, "hydra.job.num": 7, "hydra.job.id": "x"}
    )
    config = composed.with_edits({"seed": 5}).build()
    assert (config.batch, config.seed, config.hydra.job.num, config.hydra.job.id) == (3, 5, 7, "x")
    assert list(config.hydra.overrides.task) == ["gpu=a40", "batch=3", "seed=1"]
