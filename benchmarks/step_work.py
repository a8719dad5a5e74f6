"""What one training step has to do, per class of kernels: operations by shapes, and the least time they can take.

The floors are those of an H200: the best rates that its libraries reached on these shapes, 790 TFLOP/s of bf16 products
(0.8 of the datasheet's peak) and 4.25 TB/s (0.885 of it); of other cards the same shares of their own datasheets'
peaks are taken. Attention's is its exact products at the full peak: its exponentials overlap with them at best. The
byte floor assumes bf16 tensors, each read and written once by a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.kernels import KernelClass
from inpaint_bench.models.networks import INPUT_CHANNELS, build_networks

PRODUCTS_REACHED, BANDWIDTH_REACHED = 0.80, 0.885
# Backward passes take twice a forward pass; that of attention also computes the scores again.
BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5
# Bytes per parameter that an AdamW step has to move: gradient, weights and states, read and written.
OPTIMIZER_BYTES = {"fp32": 28, "bf16_master": 28, "bf16_split": 18, "bf16_stochastic": 14}
# Bytes per element in bf16, forward and backward: GroupNorm and SiLU; LayerNorm, GEGLU and residuals of a transformer
# block; residual sums of a ResBlock; bias gradients of a convolution's output.
GROUP_NORM_BYTES, TRANSFORMER_BYTES, RESIDUAL_BYTES, BIAS_BYTES = 10, 124, 12, 2


@dataclass(kw_only=True)
class Forward:
    """One image through the UNet: operations, and elements of activations."""

    convolution: float = 0.0
    convolution_1x1: float = 0.0
    linear: float = 0.0
    self_attention: float = 0.0
    cross_attention: float = 0.0
    group_norm: int = 0
    transformer: int = 0  # tokens times channels, over the transformer blocks
    residual: int = 0
    convolved: int = 0  # outputs of convolutions


@dataclass(kw_only=True)
class Work:
    """A whole step: operations per class, and the times below which it cannot go."""

    flop: dict[KernelClass, float]
    floors_ms: dict[KernelClass, float]
    norm_pointwise_floor_ms: float | None


def count(bench: BenchConfig, facts: dict[str, Any]) -> Work:
    """Count a step of the configuration; `facts` are the workload's. On a CPU there are no floors."""
    forward, encoder = _count_on_shapes(bench)
    batch, gpu = bench.batch_size, bench.gpu
    # The channels-last UNet computes 1x1 convolutions as linear layers, and cross-attention in a kernel of its own.
    own = bench.recipe.unet == "nhwc"
    spatial = forward.convolution + (0 if own else forward.convolution_1x1)
    linear = forward.linear + (forward.convolution_1x1 if own else 0)
    encodes = facts["encodes_online"]
    backward = 1 + ATTENTION_BACKWARD
    flop = {
        KernelClass.CONV_FORWARD: spatial + encodes * encoder.convolution,
        KernelClass.CONV_DGRAD: spatial,
        KernelClass.CONV_WGRAD: spatial,
        KernelClass.GEMM: (1 + BACKWARD) * linear + encodes * encoder.linear,
        KernelClass.ATTENTION: backward * forward.self_attention + encodes * encoder.self_attention,
    }
    if own:
        flop[KernelClass.CROSS_ATTENTION] = backward * forward.cross_attention
    else:
        flop[KernelClass.ATTENTION] += backward * forward.cross_attention
    flop = {kind: batch * value for kind, value in flop.items()}
    if not gpu.bf16_dense_tflops:
        return Work(flop=flop, floors_ms={}, norm_pointwise_floor_ms=None)
    reached = dict.fromkeys(flop, PRODUCTS_REACHED) | {KernelClass.ATTENTION: 1.0, KernelClass.CROSS_ATTENTION: 1.0}
    floors = {kind: value / (reached[kind] * gpu.bf16_dense_tflops * 1e12) * 1e3 for kind, value in flop.items()}
    bytes_per_s = BANDWIDTH_REACHED * gpu.bandwidth_gb_s * 1e9
    parameters = facts["parameters_trained"]
    floors[KernelClass.OPTIMIZER] = parameters * OPTIMIZER_BYTES[bench.recipe.weights] / bytes_per_s * 1e3
    floors[KernelClass.LAYOUT] = 0.0
    activations = batch * (
        forward.group_norm * GROUP_NORM_BYTES
        + forward.transformer * TRANSFORMER_BYTES
        + forward.residual * RESIDUAL_BYTES
        + forward.convolved * BIAS_BYTES
    )
    return Work(flop=flop, floors_ms=floors, norm_pointwise_floor_ms=activations / bytes_per_s * 1e3)


def _count_on_shapes(bench: BenchConfig) -> tuple[Forward, Forward]:
    """Return one image's forward pass through the UNet and through the VAE's encoder."""
    meta = torch.device("meta")
    networks = build_networks(replace(bench.model, weights=None), meta)
    side = bench.data.resolution_px // networks.downscale
    length = networks.context_length + bench.model.location_tokens
    with torch.no_grad(), meta:
        sample, step = torch.empty(1, INPUT_CHANNELS, side, side), torch.zeros(1, dtype=torch.long)
        states = torch.empty(1, length, networks.unet.config.cross_attention_dim)
        with _counted(networks.unet) as unet:
            networks.unet(sample, step, states)
        with _counted(networks.vae.encoder) as encoder:
            networks.vae.encoder(torch.empty(1, 3, bench.data.resolution_px, bench.data.resolution_px))
    return unet, encoder


@contextmanager
def _counted(network: nn.Module) -> Iterator[Forward]:
    """Count the block's pass through a diffusers network; the result is complete when the block ends."""
    result = Forward()

    def add_elements(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        match type(module).__name__:
            case "GroupNorm":
                result.group_norm += inputs[0].numel()
            case "BasicTransformerBlock":
                result.transformer += inputs[0].numel()
            case "ResnetBlock2D":
                result.residual += output.numel()
            case "Conv2d":
                result.convolved += output.numel()

    hooks = [module.register_forward_hook(add_elements) for module in network.modules()]
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            yield result
    finally:
        for hook in hooks:
            hook.remove()
    by_module = {name: sum(flop.values()) for name, flop in counter.get_flop_counts().items()}
    prefix = type(network).__name__
    for name, module in network.named_modules():
        flop = by_module.get(f"{prefix}.{name}", 0)
        if isinstance(module, nn.Conv2d):
            if module.kernel_size == (1, 1):
                result.convolution_1x1 += flop
            else:
                result.convolution += flop
        elif isinstance(module, nn.Linear):
            result.linear += flop
        elif type(module).__name__ == "Attention":
            inner = sum(by_module.get(f"{prefix}.{name}.{part}", 0) for part in _linears(module))
            if name.endswith("attn2"):
                result.cross_attention += flop - inner
            else:
                result.self_attention += flop - inner


def _linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
