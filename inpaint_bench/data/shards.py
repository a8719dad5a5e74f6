"""The sample stream of a WebDataset: tars read from front to back, shards and images in a seeded order.

Within an epoch of a worker each image of its shards comes once. The stream is the same for the same seed, batch size
and number of workers (0 counts as 1), and may start at any whole batch; starting late reads and drops what came before,
without decoding it. Another number of workers gives another stream, because a worker reads whole shards. Workers take
batches in turns, so a worker with smaller shards comes to its next epoch sooner.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import webdataset
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.tariterators import group_by_keys, tar_file_expander

from inpaint_bench.data import prepared
from inpaint_bench.data.samples import Samples

SHUFFLE_BUFFER = 512  # encoded images per worker


class ShardStream(IterableDataset[dict[str, Tensor]]):
    """Samples of `indices` from draw `start` on, which must be the first of a batch; see the module."""

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
            yield self.samples.sample(index, draw, prepared.decode_jpeg(jpeg))

    def _images(self, slot: int) -> Iterator[tuple[int, bytes]]:
        """Yield (index, JPEG) of the shards of one slot, epoch after epoch."""
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
