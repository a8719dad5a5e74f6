"""Tiny configurations, photographs with positions, and stand-ins for what costs time."""

from __future__ import annotations

import copy
import math
import os
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pyarrow.parquet as pq
import torch
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from PIL import Image

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register, register_resolvers
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.records import DataFacts
from inpaint_bench.core.workloads import Facts
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.workloads import TrainingWorkload
from launchers.points.compose import parsed
from launchers.points.hydra_internals import apply_overrides

TINY = (
    "hydra/launcher=basic",
    "hydra/hydra_logging=default",
    "hydra/job_logging=default",
    "gpu=cpu",
    "site=local",
    "model=tiny_inpaint",
    "recipe=cpu",
    "telemetry=none",
    "batch=2",
    "data.num_images=6",
    "data.resolution_px=32",
    "workload.warmup_steps=1",
    "workload.measure_steps=3",
    "workload.min_measure_s=0",
)


def compose(*overrides: str) -> DictConfig:
    """A configuration as the command line gives it; small unless overridden.

    Configurations of the same files share what Hydra composes, as the points of a sweep do: a tenth of the time.
    """
    lines = split_choices([*TINY, *overrides])
    values = {line: override for line in lines if _is_value(override := parsed(line))}
    try:
        config = copy.deepcopy(_composed(conf_dir(), *(line for line in lines if line not in values)))
        apply_overrides([*values.values()], config)
    except (HydraException, OmegaConfBaseException):
        return _composed.__wrapped__(conf_dir(), *lines)  # raises the error of the whole
    register_resolvers()
    return config


def _is_value(override: Override) -> bool:
    """Return whether it sets a value, and chooses no file."""
    name = override.key_or_group
    is_choice = name.startswith("hydra") or (conf_dir() / name).is_dir()
    return override.type == OverrideType.CHANGE and override.package is None and not is_choice


@cache
def _composed(folder: Path, *lines: str) -> DictConfig:
    register()
    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        return hydra.compose("config", overrides=[*lines])


def last_given(*overrides: str) -> list[str]:
    """Overrides without those of a key that is given again: `launch` refuses a key that is given twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def bench(*overrides: str) -> BenchConfig:
    return parse_config(compose(*overrides))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run_dir / "steps").to_pylist()
    return rows


def photo(
    path: Path,
    *,
    position: tuple[float, float] | None = (55.698, 13.195),
    size: tuple[int, int] = (60, 40),
    orientation: int | None = None,
    references: bool = True,
    colour: tuple[int, int, int] | None = None,
) -> Path:
    """A picture of noise (or one colour), with its position in EXIF where it has one."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if colour:
        pixels[:] = colour
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x010F] = "test"  # Pillow writes no EXIF into a PNG whose main directory is empty
    if orientation:
        exif[0x0112] = orientation
    if position:
        latitude, longitude = position
        gps = exif.get_ifd(0x8825)
        gps[2], gps[4] = _sexagesimal(latitude), _sexagesimal(longitude)
        if references:
            gps[1] = "N" if latitude >= 0 else "S"
            gps[3] = "E" if longitude >= 0 else "W"
    image.save(path, exif=exif)
    return path


def _sexagesimal(degrees: float) -> tuple[float, float, float]:
    minutes, whole = math.modf(abs(degrees))
    seconds, full = math.modf(minutes * 60)
    return (whole, full, round(seconds * 60, 6))


