"""One training step over several processes, a rank each: equal weights everywhere, gradients averaged over the ranks.

Rank 0 decides what happens next, step after step, and says so to the others before it begins; they follow. All ranks
draw the numbers of the whole batch and take their own part, so that the step is that of one rank with the whole batch.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.levers import DIVIDED_WEIGHTS
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.models import flops
from inpaint_bench.models.execution import Execution
from inpaint_bench.models.networks import Networks

from . import exchange, sharding


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
    """DistributedDataParallel, FSDP2, a pipeline or an exchange of ours for the UNet, and for what is beside it."""

    def __init__(self, execution: Execution, networks: Networks) -> None:
        network = execution.calls["unet"]
        assert isinstance(network, nn.Module)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sharding = execution.recipe.sharding
        self.network: nn.Module = network
        self.exchange: exchange.GradientExchange | None = None
        self.pipeline: Pipeline | None = None
        if self.sharding == "fsdp2":
            sharding.shard_network(network, networks.architecture.sharded(network), execution.device)
        elif self.sharding == "pipeline":
            costs = block_costs(execution.bench, networks)
            self.network = self.pipeline = Pipeline(network, execution.compared_size, costs)
            execution.micro_batches = 1  # the pipeline takes the whole batch, and divides it
        elif execution.recipe.exchange != "default":
            self.exchange = exchange.KINDS[execution.recipe.exchange](network)
        else:
            if self.sharding == "tensor":
                divided = sharding.divide_blocks(network, execution.device)
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

    def finish(self) -> None:
        """Finish the exchange of the gradients that the last backward passes made."""
        if self.exchange:
            self.exchange.finish()

    def average(self, loss: Tensor) -> Tensor:
        """Average the loss, and gradients that DDP does not see, over the ranks. Returns the loss."""
        self.finish()
        tensors = [loss, *(p.grad for p in self._others if p.grad is not None)]
        sharding.sum_over_ranks(tensors, divisor=self.ranks)
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
        return self.rank == 0 or self.sharding in DIVIDED_WEIGHTS

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


# --- a pipeline of transformer blocks ------------------------------------------------------------

# Each rank keeps consecutive blocks, and hands their output to the next one. Every rank has its own rows of the batch,
# as with data parallelism. A pass gathers the rows of all ranks and takes them through the ranks in micro-batches,
# first all of them forward, then all backward (GPipe, arXiv 1811.06965): a rank works on one while the next works on
# the one before. What is outside of the blocks every rank keeps and computes itself.
#
# The parameters of other ranks stay in the network, on the device `meta`: they have shapes and numbers, but no memory.


class Pipeline(nn.Module):
    """The network of all ranks, called with the rows of this one. One backward pass follows each forward pass."""

    def __init__(self, network: nn.Module, micro_batch_size: int, costs: Sequence[int]) -> None:
        """Keep this rank's share of the blocks, by their costs. `micro_batch_size` rows of each rank travel together.

        Raises UnavailableError if there are too few blocks.
        """
        super().__init__()
        self.network, self.micro_batch_size = network, micro_batch_size
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.passes = 0  # passes of the network, in the last forward pass
        self._received: list[Tensor] = []  # states of text and image in one tensor, from the rank before
        self._outputs: list[Tensor] = []  # those for the next rank
        self._graphs: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []  # text states, received, outputs
        blocks: list[nn.Module] = list(network.blocks)  # type: ignore[arg-type]
        rank_of = owners(costs, self.ranks)
        in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
        self._shared = [p for p in network.parameters() if id(p) not in in_blocks]
        for number, (block, owner) in enumerate(zip(blocks, rank_of, strict=True)):
            if owner != self.rank:
                block.to("meta")
                block._compiled_call_impl = None
                receives = owner < self.rank == rank_of[number + 1]
                sends = owner > self.rank == rank_of[number - 1]
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
        self, receives: bool, sends: bool, hidden_states: Tensor, encoder_hidden_states: Tensor | None, **_: Any
    ) -> Any:
        """Take the place of a block of another rank. Returns states of text and image, or all in one, as blocks do."""
        if not (receives or sends):
            return hidden_states if encoder_hidden_states is None else (encoder_hidden_states, hidden_states)
        parts = [states for states in (encoder_hidden_states, hidden_states) if states is not None]
        joined = torch.cat(parts, dim=1)  # the next rank's first block may be of another kind
        if receives:
            self._received = [joined := _receive(joined, self.rank - 1).requires_grad_()]
        else:
            self._outputs = [joined]
        return joined.split([part.shape[1] for part in parts], dim=1) if len(parts) > 1 else joined

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
        sharding.sum_over_ranks([_gradient(parameter) for parameter in shared])
        if not wanted:
            return None
        whole = torch.cat(of_states, dim=1)
        sharding.sum_over_ranks([whole])
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


def block_costs(bench: BenchConfig, networks: Networks) -> list[int]:
    """Return what the blocks are divided by.

    Frozen beneath adapters, their operations: the time of a step and the activations follow these, and a block of FLUX
    with two streams has 2.4 times the weights of one with a single stream for the same work. If they are trained, their
    parameters: gradients and moments fill the GPUs.
    """
    if bench.recipe.lora_rank:
        return flops.of_blocks(bench.model, bench.data.resolution_px, networks)
    return [sum(parameter.numel() for parameter in block.parameters()) for block in networks.unet.blocks]


def owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each block: consecutive ones, of about equal costs."""
    result = [int(ranks * (sum(costs[:i]) + cost / 2) / sum(costs)) for i, cost in enumerate(costs)]
    if len(set(result)) < ranks:
        raise UnavailableError(
            f"lever pipeline: {len(costs)} transformer blocks cannot be divided among {ranks} GPUs in about equal "
            "parts; set fewer gpus, or recipe.sharding=fsdp2"
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
