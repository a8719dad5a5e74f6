"""Networks of our own in place of diffusers': channels-last throughout, with fused kernels."""

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.kernels import dispatch
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.architectures.nhwc_vae import NhwcDecoder, NhwcEncoder
from inpaint_bench.models.execution import DTYPES, Execution

from .base import Lever, Observation, Phase, Verification


class _OwnNetwork(Lever[Execution]):
    """A network of ours, whose kernels are Triton's on a GPU."""

    phase = Phase.NETWORKS

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if device.type == "cuda" and dispatch.triton is None:
            return "its kernels need Triton on a GPU, which is not installed"
        return None


class Unet(_OwnNetwork):
    """The channels-last UNet, its first and last convolution padded, and decoder of the VAE if images are made.

    On a CPU their plain PyTorch reference runs.
    """

    field = "unet"

    def apply(self, execution: Execution) -> None:
        networks, trained = execution.networks, next(execution.networks.unet.parameters()).requires_grad
        networks.unet = NhwcUNet.from_diffusers(networks.unet, networks.location).requires_grad_(trained)
        execution.calls["unet"] = networks.unet
        execution.memory_format = torch.channels_last
        if "vae_decoder" in execution.calls:
            recipe = execution.recipe
            dtype = DTYPES[recipe.precision] if recipe.weights == "half" else torch.float32
            execution.calls["vae_decoder"] = NhwcDecoder(networks.vae, dtype)

    def verify(self, observed: Observation[Execution]) -> Verification:
        execution = observed.execution
        kind = type(execution.networks.unet).__name__
        text = kind
        if decoder := execution.calls.get("vae_decoder"):
            text += f" and {type(decoder).__name__}"
        if not observed.cuda:
            return Verification(kind, f"{text}, by its reference in plain PyTorch")
        if observed.problem:
            return Verification(kind, observed.problem, None)
        kernels = observed.count("_group_norm_|_layer_norm_|_geglu_|_cross_attention_")
        copies = observed.layout_copies
        text += f"; {kernels} of its Triton kernels and {copies} layout conversions in a step"
        # diffusers' VAE, where images are encoded in the step, may convert layouts of its own.
        cached = observed.recipe.cache_image and observed.recipe.cache_masked
        return Verification(kind, text, kernels > 0 and not (cached and copies))


class FusedVolumeUnet(_OwnNetwork):
    """The UNet of volumes, channels-last, with fused norms (kernels/group_norm.py); see VolumeUNet.fuse.

    On a CPU their plain PyTorch reference runs.
    """

    field = "volume_unet"

    def apply(self, execution: Execution) -> None:
        execution.networks["network"].fuse()

    def verify(self, observed: Observation[Execution]) -> Verification:
        fused = sum(getattr(layer, "fused", False) for layer in observed.execution.networks["network"].modules())
        text = f"{fused} fused layers"
        if not observed.cuda:
            return Verification(fused, f"{text}, by their reference in plain PyTorch")
        kernels = observed.count("_group_norm_")
        return Verification(fused, observed.problem or f"{text}; {kernels} kernels of norms in a step", kernels > 0)


class VaeEncoder(_OwnNetwork):
    """The channels-last encoder of the VAE, for images that are encoded in the step."""

    field = "vae_encoder"

    def apply(self, execution: Execution) -> None:
        # The autocast's type, which a later lever sets: its matrix products and convolutions then cast nothing.
        encoder = NhwcEncoder(execution.networks.vae, DTYPES[execution.recipe.precision])
        execution.calls["vae_encoder"] = encoder

    def verify(self, observed: Observation[Execution]) -> Verification:
        encoder = observed.execution.calls["vae_encoder"]
        text = f"{type(encoder).__name__}; {observed.calls['vae_encoder']} calls in a step"
        if not observed.cuda:
            text += ", by its reference in plain PyTorch"
        elif observed.kernels:
            text += f"; {observed.count('_group_norm_|_add_bias')} launches of its kernels, those of the UNet included"
        return Verification(type(encoder).__name__, text)