def constant_batch(batch: int = 4, side: int = 32) -> dict[str, torch.Tensor]:
    """The same images at every call."""
    random = torch.Generator().manual_seed(0)
    image = torch.rand(batch, 3, side, side, generator=random) * 2 - 1
    mask = torch.zeros(batch, 1, side, side)
    mask[:, :, side // 4 : side // 2] = 1
    return {
        "image": image,
        "mask": mask,
        "masked_image": image * (mask < 0.5),
        "latitude": torch.linspace(55.0, 55.01, batch, dtype=torch.float64),
        "longitude": torch.linspace(13.0, 13.01, batch, dtype=torch.float64),
        "tokens": torch.zeros(batch, 77, dtype=torch.int64),
    }


class TiedNet(torch.nn.Module):
    """Convolutions in channels_last, a weight that two layers share, and dropout from the default generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, width, 3, padding=1)
        self.one = torch.nn.Linear(width, width)
        self.other = torch.nn.Linear(width, width)
        self.other.weight = self.one.weight
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.first(images)).mean((2, 3))
        features = self.norm(self.other(torch.relu(self.one(features))))
        result: torch.Tensor = self.last(torch.dropout(features, 0.2, self.training))
        return result


def endless(size: int, seed: int, draw: int) -> Iterator[int]:
    """Indices in a fresh order per epoch, from any draw on."""
    while True:
        order = np.random.default_rng((seed, draw // size)).permutation(size)
        for place in range(draw % size, size):
            yield int(order[place])
        draw += size - draw % size


class TinyTraining(TrainingWorkload):
    """A workload that draws from every generator there is and can be resumed to the bit.

    Environment: TINY_STEP_S how long a step lasts; TINY_SIGNAL=`step:number:phase` sends itself a signal.
    """

    data = DataFacts()

    def __init__(self, config: BenchConfig) -> None:
        torch.manual_seed(config.seed)
        random.seed(config.seed)
        np.random.seed(config.seed)
        self.seed, self.images_per_step = config.seed, config.batch_size
        self.net = TiedNet(width=8)
        self.average = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=finetune_keys(config).learning_rate)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.facts = Facts(precision="fp32")
        self.steps, self.draws = 0, 0
        self.stream = endless(7, self.seed, 0)
        at, signum, self.phase = os.environ.get("TINY_SIGNAL", "-1:0:").split(":")
        self.signal_at, self.signum = int(at), int(signum)

    def _maybe_signal(self, phase: str) -> None:
        if (self.steps, phase) == (self.signal_at, self.phase):
            os.kill(os.getpid(), self.signum)

    def next_batch(self) -> torch.Tensor:
        self._maybe_signal("data")
        indices = [next(self.stream) for _ in range(self.images_per_step)]
        self.draws += len(indices)
        pictures = [torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)) for index in indices]
        return torch.stack(pictures)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(float(os.environ.get("TINY_STEP_S", "0")))
        noise = torch.randn(batch.shape, generator=self.generator) * np.random.normal() * random.gauss(0, 1)
        target = batch.mean((1, 2, 3))[:, None] + 0.1 * torch.randn(len(batch), 1)
        loss = (self.net(batch + 0.1 * noise) - target).square().mean()
        loss.backward()
        self._maybe_signal("backward")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._maybe_signal("update")
        for name, value in self.net.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.1)
        self.steps += 1
        return loss.detach()

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        return tensors | {"generator": self.generator.get_state()}, {"steps": self.steps, "draws": self.draws}

    def restore(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        net = {name[4:]: value for name, value in tensors.items() if name.startswith("net.")}
        for name, value in self.net.state_dict().items():
            if net[name].shape != value.shape:
                raise UserError(f"{name} is {list(net[name].shape)} there and {list(value.shape)} here")
        self.net.load_state_dict(net)
        self.average = {name[8:]: value for name, value in tensors.items() if name.startswith("average.")}
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, field = name.split(".")
                state.setdefault(int(index), {})[field] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.generator.set_state(tensors["generator"])
        self.steps, self.draws = values["steps"], values["draws"]
        self.stream = endless(7, self.seed, self.draws)

    def validate(self) -> dict[str, float]:
        """Draws from a shared generator, which training must not notice."""
        self._maybe_signal("validation")
        torch.rand(1)
        self.net.eval()
        with torch.no_grad():
            figure = float(self.net(torch.ones(2, 3, 8, 8)).mean())
        self.net.train()
        return {"loss": figure, "diverged": math.nan}

    def finish(self, run_dir: Path) -> dict[str, Any]:
        (run_dir / "finished.txt").write_text(str(self.steps))
        return {"metrics": {"draws": {"value": self.draws, "n": 1}}}


def build(config: BenchConfig, device: torch.device) -> TinyTraining:
    """This module is a workload too: workload.module=tests.run.support."""
    assert device.type == "cpu"
    return TinyTraining(config)
