"""Several ranks that each keep a part of what all of them need: ZeRO-1, by PyTorch's ZeroRedundancyOptimizer.

A checkpoint is that of one rank with everything, so that another number of ranks, sharded or not, can continue from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

MakeOptimizers = Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]]


def shard_state(make_optimizers: MakeOptimizers) -> MakeOptimizers:
    """Return a function that makes the same optimizers, of which each rank keeps the state of some parameters."""

    def make_sharded(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [_shard(optimizer) for optimizer in make_optimizers(parameters, lr)]

    return make_sharded


def _shard(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    kind = type(optimizer)
    (group,) = optimizer.param_groups
    parameters: list[nn.Parameter] = group["params"]
    accepted = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    # Weights in one buffer are sent at once, but lose channels_last.
    plain = all(parameter.is_contiguous() for parameter in parameters)
    return ZeroRedundancyOptimizer(parameters, kind, parameters_as_bucket_view=plain, **settings)


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer with the state that this rank keeps: itself, where nothing is sharded."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state that this rank keeps."""
    states = own_optimizer(optimizer).state.values()
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def load_state(optimizer: ZeroRedundancyOptimizer, state: dict[int, dict[str, Any]]) -> None:
    """Keep this rank's part of the state of all parameters, by their number."""
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    optimizer.state.clear()  # of all ranks: a second copy, which no step reads
    if optimizer.defaults.get("fused"):
        # It leaves the count of steps on the host, where the fused kernel does not read it.
        for parameter, values in optimizer.optim.state.items():
            values["step"] = values["step"].to(parameter.device)
