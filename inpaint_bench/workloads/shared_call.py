"""A call that several ranks make together, each a part of it: rank 0 says when, and the slowest decides how long.

What they tell each other are numbers on the host, with gloo. With one rank a call is the work itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from inpaint_bench.models.parallel.data_parallel import Command, announce, next_command
from inpaint_bench.profiling.profile import synchronize

from . import MIB, used_mib
from .batch_search import is_cuda_oom

T = TypeVar("T")


class SharedCalls:
    """The calls of one measurement, on each of its ranks."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.times_ms: list[float] = []  # times of the last call, by rank; empty with one

    def together(self, part: Callable[[], T]) -> T:
        """Do this rank's part, and wait for all. Raises on every rank if the memory of one does not suffice."""
        if self.ranks == 1:
            return part()
        start_ns, failure = time.monotonic_ns(), None
        try:
            result = part()
            synchronize(self.device)
        except RuntimeError as error:
            if not is_cuda_oom(error):
                raise
            failure = error
        self.times_ms = self.gather(None if failure else (time.monotonic_ns() - start_ns) / 1e6)[:, 0].tolist()
        if failure:
            raise failure
        if failed := [str(rank) for rank, ms in enumerate(self.times_ms) if math.isnan(ms)]:
            raise torch.OutOfMemoryError(f"CUDA out of memory on rank {', '.join(failed)}")
        return result

    def lead(self, part: Callable[[], object]) -> None:
        """Make a call, on rank 0. The others are told within it, so that none of them begins before."""
        if self.ranks > 1:
            announce(Command.STEP)
        self.together(part)

    def next(self) -> None:
        """Tell the others, on rank 0, that these calls were the last of their case."""
        if self.ranks > 1:
            announce(Command.NEXT)

    def follow(self, part: Callable[[], object]) -> None:
        """Make the calls of a case on another rank, as often as rank 0 says."""
        cuda = self.device.type == "cuda"
        peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
        while next_command()[0] is Command.STEP:
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            self.together(part)
            self.gather(*(peak(self.device) / MIB if cuda else None for peak in peaks), used_mib(self.device))

    def gather(self, *values: float | None) -> Tensor:
        """Return the values of every rank, a row each, NaN for None. Waits for the last one."""
        table = torch.zeros(self.ranks, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor([math.nan if value is None else value for value in values])
        dist.all_reduce(table)  # a sum: every row is zero but on its own rank
        return table
