"""Networks of our own in place of diffusers': channels-last throughout, with fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inpaint_bench.kernels import dispatch
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.architectures.nhwc_vae import NhwcEncoder
from inpaint_bench.models.components import StepComponents
from inpaint_bench.models.networks import DTYPES

from .base import Lever, Verification

if TYPE_CHECKING:
    from inpaint_bench.core.config.bench import BenchConfig

    from .observe import StepObservation


def _kernels_problem(device: torch.device) -> str | None:
    if device.type == "cuda" and dispatch.triton is None:
        return "its kernels need Triton on a GPU, which is not installed"
    return None


class Unet(Lever):
    """The channels-last UNet, its first and last convolution padded. On a CPU its plain PyTorch reference runs."""

    field = "unet"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if device.type == "cuda" and bench.recipe.weights == "fp32":
            return "its kernels do not know autocast: set 16-bit weights too (recipe.weights=bf16_split)"
        return _kernels_problem(device)

    def apply(self, components: StepComponents) -> None:
        networks = components.networks
        networks.unet = NhwcUNet.from_diffusers(networks.unet, networks.location)
        components.unet = networks.unet
        components.memory_format = torch.channels_last

    def verify(self, observed: StepObservation) -> Verification:
        kind = type(observed.components.networks.unet).__name__
        if observed.step.device.type != "cuda":
            return Verification(kind, kind == NhwcUNet.__name__, f"{kind}, by its reference in plain PyTorch")
        if observed.problem:
            return Verification(kind, None, observed.problem)
        kernels = observed.count("_group_norm_|_layer_norm_|_geglu_|_cross_attention_")
        copies = observed.layout_copies
        text = f"{kind}; {kernels} of its Triton kernels and {copies} layout conversions in a step"
        # diffusers' VAE, where images are encoded in the step, may convert layouts of its own.
        cached = observed.recipe.cache_image and observed.recipe.cache_masked
        return Verification(kind, kernels > 0 and not (cached and copies), text)


class VaeEncoder(Lever):
    """The channels-last encoder of the VAE, for images that are encoded in the step."""

    field = "vae_encoder"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if bench.recipe.cache_image and bench.recipe.cache_masked:
            return "no image is encoded in the step: both come from caches"
        return _kernels_problem(device)

    def apply(self, components: StepComponents) -> None:
        # The autocast's type, which a later lever sets: its matrix products and convolutions then cast nothing.
        components.vae_encoder = NhwcEncoder(components.networks.vae, DTYPES[components.recipe.precision])

    def verify(self, observed: StepObservation) -> Verification:
        encoder = observed.components.vae_encoder
        text = f"{type(encoder).__name__}; {observed.calls['vae_encoder']} calls in a step"
        if observed.step.device.type != "cuda":
            text += ", by its reference in plain PyTorch"
        elif observed.kernels:
            text += f"; {observed.count('_group_norm_|_add_bias')} launches of its kernels, those of the UNet included"
        return Verification(type(encoder).__name__, isinstance(encoder, NhwcEncoder), text)
