"""One training step over several processes, a rank each: equal weights everywhere, gradients averaged over the ranks.

Rank 0 decides what happens next, step after step, and says so to the others before it begins; they follow. All ranks
draw the numbers of the whole batch and take their own part, so that the step is that of one rank with the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from inpaint_bench.models.execution import Execution
from inpaint_bench.models.networks import Networks

from . import sharding, tensor_parallel
from .exchange import GradientExchange, sum_over_ranks
from .pipeline import Pipeline


class Command(IntEnum):
    """What rank 0 tells the others to do."""

    END = 0
    STEP = 1  # one step of training, or one call of a measurement
    RESTORE = 2  # continue from a checkpoint, whose path follows
    STATE = 3  # bring together the state for a checkpoint, of which each rank has a part
    NEXT = 4  # go on to the next case of a measurement


def announce(command: Command, argument: str = "") -> None:
    """Tell the other ranks what rank 0 does next. Queues no device work, and does not wait for them."""
    dist.broadcast(torch.tensor(int(command)), 0)
    if command is Command.RESTORE:
        dist.broadcast_object_list([argument], 0)


def next_command() -> tuple[Command, str]:
    """Wait for what rank 0 announces. Raises RuntimeError if it has died, or after the group's timeout."""
    number = torch.tensor(0)
    dist.broadcast(number, 0)
    command, arguments = Command(int(number)), [""]
    if command is Command.RESTORE:
        dist.broadcast_object_list(arguments, 0)
    return command, arguments[0]


class DataParallel:
    """DistributedDataParallel, FSDP2, a pipeline or an exchange of our own for the UNet, and for what is beside it."""

    def __init__(self, execution: Execution, networks: Networks) -> None:
        network = execution.calls["unet"]
        assert isinstance(network, nn.Module)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sharding = execution.recipe.sharding
        self.network: nn.Module = network
        self.exchange: GradientExchange | None = None
        self.pipeline: Pipeline | None = None
        if self.sharding == "fsdp2":
            sharding.shard_network(network, networks.architecture.sharded(network), execution.device)
        elif self.sharding == "pipeline":
            self.network = self.pipeline = Pipeline(network, execution.compared_size)
            execution.micro_batches = 1  # the pipeline takes the whole batch, and divides it
        elif execution.recipe.exchange == "in_place":
            self.exchange = GradientExchange(network)
        else:
            if self.sharding == "tensor":
                divided = tensor_parallel.divide_blocks(network, execution.device)
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, divided)
            self.network = self.ddp = self._ddp(execution, network)
        # The gate of the location tokens is used inside the UNet without being its parameter, so DDP does not see it.
        own = {id(parameter) for parameter in network.parameters()}
        # Asked for only now: dividing the weights replaces parameters, and a list of the old ones would keep them.
        self._others = [p for p in networks.trainable_parameters() if id(p) not in own]
        with torch.no_grad():
            for parameter in self._others:
                dist.broadcast(parameter, 0)

    @staticmethod
    def _ddp(execution: Execution, network: nn.Module) -> DistributedDataParallel:
        recipe, device = execution.recipe, execution.device
        with warnings.catch_warnings(), _side_stream(execution):
            # Warning about `broadcast_buffers`: the oldest PyTorch that we support does not have its later name.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(
                network,
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,  # the networks have none that change
                bucket_cap_mb=recipe.bucket_mb,
                gradient_as_bucket_view=recipe.bucket_view,
                static_graph=recipe.static_graph,
            )
        if recipe.compress == "bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            ddp.register_comm_hook(None, bf16_compress_hook)
        return ddp

    def begin(self) -> None:
        """Announce a step, on rank 0."""
        if self.rank == 0:
            announce(Command.STEP)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients are exchanged during the last one only."""
        if self.sharding == "fsdp2":
            assert isinstance(self.network, FSDPModule)
            self.network.set_requires_gradient_sync(last)
            return nullcontext()
        if self.exchange:
            self.exchange.sends = last
            return nullcontext()
        return nullcontext() if last or self.pipeline else self.ddp.no_sync()

    def average(self, loss: Tensor) -> Tensor:
        """Average the loss, and gradients that DDP does not see, over the ranks. Returns the loss."""
        if self.exchange:
            self.exchange.finish()
        tensors = [loss, *(p.grad for p in self._others if p.grad is not None)]
        sum_over_ranks(tensors, divisor=self.ranks)
        return loss

    def gather(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Announce that the state is read, if it is sharded. Return whether this rank takes part in that.

        ZeRO-1 brings its own together at once, the others tensor by tensor (sharding.for_checkpoint).
        """
        if self.sharding != "none" and self.rank == 0:
            announce(Command.STATE)
        for optimizer in optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.consolidate_state_dict(0)
        return self.rank == 0 or self.sharding in sharding.DIVIDED_WEIGHTS

    def own_rows(self, count: int) -> slice:
        """Return the rows of this rank in what is drawn for the batches of all ranks, `count` rows each."""
        return slice(self.rank * count, (self.rank + 1) * count)


@contextmanager
def _side_stream(execution: Execution) -> Iterator[None]:
    """Make DDP on a stream of its own, which PyTorch requires if its steps are captured in a CUDA graph."""
    if not execution.cuda_graph:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
