"""The parts of a training step that levers replace before the first step.

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from inpaint_bench.core.config.bench import BenchConfig, RecipeConfig
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source

from . import optimizers
from .networks import DTYPES, INPUT_CHANNELS, Networks, set_switches

if TYPE_CHECKING:
    from .latent_cache import LatentCache
    from .parallel.data_parallel import DataParallel


@dataclass(kw_only=True)
class StepComponents:
    """The parts of a training step: the baseline's, then as the levers of the recipe change them.

    `networks` are what is trained and saved. `unet`, `vae_encoder` and `text_encoder` are what the step calls: the
    same networks, compiled perhaps.
    """

    bench: BenchConfig
    device: torch.device
    networks: Networks
    source: Source
    # (unet_input [B, 9, r, r], timesteps [B], encoder_hidden_states [B, L + P, D]) -> noise [B, 4, r, r]
    unet: Callable[..., Any]
    vae_encoder: Callable[[Tensor], Tensor]  # [B, 3, R, R] -> hidden states
    text_encoder: Callable[[Tensor], Tensor]  # [B, L] token ids -> [B, L, D]
    make_optimizers: Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]]
    fp32_precision: dict[str, str]  # in effect for operations that stay fp32
    memory_format: torch.memory_format = torch.contiguous_format
    attention_kernels: Callable[[], AbstractContextManager[Any]] = nullcontext
    autocast_dtype: torch.dtype | None = None  # None: no autocast
    unet_dtype: torch.dtype = torch.float32  # of the UNet's weights and floating-point inputs
    micro_batches: int = 1
    ema_decay: float | None = None
    train_text_encoder: bool = False  # its adapters, see adapters.py
    cuda_graph: bool = False
    non_blocking: bool = False  # copies of batches to the device
    cache: LatentCache | None = None
    parallel: DataParallel | None = None  # None: one rank
    # Outputs of the frozen networks for a batch. Computed by `encode_...`, unless a cache replaces the function.
    image_moments: Callable[[Batch], Tensor] = field(init=False)
    masked_moments: Callable[[Batch], tuple[Tensor, Tensor]] = field(init=False)
    text_states: Callable[[Batch], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.image_moments = self.encode_image
        self.masked_moments = self.encode_masked_image
        self.text_states = self.encode_text

    @classmethod
    def baseline(cls, bench: BenchConfig, device: torch.device, networks: Networks, source: Source) -> StepComponents:
        """Return the components of the device's baseline. Resets PyTorch's global switches to it."""
        text_encoder = networks.text_encoder
        return cls(
            bench=bench,
            device=device,
            networks=networks,
            source=source,
            unet=networks.unet,
            vae_encoder=networks.vae.encoder,
            text_encoder=lambda tokens: text_encoder(tokens).last_hidden_state,
            make_optimizers=optimizers.baseline_adamw,
            # The search for batch=auto may have applied the recipe's levers in this process before.
            fp32_precision=set_switches(RecipeConfig()),
            autocast_dtype=DTYPES["bf16"] if device.type == "cuda" else None,
        )

    @property
    def recipe(self) -> RecipeConfig:
        """Return the recipe whose levers are applied."""
        return self.bench.recipe

    @property
    def micro_batch_size(self) -> int:
        """Images that are computed at once."""
        return int(self.bench.batch) // self.micro_batches

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context. In a CUDA graph the cache of cast weights must not outlive the step."""
        dtype = self.autocast_dtype
        return torch.autocast(
            self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=not self.cuda_graph
        )

    def unet_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the UNet needs it: off for 16-bit weights, where it would make norms return fp32."""
        if self.unet_dtype == torch.float32:
            return self.autocast()
        return torch.autocast(self.device.type, enabled=False)

    def encode_image(self, batch: Batch) -> Tensor:
        """Return moments of the images, [B, 8, r, r]."""
        return self.vae_moments(batch["image"])

    def encode_masked_image(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return moments of the masked images, [B, 8, r, r], and their masks, [B, 1, r, r]."""
        moments = self.vae_moments(batch["masked_image"])
        return moments, F.interpolate(batch["mask"], size=moments.shape[-2:], mode="nearest")

    def encode_text(self, batch: Batch) -> Tensor:
        """Return text states, [B, L, D]."""
        return self.text_encoder(batch["tokens"])

    def vae_moments(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 8, r, r]: mean and log variance of the latents, not scaled."""
        hidden = self.vae_encoder(image.contiguous(memory_format=self.memory_format))
        # diffusers keeps this convolution outside of the encoder, and some VAEs are configured without it.
        quant_conv = self.networks.vae.quant_conv
        moments: Tensor = hidden if quant_conv is None else quant_conv(hidden)
        return moments

    def samples(self) -> Samples:
        """Return the training samples, with what the recipe needs of each."""
        data, recipe, cache = self.bench.data, self.recipe, self.cache
        return Samples(
            self.source,
            self.networks.tokenize,
            self.bench.seed,
            masks=data.masks,
            full_mask_share=data.full_mask_share,
            pixels=not (recipe.cache_image and recipe.cache_masked),
            mask_pool=recipe.mask_pool if recipe.cache_masked else None,
            cached=cache.rows if cache and cache.in_loader else None,
        )


def unet_inputs(components: StepComponents, count: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs of the UNet, on the CPU and so equal on every machine.

    Returns the UNet's input [B, 9, r, r], timesteps [B] and encoder_hidden_states [B, L + P, D], in the types and
    layout that the components need.
    """
    networks, device, dtype = components.networks, components.device, components.unet_dtype
    side = components.bench.data.resolution_px // networks.downscale
    length = networks.state_rows + components.bench.model.location_tokens
    unet_input = torch.randn(count, INPUT_CHANNELS, side, side, generator=generator).to(device, dtype)
    encoder_hidden_states = torch.randn(count, length, networks.unet.config.cross_attention_dim, generator=generator)
    timesteps = torch.randint(len(networks.sqrt_alphas_cumprod), (count,), generator=generator)
    unet_input = unet_input.contiguous(memory_format=components.memory_format)
    return unet_input, timesteps.to(device), encoder_hidden_states.to(device, dtype)
