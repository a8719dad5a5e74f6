"""Tiny configurations, photographs with positions, and stand-ins for what costs time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig
from PIL import Image

from inpaint_bench.config import BenchConfig, typed
from inpaint_bench.paths import conf_dir
from inpaint_bench.schema import register

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
    """A configuration as the command line gives it; small unless overridden."""
    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose("config", overrides=[*TINY, *overrides])


def bench(*overrides: str) -> BenchConfig:
    return typed(compose(*overrides))


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
