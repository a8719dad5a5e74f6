"""Batches without end, the same for the same seed whatever the number of worker processes.

A batch, `B` images of `R` x `R` pixels:

| key | shape | type | meaning |
|---|---|---|---|
| image | B,3,R,R | float32 | -1..1 |
| mask | B,1,R,R | float32 | 1 = repaint |
| masked_image | B,3,R,R | float32 | image, 0 under the mask |
| latitude, longitude | B | float64 | degrees (float32 is off by up to 0.8 m) |
| tokens | B,L | int64 | text |
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..config import RecipeConfig
from .masks import make_mask
from .source import Source

Batch = dict[str, Tensor]

log = logging.getLogger(__name__)


class EndlessShuffle(Sampler[tuple[int, int]]):
    """(index, draw): epoch after epoch in a fresh seeded order; `draw` counts samples since the start.

    One stream, so a batch may span two epochs: every batch is full, also where the data is smaller than it.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __iter__(self) -> Iterator[tuple[int, int]]:
        draw, epoch = 0, 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.size)
            for index in order:
                yield int(index), draw
                draw += 1
            epoch += 1


class Samples(Dataset[Batch]):
    """One sample by (index, draw). Its mask depends on seed, index and draw: another one in each epoch."""

    def __init__(self, source: Source, tokenize: Callable[[list[str]], Tensor], seed: int) -> None:
        self.source, self.seed = source, seed
        distinct = sorted(set(source.texts))
        place = {text: number for number, text in enumerate(distinct)}
        self._tokens = tokenize(distinct)  # here, once: workers need no tokenizer
        self._text = [place[text] for text in source.texts]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, draw = key
        pixels = np.array(self.source.pixels(index))  # an own, writable copy
        image = torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0)
        mask = torch.from_numpy(make_mask(image.shape[-1], (self.seed, index, draw)))[None].float()
        latitude, longitude = self.source.positions[index]
        return {
            "image": image.contiguous(),
            "mask": mask,
            "masked_image": image * (mask < 0.5),
            "latitude": torch.tensor(latitude, dtype=torch.float64),
            "longitude": torch.tensor(longitude, dtype=torch.float64),
            "tokens": self._tokens[self._text[index]],
        }


class Batches:
    """Iterator over batches; `settings` says what was asked for and what is in effect."""

    def __init__(self, samples: Samples, batch: int, recipe: RecipeConfig, seed: int) -> None:
        cores = len(os.sched_getaffinity(0))
        workers = min(recipe.num_workers, cores)
        if workers < recipe.num_workers:
            log.warning(
                "recipe.num_workers=%d, but this job has %d CPU cores: the loader uses %d",
                recipe.num_workers,
                cores,
                workers,
            )
        # Pinning needs a GPU; without one PyTorch warns and does nothing.
        pinned = recipe.pin_memory and recipe.device == "cuda"
        self.settings: dict[str, Any] = {
            "num_workers": {"requested": recipe.num_workers, "effective": workers},
            "prefetch_factor": {
                "requested": recipe.prefetch_factor,
                "effective": recipe.prefetch_factor if workers else None,
            },
            "pin_memory": {"requested": recipe.pin_memory, "effective": pinned},
            # Without pinned memory a copy is synchronous whatever it is asked to be.
            "non_blocking": {
                "requested": recipe.non_blocking,
                "effective": recipe.non_blocking and pinned,
            },
        }
        self._loader: DataLoader[Batch] | None = DataLoader(
            samples,
            batch_size=batch,
            sampler=EndlessShuffle(len(samples), seed),
            drop_last=True,
            num_workers=workers,
            prefetch_factor=recipe.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pinned,
            worker_init_fn=_quiet_worker,
        )
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            if self._loader is None:
                raise StopIteration
            self._iterator = iter(self._loader)
        return next(self._iterator)

    def close(self) -> None:
        """End the worker processes; afterwards there are no more batches."""
        self._iterator = self._loader = None


def _quiet_worker(_: int) -> None:
    """One thread each, and signals are the parent's business.

    Slurm and a terminal signal every process of a job. A worker that dies of it makes PyTorch raise in the
    parent, which is just closing its files. Workers end when they are told to, or when the parent is gone.
    """
    torch.set_num_threads(1)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
