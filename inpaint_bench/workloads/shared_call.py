"""A call that several ranks make together, each a part of it: rank 0 says when, and the slowest decides how long.

What they tell each other are numbers on the host, with gloo. With one rank a call is the work itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist

from inpaint_bench.models.parallel.data_parallel import Command, announce, next_command
from inpaint_bench.profiling.profile import synchronize

from .batch_search import is_cuda_oom

MIB = 2**20
T = TypeVar("T")


class SharedCalls:
    """The calls of one measurement, on each of its ranks."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self.times_ms: list[float] = []  # of the last call, by rank; empty with one

    def together(self, part: Callable[[], T]) -> T:
        """Do this rank's part, and wait for all. Raises on every rank where the memory of one does not suffice."""
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
        own_ms = math.nan if failure else (time.monotonic_ns() - start_ns) / 1e6
        self.times_ms = [ms for (ms,) in self.gather(own_ms)]
        if failure:
            raise failure
        if failed := [str(rank) for rank, ms in enumerate(self.times_ms) if math.isnan(ms)]:
            raise torch.OutOfMemoryError(f"CUDA out of memory on rank {', '.join(failed)}")
        return result

    def led(self, part: Callable[[], object]) -> Callable[[], None]:
        """Return a call on rank 0. Within it the others are told, so that none of them begins before."""

        def call() -> None:
            if self.ranks > 1:
                announce(Command.STEP)
            self.together(part)

        return call

    def next(self) -> None:
        """Tell the others, on rank 0, that these calls were the last of their case."""
        if self.ranks > 1:
            announce(Command.NEXT)

    def follow(self, part: Callable[[], object]) -> None:
        """Make the calls of a case on another rank, as often as rank 0 says."""
        while next_command()[0] is Command.STEP:
            cuda = self.device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            self.together(part)
            peaks: list[float | None] = [None] * 3
            if cuda:
                peaks[0] = torch.cuda.max_memory_allocated(self.device) / MIB
                peaks[1] = torch.cuda.max_memory_reserved(self.device) / MIB
                with suppress(Exception):  # NVML has errors of its own
                    peaks[2] = torch.cuda.device_memory_used(self.device) / MIB
            self.gather(*peaks)

    def gather(self, *values: float | None) -> list[list[float]]:
        """Return the values of every rank, NaN for None. Waits for the last one."""
        table = torch.zeros(self.ranks, len(values), dtype=torch.float64)
        table[self.rank] = torch.tensor([math.nan if value is None else value for value in values])
        if self.ranks > 1:
            dist.all_reduce(table)  # a sum: every row is zero but on its own rank
        rows: list[list[float]] = table.tolist()
        return rows
