"""Labelled volumes from a seed: ellipsoids in one another, with a texture and noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.records import DataFacts
from inpaint_bench.core.workloads._volumes import VolumeShape

from .nifti import Sides, Volume

VERSION = 1  # part of the identity: increase it when other volumes come out
NOISE = 0.05
HELD_OUT = 1_000_000  # number of the first synthetic volume that is never trained on


class SyntheticVolumes:
    """As many volumes as a run needs, each a function of seed and number."""

    def __init__(self, config: DataConfig, train: int, held_out: int) -> None:
        self._seed, self._counts = config.seed, {False: train, True: held_out}
        identity = hashlib.sha256(f"volumes/{VERSION}/{config.seed}/{train}/{held_out}".encode()).hexdigest()
        count = train + held_out
        self.facts = DataFacts(
            kind="synthetic", found=count, used=count, identity=identity, train=train, validation=held_out
        )

    def read(self, shape: VolumeShape, sides: Sides, *, held_out: bool) -> Iterator[tuple[Volume, Volume]]:
        """Yield images [C, *sides] in -1..1 and one-hot labels [L, *sides] of each volume."""
        first, channels = HELD_OUT if held_out else 0, (shape.image_channels, shape.label_channels)
        numbers = range(first, first + self._counts[held_out])
        return (synthetic(self._seed, number, sides, *channels) for number in numbers)


def synthetic(seed: int, index: int, sides: Sides, images: int, labels: int) -> tuple[Volume, Volume]:
    """Draw volume `index`: images [images, D, H, W] in -1..1 and one-hot labels [labels, D, H, W].

    The first label is the largest ellipsoid, each further one lies inside the one before; outside there is none.
    """
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index))))
    axes = [np.linspace(-1, 1, side, dtype=np.float32) for side in sides]
    grid = np.meshgrid(*axes, indexing="ij", sparse=True)
    label = np.zeros(sides, np.int64)
    centre, radii = random.uniform(-0.05, 0.05, 3), random.uniform(0.7, 0.9, 3)
    for number in range(1, labels + 1):
        distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip(grid, centre, radii, strict=True))
        label[distance <= 1] = number
        # Inside the one before: the centre moves by less than the radius shrinks.
        shrink = random.uniform(0.45, 0.6)
        centre = centre + radii * (1 - shrink) * random.uniform(-0.4, 0.4, 3)
        radii = radii * shrink
    one_hot = np.stack([label == number for number in range(1, labels + 1)]).astype(np.float32)
    volumes = np.full((images, *sides), -1, np.float32)
    inside = label > 0
    for image in volumes:
        brightness = np.concatenate([[-1.0], random.uniform(-0.6, 0.8, labels)]).astype(np.float32)
        frequencies, phases = random.uniform(2, 6, 3), random.uniform(0, 2 * np.pi, 3)
        waves = [np.cos(f * axis + p) for axis, f, p in zip(grid, frequencies, phases, strict=True)]
        texture = 0.15 * waves[0] * waves[1] * waves[2]
        noise = NOISE * random.standard_normal(sides, dtype=np.float32)
        image[inside] = (brightness[label] + texture + noise)[inside]
    return volumes.clip(-1, 1), one_hot
