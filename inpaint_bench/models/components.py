"""The parts of a training step that levers replace before the first step.

Shapes: B images of R x R pixels, latents of r x r (r = R / 8), L text tokens and P location tokens of width D.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from inpaint_bench.data.loader import Batches
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.data.source import Source

from .execution import Execution
from .latent_cache import LatentCache
from .networks import Networks
from .optimizers import EMA, baseline_adamw
from .parallel import sharding
from .parallel.data_parallel import DataParallel


@dataclass(kw_only=True)
class StepComponents(Execution):
    """The parts of a training step: the baseline's, then as the levers of the recipe change them.

    `networks` are what is trained and saved. What the step calls are the same networks, compiled perhaps:
    `unet` (unet_input [B, C, r, r], timesteps [B], encoder_hidden_states [B, L + P, D]) -> noise [B, 4, r, r], where C
    is 9 to inpaint and 4 to make images of texts,
    `vae_encoder` [B, 3, R, R] -> hidden states, `text_encoder` [B, L] token ids -> [B, L, D].
    """

    networks: Networks
    source: Source
    calls: dict[str, Callable[..., Any]] = field(init=False)
    eager_pass: Callable[[], object] = field(init=False)
    make_optimizers: Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]] = baseline_adamw
    ema_decay: float | None = None
    train_text_encoder: bool = False  # its adapters, see adapters.py
    encoder_dtype: torch.dtype | None = None  # dtype of VAE and text encoder, which then run without autocast
    non_blocking: bool = False  # copies of batches to the device
    cache: LatentCache | None = None
    parallel: DataParallel | None = None  # None: one rank
    # The fields below belong to the step that is made of these parts.
    trained: list[nn.Parameter] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    ema: EMA | None = None
    batches: Batches | None = None  # the loader, once it is open
    batch: Batch = field(default_factory=dict)  # that levers observe, as the loader returned it

    def __post_init__(self) -> None:
        super().__post_init__()
        text_encoder = self.networks.text_encoder
        self.calls = {
            "unet": self.networks.unet,
            "vae_encoder": self.networks.vae.encoder,
            "text_encoder": lambda tokens: text_encoder(tokens).last_hidden_state,
        }
        self.eager_pass = partial(unet_pass, self)

    def divide(self) -> None:
        """Make the step one over all ranks, if there are several. After the levers."""
        if self.bench.ranks > 1:
            self.parallel = DataParallel(self, self.networks)
            self.calls["unet"] = self.parallel.network
            make, kind = self.make_optimizers, self.parallel.sharding
            self.make_optimizers = lambda parameters, lr: sharding.divided(make(parameters, lr), kind)

    @property
    def encodes(self) -> int:
        """Encodings of an image in a step: of the image, and to inpaint of the masked one, unless caches have them."""
        return (not self.recipe.cache_image) + (self.networks.inpaints and not self.recipe.cache_masked)

    def encoder_context(self) -> AbstractContextManager[Any]:
        """Return autocast as the frozen networks need it: off for 16-bit weights, where norms would return fp32."""
        return torch.autocast(self.device.type, enabled=False) if self.encoder_dtype else self.autocast()

    def facts(self) -> dict[str, Any]:
        trained_in_bf16 = self.recipe.weights not in ("fp32", "half")
        return super().facts() | ({"precision": "bf16"} if trained_in_bf16 else {})

    # --- outputs of the frozen networks for a batch, which a cache may replace -------------------

    def image_moments(self, batch: Batch) -> Tensor:
        """Return moments of the images, [B, 8, r, r]."""
        return self.vae_moments(batch["image"])

    def masked_moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return moments of the masked images, [B, 8, r, r], and masks as the network reads them, [B, 1, r, r]."""
        return self.vae_moments(batch["masked_image"]), self.networks.mask_channels(batch["mask"])

    def text_states(self, batch: Batch) -> Tensor:
        """Return text states, [B, L, D]."""
        return self.calls["text_encoder"](batch["tokens"])

    def vae_moments(self, image: Tensor) -> Tensor:
        """[B, 3, R, R] in -1..1 -> [B, 8, r, r]: mean and log variance of the latents, not scaled."""
        image = image.to(self.encoder_dtype or image.dtype).contiguous(memory_format=self.memory_format)
        hidden = self.calls["vae_encoder"](image)
        # diffusers keeps this convolution outside of the encoder, and some VAEs are configured without it.
        quant_conv = self.networks.vae.quant_conv
        return hidden if quant_conv is None else quant_conv(hidden)

    def samples(self) -> Samples:
        """Return the training samples, with what the recipe needs of each."""
        data, recipe, cache = self.bench.data, self.recipe, self.cache
        return Samples(
            self.source,
            self.networks.tokenize,
            self.bench.seed,
            masks=data.masks,
            full_mask_share=data.full_mask_share,
            pixels=self.encodes > 0,
            masked=self.networks.inpaints,
            mask_pool=recipe.mask_pool if recipe.cache_masked and self.networks.inpaints else None,
            cached=cache.rows if cache and cache.in_loader else None,
        )


def unet_inputs(execution: Execution, count: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs of the UNet, on the CPU and so equal on every machine.

    Returns the UNet's input [B, C, r, r], timesteps [B] and encoder_hidden_states [B, L + P, D], in the types and
    layout that the execution needs.
    """
    networks, device, dtype = execution.networks, execution.device, execution.dtype
    bench = execution.bench
    side = bench.data.resolution_px // networks.downscale
    length = networks.state_rows + bench.model.location_tokens
    unet_input = torch.randn(count, networks.input_channels, side, side, generator=generator).to(device, dtype)
    encoder_hidden_states = torch.randn(count, length, networks.state_width, generator=generator)
    timesteps = torch.randint(len(networks.signal_weights), (count,), generator=generator)
    unet_input = unet_input.contiguous(memory_format=execution.memory_format)
    return unet_input, timesteps.to(device), encoder_hidden_states.to(device, dtype)


def unet_pass(execution: Execution) -> None:
    """Run one image through the eager UNet, in the mode that it is in."""
    inputs = unet_inputs(execution, 1, torch.Generator().manual_seed(0))
    with execution.network_context(), execution.attention_kernels():
        execution.networks.unet(*inputs, return_dict=False)
