"""An endless stream of batches, the same for the same seed. The content of a batch is described in samples.py.

A stream that starts at a later draw is, to the bit, the rest of the stream from draw 0. The number of worker processes
does not change it, except with WebDataset, which has a stream of its own that starts at whole batches (ShardStream).
"""

import logging
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.signals import obey_parent

from .prepared import decode_jpeg
from .prepared_source import PreparedSource
from .samples import Batch, Samples
from .source import Indices

KILLED_S = 0.5  # from the end of a process's connections to that of the process

log = logging.getLogger(__name__)


class EndlessShuffle(Sampler[tuple[int, int]]):
    """(index, draw) from draw `start` on: epoch after epoch of `indices`, each in another seeded order.

    A batch may span two epochs, so every batch is full, even if there are fewer images than a batch holds. Each of
    `ranks` takes `batch` draws in turn: together they take those of one rank.
    """

    def __init__(
        self, indices: Indices, seed: int, start: int = 0, *, rank: int = 0, ranks: int = 1, batch: int = 1
    ) -> None:
        self.indices, self.seed, self.start = indices, seed, start
        self.rank, self.ranks, self.batch = rank, ranks, batch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        draw = self.start
        while True:
            # Only the first epoch may begin in the middle (after a resume); from then on `done` is 0.
            epoch, done = divmod(draw, len(self.indices))
            order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
            for index in order[done:]:
                if (draw - self.start) // self.batch % self.ranks == self.rank:
                    yield int(index), draw
                draw += 1


class Batches(Iterator[Batch]):
    """Iterator over batches; `settings` holds the requested and the effective value of each loader setting.

    `indices` are the images to draw from. `start` is the first draw: batches taken so far, by all ranks, times their
    size.
    """

    def __init__(
        self,
        samples: Samples,
        batch: int,
        recipe: RecipeConfig,
        seed: int,
        *,
        start: int,
        indices: Indices,
        rank: int,
        ranks: int,
    ) -> None:
        if not len(indices):
            raise UserError("no image is left for training; see data.validation_share and data.block_m")
        source = samples.source
        prepared = source if isinstance(source, PreparedSource) else None
        # What images are read from; None: no image is read.
        image_format = (prepared.format if prepared else source.inventory.kind) if samples.pixels else None
        workers = _limit_workers(recipe.num_workers, len(os.sched_getaffinity(0)), "this job has", "CPU core")
        dataset: Any = samples
        sampler = None
        if prepared and image_format == "webdataset":
            # Tars have no random access: the stream shuffles shards and a buffer of images itself, without a sampler.
            shards = prepared.shards(indices)
            # A worker reads whole shards; one without any would search for its first image for ever.
            workers = _limit_workers(workers, len(shards), "images are drawn from", "shard")
            dataset = ShardStream(samples, shards, indices, batch, workers, seed, start)
        else:
            sampler = EndlessShuffle(indices, seed, start, rank=rank, ranks=ranks, batch=batch)
        # Pinning needs a GPU; without one PyTorch warns and does nothing.
        pin_memory = recipe.pin_memory and recipe.device == "cuda"
        # Without pinned memory a copy is synchronous even with non_blocking.
        non_blocking = recipe.non_blocking and pin_memory
        effective = {
            "num_workers": workers,
            "prefetch_factor": recipe.prefetch_factor if workers else None,
            "pin_memory": pin_memory,
            "non_blocking": non_blocking,
            "format": image_format,
            "stage_to": "none",
        }
        self.settings: dict[str, dict[str, Any]] = {
            name: {"requested": getattr(recipe, name), "effective": value} for name, value in effective.items()
        }
        if prepared:
            self.settings["stage_to"] |= prepared.staging
        self._loader: DataLoader[Batch] | None = DataLoader(
            dataset,
            batch_size=batch,
            sampler=sampler,
            drop_last=True,
            num_workers=workers,
            prefetch_factor=recipe.prefetch_factor if workers else None,
            multiprocessing_context=start_method(workers),
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_init_worker,
            # Not the default generator: making the loader again after a resume must not advance that.
            generator=torch.Generator().manual_seed(seed),
        )
        self._iterator: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        if self._iterator is None:
            if self._loader is None:
                raise StopIteration
            self._iterator = iter(self._loader)  # starts the worker processes
        try:
            return next(self._iterator)
        except (OSError, EOFError, RuntimeError) as error:
            # Perhaps a worker was killed, which PyTorch does not always say, nor by which signal.
            time.sleep(KILLED_S)
            for worker in getattr(self._iterator, "_workers", ()):
                if (code := worker.exitcode or 0) < 0:
                    text = f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-code)}"
                    if -code == signal.SIGBUS:  # PyTorch gives the same hint where it sees the signal first
                        text += ". It is possible that dataloader's workers are out of shared memory"
                    raise RuntimeError(text) from error
            raise

    def close(self) -> None:
        """End the worker processes and the stream. The source stays open."""
        self._iterator = self._loader = None


