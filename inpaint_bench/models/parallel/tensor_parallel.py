"""Tensor parallelism of the UNet's transformer blocks, by torch.distributed.tensor.parallel.

Each rank has some heads of every attention and a part of every feed-forward layer. Before such a layer the rows of all
ranks are gathered, after it the parts are summed and each rank keeps its own rows. The rest of the UNet works on those
rows, so that nothing is computed twice; its gradients are averaged by DDP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from inpaint_bench.core.errors import UnavailableError

from .sharding import own_bytes

ROWS: Placement = Shard(0)  # each rank has its own of the batch
ALL_ROWS: Placement = Replicate()
LAYERS = 10  # linear layers of a block: four in each attention, two feed-forward


class _GatedColumns(ParallelStyle):
    """A linear layer whose output is two halves, of which each rank has the same part (GEGLU multiplies them).

    PyTorch's ColwiseParallel would give the first rank one half, and the last the other.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in layer.named_parameters():
                part = distribute_tensor(parameter.detach(), mesh, [_StridedShard(0, split_factor=2)])
                layer.register_parameter(name, nn.Parameter(part))

        def gather(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [ROWS], run_check=False).redistribute(placements=[ALL_ROWS])

        def own_columns(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, divide, gather, own_columns)


def divide_blocks(unet: nn.Module, device: torch.device) -> list[str]:
    """Divide the transformer blocks of the UNet among the ranks. Returns the names of their divided parameters.

    Raises UnavailableError where the heads of an attention cannot be divided equally.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    for name, block in transformer_blocks(unet).items():
        for attention in (block.attn1, block.attn2):
            if attention.heads % ranks:
                raise UnavailableError(
                    f"lever tensor: {name} has {attention.heads} heads, which {ranks} GPUs cannot divide equally; "
                    "set gpus to a divisor, or recipe.sharding=fsdp2"
                )
            attention.heads //= ranks
        assert isinstance(block.ff.net[0], GEGLU)
        parallelize_module(block, mesh, _plan(block))
    divided = {name: parameter for name, parameter in unet.named_parameters() if isinstance(parameter, DTensor)}
    for parameter in divided.values():
        # They come from the rows of all ranks, each with the loss of its own rows; the mean counts.
        parameter.register_hook(lambda gradient: gradient / ranks)
    return list(divided)


def _plan(block: Any) -> dict[str, ParallelStyle]:
    # Distributed tensors: queries, keys and values share one gathered input, whose gradients are summed at once.
    states: dict[str, Any] = {
        "input_kwarg_layouts": {"encoder_hidden_states": ROWS},
        "desired_input_kwarg_layouts": {"encoder_hidden_states": ALL_ROWS},
    }
    plan: dict[str, ParallelStyle] = {
        "ff.net.0.proj": _GatedColumns(),
        "ff.net.2": RowwiseParallel(output_layouts=ROWS),
    }
    for name, more in {"attn1": {}, "attn2": states}.items():
        plan[name] = PrepareModuleInput(input_layouts=(ROWS,), desired_input_layouts=(ALL_ROWS,), **more)
        plan |= {f"{name}.{part}": ColwiseParallel() for part in ("to_q", "to_k", "to_v")}
        plan[f"{name}.to_out.0"] = RowwiseParallel(output_layouts=ROWS)
    return plan


def transformer_blocks(unet: nn.Module) -> dict[str, Any]:
    """Return the transformer blocks by name."""
    return {name: module for name, module in unet.named_modules() if isinstance(module, BasicTransformerBlock)}


def divided_layers(unet: nn.Module) -> tuple[int, int]:
    """Return the number of transformer blocks, and of their linear layers of which this rank has a part only."""
    blocks = transformer_blocks(unet).values()
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    return len(blocks), sum(own_bytes(layer.weight) * dist.get_world_size() == layer.weight.nbytes for layer in layers)
