"""Pipeline parallelism of a transformer: each rank keeps consecutive blocks, and hands their output to the next one.

Every rank has its own rows of the batch, as with data parallelism. A pass gathers the rows of all ranks and takes them
through the ranks in micro-batches, first all of them forward, then all backward (GPipe, arXiv 1811.06965): a rank works
on one while the next works on the one before. What is outside of the blocks every rank keeps and computes itself.

The parameters of other ranks stay in the network, on the device `meta`: they have shapes and numbers, but no memory.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from inpaint_bench.core.errors import UnavailableError

from .exchange import sum_over_ranks


class Pipeline(nn.Module):
    """The network of all ranks, called with the rows of this one. One backward pass follows each forward pass."""

    def __init__(self, network: nn.Module, micro_batch_size: int) -> None:
        """Keep this rank's blocks of the network; `micro_batch_size` rows of each rank travel together.

        Raises UnavailableError if there are too few blocks.
        """
        super().__init__()
        self.network, self.micro_batch_size = network, micro_batch_size
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.passes = 0  # passes of the network, in the last forward pass
        self._received: list[Tensor] = []  # hidden states of image and text, from the rank before
        self._outputs: list[Tensor] = []  # those for the next rank
        self._graphs: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []  # text states, received, outputs
        blocks: list[nn.Module] = list(network.blocks)  # type: ignore[arg-type]
        of_blocks = owners(blocks, self.ranks)
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        self._shared = [p for p in network.parameters() if id(p) not in in_blocks]
        for number, (block, owner) in enumerate(zip(blocks, of_blocks, strict=True)):
            if owner != self.rank:
                block.to("meta")
                block._compiled_call_impl = None
                receives = owner < self.rank == of_blocks[number + 1]
                sends = owner > self.rank == of_blocks[number - 1]
                block.forward = partial(self._instead, receives, sends)
        with torch.no_grad():
            for parameter in self._shared:
                dist.broadcast(parameter, 0)

    def forward(self, sample: Tensor, timesteps: Tensor, states: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        """Return what the network predicts for these rows, shaped like it. All ranks call this together."""
        assert not return_dict
        wanted = states.requires_grad
        # The parameters are no inputs of the function: without one that needs a gradient there is no backward pass.
        return (_Pass.apply(self, wanted, sample, timesteps, states if wanted else states.detach().requires_grad_()),)

    def _instead(
        self, receives: bool, sends: bool, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> Any:
        """Take the place of a block of another rank. Returns states of text and image, as the blocks do."""
        states = [hidden_states, encoder_hidden_states]
        if receives:
            states = self._received = [_receive(state, self.rank - 1).requires_grad_() for state in states]
        elif sends:
            self._outputs = states
        return states[1], states[0]

    def run_forward(self, *inputs: Tensor) -> Tensor:
        """Take the rows of all ranks through this rank's blocks. Return the predictions of its own rows."""
        gathered = [_gather(value) for value in inputs]
        self._graphs, works, predictions = [], [], []
        for start in range(0, len(inputs[0]), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            sample, timesteps, states = (value[:, rows].flatten(0, 1) for value in gathered)
            states.requires_grad_()
            self._received = []
            with torch.enable_grad():
                prediction = self.network(sample, timesteps, states, return_dict=False)[0]
            # The first ranks predict something too, which has the shape of what the last one predicts.
            predictions.append(prediction.detach().unflatten(0, (self.ranks, -1)))
            if self.rank < self.ranks - 1:
                works += _send(self._outputs, self.rank + 1)
            else:
                self._outputs = [prediction]
            self._graphs.append((states, self._received, self._outputs))
        self.passes = len(self._graphs)
        whole = torch.cat(predictions, dim=1)
        dist.broadcast(whole, self.ranks - 1)
        for work, _ in works:
            work.wait()
        return whole[self.rank]

    def run_backward(self, gradient: Tensor, wanted: bool) -> Tensor | None:
        """Go back through the micro-batches. Return the gradient of the text states of this rank's rows, if wanted.

        The gradients of all ranks' losses are averaged here, but for the text states: they are summed, as what comes
        before them is averaged later.
        """
        works: list[tuple[Any, Tensor]] = []
        of_states: list[Tensor] = []
        for part in reversed(_gather(gradient / self.ranks).split(self.micro_batch_size, dim=1)):
            states, received, outputs = self._graphs.pop()
            if self.rank < self.ranks - 1:
                gradients = [_receive(output, self.rank + 1) for output in outputs]
            else:
                gradients = [part.flatten(0, 1)]
            torch.autograd.backward(outputs, gradients)
            if received:
                works += _send([_gradient(state) for state in received], self.rank - 1)
            if wanted:
                of_states.insert(0, _gradient(states).unflatten(0, (self.ranks, -1)))
        for work, _ in works:
            work.wait()
        shared = [parameter for parameter in self._shared if parameter.requires_grad]
        for parameter in shared:  # a rank that does not use one has a gradient of zero
            parameter.grad = _gradient(parameter)
        sum_over_ranks([_gradient(parameter) for parameter in shared])
        if not wanted:
            return None
        whole = torch.cat(of_states, dim=1)
        sum_over_ranks([whole])
        return whole[self.rank] * self.ranks

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return on rank 0 also what other ranks alone have, in host memory. They send it, and all call this."""
        own = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
        known: list[Any] = [None] * self.ranks
        dist.all_gather_object(known, {name: (t.shape, t.dtype, t.device.type) for name, t in own.items()})
        for source, described in enumerate(known):
            for name, (shape, dtype, device) in described.items():
                if name in known[0]:
                    continue
                if self.rank == source:
                    dist.send(own[name].contiguous(), 0)
                elif self.rank == 0:
                    received = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(received, source)
                    own[name] = received.cpu()
        return own


class _Pass(torch.autograd.Function):
    """Both directions of a pass, each at once: their order is ours and not that of autograd."""

    @staticmethod
    def forward(ctx: Any, pipeline: Pipeline, wanted: bool, *inputs: Tensor) -> Tensor:
        ctx.pipeline, ctx.wanted = pipeline, wanted
        return pipeline.run_forward(*(value.detach() for value in inputs))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, ctx.pipeline.run_backward(gradient, ctx.wanted)


def owners(blocks: list[nn.Module], ranks: int) -> list[int]:
    """Return the rank of each block: consecutive ones, with about equal bytes."""
    sizes = [sum(tensor.nbytes for tensor in chain(block.parameters(), block.buffers())) for block in blocks]
    result = [int(ranks * (sum(sizes[:i]) + size / 2) / sum(sizes)) for i, size in enumerate(sizes)]
    if len(set(result)) < ranks:
        raise UnavailableError(
            f"lever pipeline: {len(blocks)} transformer blocks cannot be divided among {ranks} GPUs so that each has "
            "about as many bytes; set fewer gpus, or recipe.sharding=fsdp2"
        )
    return result


def _gather(tensor: Tensor) -> Tensor:
    """[B, ...] of each rank -> [ranks, B, ...]."""
    gathered = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    dist.all_gather(list(gathered), tensor.contiguous())
    return gathered


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _receive(like: Tensor, source: int) -> Tensor:
    """Return a tensor like this one from another rank."""
    received = torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
    dist.recv(received, source)
    return received


def _send(tensors: list[Tensor], target: int) -> list[tuple[Any, Tensor]]:
    """Begin to send tensors. Return what to wait for, with the tensors, which must live as long."""
    sent = [tensor.detach().contiguous() for tensor in tensors]
    return [(dist.isend(tensor, target), tensor) for tensor in sent]
