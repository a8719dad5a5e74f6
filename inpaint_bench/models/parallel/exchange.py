"""Gradients of several ranks, averaged while the backward pass goes on, a group of parameters at a time.

DistributedDataParallel copies gradients into buckets, divides them and copies them back, or keeps them there.

`InPlace` lets NCCL average the gradients themselves, several in one launch. Its kernels take multiprocessors from the
backward pass: a convolution that fills the GPU waits for those that are taken, so that the step grows by about as much
as the exchange takes, although hardly any of it is exposed.

`PeerCopies` takes none: copy engines write each gradient into the memory of the other GPUs of the host, and every GPU
averages all of them after the backward pass, in the order of the ranks, so that all have the same result.
"""

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inpaint_bench.kernels.chunks import Chunks
from inpaint_bench.kernels.dispatch import cdiv
from inpaint_bench.kernels.mean import CHUNK, mean_over_ranks


class GradientExchange(ABC):
    """Sends a group of gradients as soon as the backward pass has made the last one of it."""

    group_bytes: int  # gradients that are sent together

    def __init__(self, network: nn.Module) -> None:
        self.sends = True  # off for micro-batches whose gradients are only accumulated
        self.groups = 0  # sent in the last backward pass
        self._pending: list[nn.Parameter] = []
        for parameter in network.parameters():
            with torch.no_grad():
                dist.broadcast(parameter, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._made)

    def _made(self, parameter: nn.Parameter) -> None:
        if self.sends:
            self._pending.append(parameter)
            if sum(parameter.nbytes for parameter in self._pending) >= self.group_bytes:
                self._send()

    @abstractmethod
    def _send(self) -> None:
        """Send the gradients that are pending, without waiting for them."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left, and replace every gradient by the average of all ranks, on the current stream."""


class InPlace(GradientExchange):
    """Averages the gradients where they lie: NCCL on GPUs, gloo on CPUs."""

    group_bytes = 32 * 2**20

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._sent: list[tuple[list[Tensor], list[Any]]] = []

    def _send(self) -> None:
        group, self._pending = [_flat(parameter) for parameter in self._pending], []
        if group[0].is_cuda:
            with dist._coalescing_manager(device=group[0].device, async_ops=True) as work:
                for gradient in group:
                    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            self._sent.append((group, [work]))
        else:  # gloo sends one at a time
            self._sent.append((group, [dist.all_reduce(gradient, async_op=True) for gradient in group]))

    def finish(self) -> None:
        if self._pending:
            self._send()
        for group, works in self._sent:
            for work in works:
                work.wait()
            if not group[0].is_cuda:  # gloo knows no averages
                torch._foreach_div_(group, dist.get_world_size())
        self.groups, self._sent = len(self._sent), []


class PeerCopies(GradientExchange):
    """Copies groups of gradients into the memory of the other GPUs. On CPUs gloo gathers them at the end."""

    group_bytes = 8 * 2**20

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._copying = False  # in this step
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._arrivals = {
            dtype: Arrivals([parameter for parameter in trained if parameter.dtype == dtype])
            for dtype in dict.fromkeys(parameter.dtype for parameter in trained)
        }
        self._stream = torch.cuda.Stream() if trained[0].is_cuda else None

    def _send(self) -> None:
        # Cloned on the stream of their memory: what a clone replaces, that stream may take again at once.
        group, self._pending = [(parameter, _flat(parameter)) for parameter in self._pending], []
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None on CPUs, which changes nothing
            if not self._copying:  # all ranks have averaged what arrived in the step before
                self._meet(BEFORE)
            for parameter, gradient in group:
                self._arrivals[parameter.dtype].copy(parameter, gradient)
        self.groups = self.groups + 1 if self._copying else 1
        self._copying = True

    def finish(self) -> None:
        if self._pending:
            self._send()
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._meet(AFTER)
        for arrivals in self._arrivals.values():
            arrivals.average()
        self._copying = False

    def _meet(self, channel: int) -> None:
        """Let the current stream wait until those of all ranks are here."""
        if self._stream:
            next(iter(self._arrivals.values())).memory.barrier(channel, timeout_ms=MEETING_MS)


BEFORE, AFTER = 0, 1  # channels of the two meetings in a step
MEETING_MS = 600_000
ALIGN = 16  # parameters begin at multiples of 32 bytes or more, so that kernels read 16 at once


class Arrivals:
    """Where the gradients of all ranks arrive, those of a type."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        offsets = [0, *accumulate(cdiv(size, ALIGN) * ALIGN for size in sizes)]
        self._parameters, self._offsets = parameters, dict(zip(parameters, offsets, strict=False))
        like, self._rank, shape = parameters[0], dist.get_rank(), (dist.get_world_size(), offsets[-1])
        self._chunks = Chunks(sizes, offsets[:-1], CHUNK, like.device)
        self.memory: Any = None
        if like.is_cuda:
            from torch.distributed import _symmetric_memory as symmetric

            self._rows = symmetric.empty(shape, dtype=like.dtype, device=like.device)
            self.memory = symmetric.rendezvous(self._rows, dist.group.WORLD)  # type: ignore[arg-type]
            others = [rank for rank in range(shape[0]) if rank != self._rank]
            # Where this rank's gradients lie in the memory of each.
            self._own = [self.memory.get_buffer(rank, shape, like.dtype)[self._rank] for rank in others]
        else:
            self._rows = torch.zeros(shape, dtype=like.dtype)
            self._own = [self._rows[self._rank]]

    def copy(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Copy a gradient to the other ranks, on the current stream."""
        start = self._offsets[parameter]
        for row in self._own:
            row[start : start + len(gradient)].copy_(gradient)

    def average(self) -> None:
        """Replace this rank's gradients by the average, on the current stream."""
        if self.memory is None:
            dist.all_gather(list(self._rows), self._own[0].clone())
        mean_over_ranks([_flat(parameter) for parameter in self._parameters], self._rows, self._rank, self._chunks)


def _flat(parameter: nn.Parameter) -> Tensor:
    """Return the memory of a gradient, which is dense in any layout, as a vector."""
    gradient = parameter.grad
    assert gradient is not None, "a trained parameter took no part in the loss, so that it has no gradient"
    if gradient.data_ptr() % 16:  # a slice of another tensor: kernels read 16 bytes at once
        gradient = parameter.grad = gradient.clone()
    return torch.as_strided(gradient, (parameter.numel(),), (1,), gradient.storage_offset())


KINDS: dict[str, type[GradientExchange]] = {"in_place": InPlace, "peer_copies": PeerCopies}
