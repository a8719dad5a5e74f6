"""Several ranks that each keep a part of what all of them need: PyTorch's ZeroRedundancyOptimizer (ZeRO-1) and FSDP2.

In a pipeline (pipeline.py) what other ranks keep is on the device `meta`.

A checkpoint is that of one rank with everything, so that another number of ranks, sharded or not, can continue from it.
"""

from __future__ import annotations

import inspect
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

DIVIDED_WEIGHTS = ("fsdp2", "tensor", "pipeline")  # with these each rank has a part of the weights only


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
    # PyTorch 2.11 does not bring several parts together that are divided each (tensor_parallel.py).
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
