"""Several ranks that each keep a part of what all of them need: PyTorch's ZeroRedundancyOptimizer (ZeRO-1) and FSDP2.

In a pipeline (data_parallel.py) what other ranks keep is on the device `meta`.

A checkpoint is that of one rank with everything, so that another number of ranks, sharded or not, can continue from it.
"""

import inspect
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from inpaint_bench.core.config.levers import DIVIDED_WEIGHTS
from inpaint_bench.core.errors import UnavailableError


def _shard(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    kind = type(optimizer)
    (group,) = optimizer.param_groups
    parameters: list[nn.Parameter] = group["params"]
    # Weights in one buffer are sent at once, but lose channels_last.
    plain = all(parameter.is_contiguous() for parameter in parameters)
    return ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=plain, **_settings(optimizer))


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    accepted = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def shard_network(network: Any, blocks: list[Any], device: torch.device) -> None:
    """Divide every weight of a network among the ranks. A block gathers its weights before it runs, and drops them."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*blocks, network):
        fully_shard(module, mesh=mesh)
        if device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot average


def divided(optimizers: list[torch.optim.Optimizer], kind: str) -> list[torch.optim.Optimizer]:
    """Return the same optimizers for this rank's part.

    zero1: of which each rank keeps the state of some parameters. Divided weights: with groups of divided and of whole
    parameters, as a kernel over a list of tensors takes no list in which only some are divided. The parameters keep
    their order, by which checkpoints number them.
    """
    if kind == "zero1":
        return [_shard(optimizer) for optimizer in optimizers]
    if kind not in DIVIDED_WEIGHTS:
        return optimizers
    (optimizer,) = optimizers
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    groups = [{"params": list(part)} for _, part in groupby(parameters, lambda p: isinstance(p, DTensor))]
    return [type(optimizer)(groups, **_settings(optimizer))]


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, divided like the parameter; all of it if that is not divided."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    # None: every rank has the whole tensor, so that none is sent.
    return distribute_tensor(
        whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Where it is divided, all ranks call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    placement = tensor.placements[0]
    if not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    # PyTorch 2.11 does not bring several parts together that are divided each.
    own, dim = tensor.to_local().contiguous(), placement.dim
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    parts = [part.unflatten(dim, (placement.split_factor, -1)) for part in gathered]
    return torch.cat(parts, dim=dim + 1).flatten(dim, dim + 1)


def for_checkpoint(tensor: Tensor) -> Tensor:
    """Return all of a tensor on rank 0, if it is divided in host memory: all of them would not fit beside a step."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = whole(tensor)
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def own_bytes(tensor: Tensor) -> int:
    """Return the bytes of the part of a tensor that this rank keeps."""
    if tensor.is_meta:
        return 0
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with the state that this rank keeps: itself, if nothing is sharded."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state that this rank keeps."""
    states = own_optimizer(optimizer).state.values()
    return sum(own_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))


def load_state(optimizer: ZeroRedundancyOptimizer, state: dict[int, dict[str, Any]]) -> None:
    """Keep this rank's part of the state of all parameters, by their number."""
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    optimizer.state.clear()  # state of all ranks: a second copy, which no step reads
    if optimizer.defaults.get("fused"):
        # It leaves the count of steps on the host, where the fused kernel does not read it.
        for parameter, values in optimizer.optim.state.items():
            values["step"] = values["step"].to(parameter.device)


def sum_over_ranks(tensors: list[Tensor], *, divisor: int = 1) -> None:
    """Replace tensors by their sums over the ranks, divided, in fp32 or wider, all in one message."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= divisor
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


# --- tensor parallelism of transformer blocks ----------------------------------------------------

# The blocks of a UNet, FLUX or SD 3.5 are divided by torch.distributed.tensor.parallel. Each rank has some heads of
# every attention and a part of every feed-forward layer. Before such a layer the rows of all ranks are gathered, after
# it the parts are summed and each rank keeps its own rows. The rest of the network works on those rows, so that nothing
# is computed twice; its gradients are averaged by DDP.
#
# The norms of queries and keys are whole. A rank has their gradients from its own heads and the rows of all ranks;
# DDP's average of them is the gradient of the whole batch too.
ROWS: Placement = Shard(0)  # each rank has its own of the batch
ALL_ROWS: Placement = Replicate()
BLOCKS = (
    *(BasicTransformerBlock, JointTransformerBlock, FluxTransformerBlock, FluxSingleTransformerBlock),
    *(Flux2TransformerBlock, Flux2SingleTransformerBlock),
)


class _OfEachPart(ParallelStyle):
    """A linear layer whose output, or input, is several parts side by side, each of them divided among the ranks.

    PyTorch's own styles would divide it at once: of two parts the first rank would get one, and the last the other.
    The products are of local tensors, as PyTorch 2.11 has none of tensors that are divided so.
    """

    def __init__(self, *, outputs: int = 0, inputs: int = 0) -> None:
        """Divide an output of `outputs` equal parts, or an input of `inputs`."""
        super().__init__()
        self.dim, self.parts = (0, outputs) if outputs else (1, inputs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = [_StridedShard(self.dim, split_factor=self.parts)]
        for name, parameter in list(module.named_parameters()):
            if parameter.ndim > self.dim:  # the bias is whole if the input is divided
                part = distribute_tensor(parameter.detach(), device_mesh, placements)
                module.register_parameter(name, nn.Parameter(part))
        module.forward = partial(_own_inputs if self.dim else _own_outputs, module, device_mesh)
        return module


def _own_outputs(layer: Any, mesh: DeviceMesh, states: Tensor) -> Tensor:
    """Return this rank's part of the output for the rows of all ranks."""
    if not isinstance(states, DTensor):
        states = DTensor.from_local(states, mesh, [ROWS], run_check=False).redistribute(placements=[ALL_ROWS])
    bias = None if layer.bias is None else layer.bias.to_local()
    return F.linear(states.to_local(grad_placements=[Partial()]), layer.weight.to_local(), bias)


