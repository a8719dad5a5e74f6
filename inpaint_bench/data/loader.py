"""Batches without end, the same for the same seed whatever the number of worker processes.

What a batch holds: samples.py. A stream may start at any draw: it is then, to the bit, the rest of the stream from
draw 0. (WebDataset's stream is another one; what it promises: shards.py.) Where DALI decodes, the pixels lie on the
device already; everything else is as ever: dali.py.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from inpaint_bench.core.config import RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.prepared.source import PreparedSource

from .samples import Batch, Samples

if TYPE_CHECKING:
    from inpaint_bench.data.prepared.dali import DaliBatches

Indices = npt.NDArray[np.int64]

log = logging.getLogger(__name__)


class EndlessShuffle(Sampler[tuple[int, int]]):
    """(index, draw) from draw `start` on: epoch after epoch of `indices`, each in a fresh seeded order.

    One stream, so a batch may span two epochs: every batch is full, also where the data is smaller than it.
    """

    def __init__(self, indices: Indices, seed: int, start: int = 0) -> None:
        self.indices, self.seed, self.start = indices, seed, start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        draw = self.start
        while True:
            epoch, done = divmod(draw, len(self.indices))
            order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
            for index in order[done:]:
                yield int(index), draw
                draw += 1


class Batches:
    """Iterator over batches; `settings` says what was asked for and what is in effect.

    `indices` are the images to draw from (all where None). `start` is the first draw: batches taken so far times
    their size.
    """

    def __init__(
        self,
        samples: Samples,
        batch: int,
        recipe: RecipeConfig,
        seed: int,
        *,
        start: int = 0,
        indices: Indices | None = None,
    ) -> None:
        if indices is None:
            indices = np.arange(len(samples))
        if not len(indices):
            raise UserError("no image is left to draw from; see data.validation_share and data.block_m")
        workers = _workers(recipe.num_workers, len(os.sched_getaffinity(0)), "this job has {} CPU cores")
        dataset: Any = samples
        sampler: EndlessShuffle | None = EndlessShuffle(indices, seed, start)
        source = samples.source
        if isinstance(source, PreparedSource) and source.format == "webdataset" and samples.pixels:
            from inpaint_bench.data.prepared.shards import ShardStream, with_any_of

            shards = with_any_of(source.shards(), indices)
            workers = _workers(workers, len(shards), "the data has {} shards with images to draw")
            dataset = ShardStream(samples, shards, indices, batch, workers, seed, start)
            sampler = None
        # Pinning needs a GPU; without one PyTorch warns and does nothing.
        pinned = recipe.pin_memory and recipe.device == "cuda"
        collate = None
        self._decode: Callable[[Iterator[Batch]], DaliBatches] | None = None
        if recipe.decode == "dali" and samples.pixels:
            from .prepared import dali

            if not isinstance(source, PreparedSource) or source.format != "files":
                raise UserError("recipe.decode=dali needs data=prepared and recipe.format=files")
            dataset, collate = dali.Encoded(samples, source), dali.collate
            self._decode = partial(
                dali.DaliBatches,
                source=source,
                batch=batch,
                device=torch.device(recipe.device),
                non_blocking=recipe.non_blocking and pinned,
            )
        self.settings: dict[str, Any] = {
            "num_workers": _setting(recipe.num_workers, workers),
            "prefetch_factor": _setting(recipe.prefetch_factor, recipe.prefetch_factor if workers else None),
            "pin_memory": _setting(recipe.pin_memory, pinned),
            # Without pinned memory a copy is synchronous whatever it is asked to be.
            "non_blocking": _setting(recipe.non_blocking, recipe.non_blocking and pinned),
            "format": _setting(recipe.format, _format_in_effect(samples)),
            "stage_to": _setting(recipe.stage_to, "none"),
            "decode": _setting(recipe.decode, _decoder_in_effect(samples, self._decode is not None)),
        }
        if isinstance(source, PreparedSource):
            self.settings["stage_to"] = _setting(recipe.stage_to, source.stage_in_effect) | source.staging
        self._loader: DataLoader[Batch] | None = DataLoader(
            dataset,
            batch_size=batch,
            sampler=sampler,
            drop_last=True,
            num_workers=workers,
            prefetch_factor=recipe.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pinned,
            collate_fn=collate,
            worker_init_fn=_quiet_worker,
            # Its own: a loader that is made again, after a resume, must not move the default generator.
            generator=torch.Generator().manual_seed(seed),
        )
        self._iterator: Iterator[Batch] | None = None
        self.decoder: DaliBatches | None = None  # from the first batch on, where DALI decodes

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            if self._loader is None:
                raise StopIteration
            self._iterator = iter(self._loader)
            if self._decode:
                self._iterator = self.decoder = self._decode(self._iterator)
        return next(self._iterator)

    def close(self) -> None:
        """End the worker processes; afterwards there are no more batches. The source stays open."""
        self._iterator = self._loader = self.decoder = None


def _setting(requested: Any, effective: Any) -> dict[str, Any]:
    return {"requested": requested, "effective": effective}


def _workers(requested: int, most: int, because: str) -> int:
    if requested > most:
        reason = because.format(most)
        log.warning("recipe.num_workers=%d, but %s: the loader uses %d", requested, reason, most)
    return min(requested, most)


def _format_in_effect(samples: Samples) -> str | None:
    """None where no image is read."""
    if not samples.pixels:
        return None
    source = samples.source
    return source.format if isinstance(source, PreparedSource) else source.account.kind


def _decoder_in_effect(samples: Samples, dali: bool) -> str | None:
    """None where no file is decoded."""
    format = _format_in_effect(samples)
    if format is None or format in ("synthetic", "memmap", "hdf5"):
        return None
    return "dali" if dali else "pillow"


def _quiet_worker(_: int) -> None:
    """One thread each, and signals are the parent's business.

    Slurm and a terminal signal every process of a job. A worker that dies of it makes PyTorch raise in the
    parent, which is just closing its files. Workers end when they are told to, or when the parent is gone.
    """
    torch.set_num_threads(1)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
