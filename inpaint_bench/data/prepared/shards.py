"""The stream of a WebDataset: tars read from front to back, shards and images in a seeded order.

What is promised: within an epoch of a worker each image of its shards comes once; the stream is the same for the
same seed, batch size and number of workers (0 counts as 1), and may start at any whole batch. With another number
of workers it is another stream, for a worker reads whole shards. Starting late reads and drops what came before,
without decoding it. Workers take batches in turns, so one whose shards are smaller comes to its next epoch sooner.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import webdataset
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from . import layout
from .source import Shard

if TYPE_CHECKING:
    from inpaint_bench.data.samples import Samples

BUFFER = 512  # encoded images that a worker shuffles among


def with_any_of(shards: Sequence[Shard], indices: npt.NDArray[np.int64]) -> list[Shard]:
    ordered = np.sort(indices)
    return [one for one in shards if np.searchsorted(ordered, one.first) < np.searchsorted(ordered, one.end)]


class ShardStream(IterableDataset[dict[str, Tensor]]):
    """Samples from draw `start` on, which must be the first of a batch; see the module."""

    def __init__(
        self,
        samples: Samples,
        shards: list[Shard],
        indices: npt.NDArray[np.int64],
        batch: int,
        workers: int,
        seed: int,
        start: int,
    ) -> None:
        if start % batch:
            raise ValueError(f"start={start} is not a multiple of the batch, {batch}")
        self.samples, self.shards, self.batch, self.seed = samples, shards, batch, seed
        self.workers = max(1, workers)
        self.first_batch = start // batch
        self._wanted = set(indices.tolist())

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        # The loader asks its workers in turns, from worker 0 on; ours take the turns of the stream from draw 0.
        turn = ((info.id if info else 0) + self.first_batch) % self.workers
        done = max(0, -(-(self.first_batch - turn) // self.workers))  # batches of this turn before the first
        for place, (index, jpeg) in enumerate(islice(self._images(turn), done * self.batch, None), done * self.batch):
            own, within = divmod(place, self.batch)
            draw = (own * self.workers + turn) * self.batch + within
            yield self.samples.sample(index, draw, layout.decode(jpeg))

    def _images(self, turn: int) -> Iterator[tuple[int, bytes]]:
        """(index, JPEG) of the shards of one turn, epoch after epoch."""
        epoch = 0
        while True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.shards))
            # A list is read as it stands: no braces are expanded, and workers share nothing among themselves.
            read = webdataset.WebDataset(
                [str(self.shards[at].path) for at in order[turn :: self.workers]],
                shardshuffle=False,
                nodesplitter=None,
                workersplitter=None,
                empty_check=False,
                seed=self.seed,
            )
            wanted = (
                (index, one["jpg"]) for one in read if (index := int(one["__key__"].rpartition("/")[2])) in self._wanted
            )
            mixed = webdataset.filters.shuffle(BUFFER, initial=BUFFER, rng=random.Random(f"{self.seed}/{epoch}/{turn}"))
            yield from mixed(wanted)
            epoch += 1