def _own_inputs(layer: Any, mesh: DeviceMesh, states: Tensor) -> Tensor:
    """Return the output for this rank's rows, from its part of the input for the rows of all ranks."""
    product = DTensor.from_local(F.linear(states, layer.weight.to_local()), mesh, [Partial()], run_check=False)
    own: Tensor = product.redistribute(placements=[ROWS]).to_local()
    return own if layer.bias is None else own + layer.bias


def divide_blocks(network: nn.Module, device: torch.device) -> list[str]:
    """Divide the transformer blocks of a network among the ranks. Returns the names of their divided parameters.

    Raises UnavailableError if the heads of an attention cannot be divided equally.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    for name, block in transformer_blocks(network).items():
        for attention in (module for module in block.children() if hasattr(module, "heads")):
            if attention.heads % ranks:
                raise UnavailableError(
                    f"lever tensor: {name} has {attention.heads} heads, which {ranks} GPUs cannot divide equally; "
                    "set gpus to a divisor, or recipe.sharding=fsdp2"
                )
            attention.heads //= ranks
        parallelize_module(block, mesh, _plan(block))
    divided = {name: parameter for name, parameter in network.named_parameters() if isinstance(parameter, DTensor)}
    for parameter in divided.values():
        # They come from the rows of all ranks, each with the loss of its own rows; the mean counts.
        parameter.register_hook(lambda gradient: gradient / ranks)
    return list(divided)


def _plan(block: nn.Module) -> dict[str, ParallelStyle]:
    plan = {name: _style(name, layer, block) for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    states = "encoder_hidden_states"
    if isinstance(block, BasicTransformerBlock):
        return plan | {"attn1": _gathered(first=True), "attn2": _gathered(states, first=True)}
    if isinstance(block, Flux2SingleTransformerBlock):  # one layer has the input, and gathers it itself
        return plan
    if isinstance(block, FluxSingleTransformerBlock):  # its attention and feed-forward layer share one input
        layouts: Any = {"output_layouts": (ROWS, None), "desired_output_layouts": (ALL_ROWS, None)}
        return plan | {"norm": PrepareModuleOutput(**layouts, use_local_output=False)}
    attentions = [name for name, module in block.named_children() if hasattr(module, "heads")]
    return plan | dict.fromkeys(attentions, _gathered("hidden_states", states))


def _gathered(*named: str, first: bool = False) -> ParallelStyle:
    """Gather the rows of all ranks in named inputs of an attention, and with `first` in its first one.

    They become distributed tensors: queries, keys and values share one, whose gradients are summed at once.
    """
    layouts: Any = {"input_layouts": (ROWS,), "desired_input_layouts": (ALL_ROWS,)} if first else {}
    layouts["input_kwarg_layouts"] = dict.fromkeys(named, ROWS)
    return PrepareModuleInput(**layouts, desired_input_kwarg_layouts=dict.fromkeys(named, ALL_ROWS))


def _style(name: str, layer: nn.Linear, block: Any) -> ParallelStyle:
    if name in ("proj_mlp", "attn.to_qkv_mlp_proj"):
        return _OfEachPart(outputs=layer.out_features // layer.in_features)
    if name in ("proj_out", "attn.to_out"):  # attention and feed-forward layer side by side: as many parts as both have
        return _OfEachPart(inputs=layer.in_features // layer.out_features)
    if name.endswith(".linear"):  # scales and shifts of the norms, one row per image
        return ColwiseParallel(input_layouts=ROWS, output_layouts=ROWS)
    if name.endswith(("to_out.0", "to_add_out", "net.2", "linear_out")):
        return RowwiseParallel(output_layouts=ROWS)
    if name.endswith("linear_in"):  # multiplies two halves
        return _OfEachPart(outputs=2)
    if name.endswith("net.0.proj"):
        gated = isinstance(block.get_submodule(name.removesuffix(".proj")), GEGLU)  # multiplies two halves
        return _OfEachPart(outputs=2) if gated else ColwiseParallel(input_layouts=ROWS)
    return ColwiseParallel()  # queries, keys and values


def transformer_blocks(network: nn.Module) -> dict[str, Any]:
    """Return the transformer blocks by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, BLOCKS)}


def divided_layers(network: nn.Module) -> tuple[int, int, int]:
    """Return how many transformer blocks there are, their linear layers, and those of which this rank has a part."""
    blocks = transformer_blocks(network).values()
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    divided = sum(own_bytes(layer.weight) * dist.get_world_size() == layer.weight.nbytes for layer in layers)
    return len(blocks), len(layers), divided
