"""Averages gradients over the ranks where they lie, a group of parameters at a time, while the backward pass goes on.

DistributedDataParallel copies gradients into buckets, divides them and copies them back, or keeps them there. Here NCCL
averages the gradients themselves, several in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GROUP_BYTES = 32 * 2**20  # gradients that are sent together


class GradientExchange:
    """Begins to average a group of gradients as soon as the backward pass has made the last one of it."""

    def __init__(self, network: nn.Module) -> None:
        self.sends = True  # off for micro-batches whose gradients are only accumulated
        self.groups = 0  # sent in the last backward pass
        self._pending: list[Tensor] = []
        self._sent: list[tuple[list[Tensor], list[Any]]] = []
        for parameter in network.parameters():
            with torch.no_grad():
                dist.broadcast(parameter, 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._made)

    def _made(self, parameter: Tensor) -> None:
        if self.sends:
            assert parameter.grad is not None
            flat = torch.as_strided(parameter.grad, (parameter.numel(),), (1,))  # autograd's are dense, in any layout
            self._pending.append(flat)
            if sum(gradient.nbytes for gradient in self._pending) >= GROUP_BYTES:
                self._send()

    def _send(self) -> None:
        group, self._pending = self._pending, []
        if group[0].is_cuda:
            with dist._coalescing_manager(device=group[0].device, async_ops=True) as work:
                for gradient in group:
                    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            self._sent.append((group, [work]))
        else:  # gloo sends one at a time
            self._sent.append((group, [dist.all_reduce(gradient, async_op=True) for gradient in group]))

    def finish(self) -> None:
        """Send what is left, and let the current stream wait for all averages."""
        if self._pending:
            self._send()
        for group, works in self._sent:
            for work in works:
                work.wait()
            if not group[0].is_cuda:  # gloo knows no averages
                torch._foreach_div_(group, dist.get_world_size())
        self.groups, self._sent = len(self._sent), []


def sum_over_ranks(tensors: list[Tensor], *, divisor: int = 1) -> None:
    """Replace tensors by their sums over the ranks, divided, in fp32 or wider, all in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= divisor
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