def start_method(workers: int) -> str | None:
    """Return how a loader starts its processes: by fork, which is no longer the default of Python 3.14.

    Else each imports torch again, for seconds, and ignores the SIGTERM of this process, which is not its parent. A fork
    after CUDA has started is safe, since these processes use no CUDA.
    """
    return "fork" if workers else None


def _limit_workers(requested: int, limit: int, reason: str, noun: str) -> int:
    if requested > limit:
        cause = f"{reason} {pluralize(limit, noun)}"
        log.warning("recipe.num_workers=%d, but %s: the loader uses %d", requested, cause, limit)
    return min(requested, limit)


def _init_worker(_: int) -> None:
    """Use one thread, and leave signals to the parent: if a worker dies, PyTorch raises in the parent."""
    torch.set_num_threads(1)
    obey_parent()


SHUFFLE_BUFFER = 512  # encoded images per worker


class ShardStream(IterableDataset[dict[str, Tensor]]):
    """Samples of `indices` from draw `start` on, the first of a batch, from tars that are read from front to back.

    Shards and images are in a seeded order: within an epoch of a worker each image of its shards comes once. The stream
    is the same for the same seed, batch size and number of workers (0 counts as 1), and may start at any whole batch;
    starting late reads and drops what came before, without decoding it. Another number of workers gives another stream,
    because a worker reads whole shards. Workers take batches in turns, so a worker with smaller shards comes to its
    next epoch sooner.
    """

    def __init__(
        self,
        samples: Samples,
        shards: list[Path],
        indices: npt.NDArray[np.int64],
        batch: int,
        workers: int,
        seed: int,
        start: int,
    ) -> None:
        self.samples, self.shards, self.batch, self.seed = samples, shards, batch, seed
        self.workers = max(1, workers)
        self.first_batch = start // batch
        self._indices = set(indices.tolist())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        # The loader asks worker 0 first, but the stream continues: batch b always belongs to slot b % workers.
        slot = ((info.id if info else 0) + self.first_batch) % self.workers
        batches_done = max(0, -(-(self.first_batch - slot) // self.workers))  # batches of this slot, rounded up
        skip = batches_done * self.batch
        for position, (index, jpeg) in enumerate(islice(self._images(slot), skip, None), skip):
            batch_of_slot, within_batch = divmod(position, self.batch)
            # Batches come from the slots in turn: number b of a slot is b * workers + slot of the whole stream.
            draw = (batch_of_slot * self.workers + slot) * self.batch + within_batch
            yield self.samples.sample(index, draw, decode_jpeg(jpeg))

    def _images(self, slot: int) -> Iterator[tuple[int, bytes]]:
        """Yield (index, JPEG) of the shards of one slot, epoch after epoch."""
        import webdataset
        from webdataset.tariterators import group_by_keys, tar_file_expander

        epoch = 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.shards))
            members = group_by_keys(tar_file_expander(_open(self.shards[n] for n in order[slot :: self.workers])))
            images = ((int(member["__key__"].rpartition("/")[2]), member["jpg"]) for member in members)
            # Held-out images lie in the same shards; they are dropped before they are decoded.
            selected = (image for image in images if image[0] in self._indices)
            # Seeded by epoch and slot, so that a resumed run draws the same order.
            rng = random.Random(f"{self.seed}/{epoch}/{slot}")
            yield from webdataset.filters.shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER, rng=rng)(selected)
            epoch += 1


def _open(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield tars as WebDataset reads them. It would take a path for an address, which ends at `?` or `#`."""
    for path in paths:
        with path.open("rb") as stream:
            yield {"url": str(path), "stream": stream}
