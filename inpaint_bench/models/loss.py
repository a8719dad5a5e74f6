"""The loss of inpainting: what is drawn, what goes into the UNet, and what comes out compared with the noise.

Draws are made in one order and shape whatever the recipe, so that recipes can be compared on equal noise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from inpaint_bench.data.samples import Batch

from .assembly import Assembly
from .location import DROP
from .networks import LATENT_CHANNELS

LOG_VARIANCE = (-30.0, 20.0)  # where diffusers cuts the VAE's


@dataclass(kw_only=True)
class Draws:
    """Everything random in a step, for B samples with latents of r x r."""

    image: Tensor  # [B, 4, r, r]: for the sample of the image's latent
    masked: Tensor  # [B, 4, r, r]: for that of the masked image
    noise: Tensor  # [B, 4, r, r]: what the UNet has to find
    times: Tensor  # [B] int64
    absent: Tensor  # [B] bool: trained without position

    def part(self, rows: slice) -> Draws:
        return Draws(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(kw_only=True)
class Inputs:
    """What the UNet is trained on."""

    latents: Tensor  # [B, 4, r, r] float32, scaled
    mask: Tensor  # [B, 1, r, r]
    masked: Tensor  # [B, 4, r, r] float32, scaled
    text: Tensor  # [B, L, D]


def draw(assembly: Assembly, count: int, generator: Generator) -> Draws:
    device = assembly.device
    side = assembly.bench.data.resolution_px // assembly.nets.downscale
    shape = (count, LATENT_CHANNELS, side, side)

    def normal() -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    return Draws(
        image=normal(),
        masked=normal(),
        noise=normal(),
        times=torch.randint(len(assembly.nets.signal), (count,), device=device, generator=generator),
        absent=torch.rand(count, device=device, generator=generator) < DROP,
    )


@torch.no_grad()
def inputs(assembly: Assembly, batch: Batch, draws: Draws) -> Inputs:
    """From a batch on the device, encoded here or read from the cache."""
    cache, recipe = assembly.cache, assembly.recipe
    with assembly.cast():
        image = cache.image(batch) if cache and recipe.cache_image else assembly.moments(batch["image"])
        if cache and recipe.cache_masked:
            masked, mask = cache.masked(batch)
        else:
            masked = assembly.moments(batch["masked_image"])
            mask = F.interpolate(batch["mask"], size=masked.shape[-2:], mode="nearest")
        text = cache.text(batch) if cache and recipe.cache_text else assembly.text(batch["tokens"])
    scale = assembly.nets.vae.config.scaling_factor
    return Inputs(
        latents=sample(image, draws.image, scale), mask=mask, masked=sample(masked, draws.masked, scale), text=text
    )


def sample(moments: Tensor, noise: Tensor, scale: float) -> Tensor:
    """[B, 8, r, r] moments and [B, 4, r, r] noise -> [B, 4, r, r] float32: a sample of the latent, scaled."""
    mean, log_variance = moments.float().chunk(2, dim=1)
    return (mean + torch.exp(0.5 * log_variance.clamp(*LOG_VARIANCE)) * noise) * scale


def predict(assembly: Assembly, given: Inputs, batch: Batch, draws: Draws) -> Tensor:
    """The noise that the UNet finds, [B, 4, r, r] in its own type."""
    nets = assembly.nets
    with torch.no_grad():
        kept = nets.signal[draws.times, None, None, None]
        added = nets.noise[draws.times, None, None, None]
        # Order of the checkpoint's input: noisy latents 4, mask 1, masked-image latents 4.
        state = torch.cat([kept * given.latents + added * draws.noise, given.mask, given.masked], dim=1)
        state = state.to(assembly.input_dtype).contiguous(memory_format=assembly.layout)
    text = given.text.to(assembly.input_dtype)
    if nets.location:
        with assembly.cast():
            place = nets.location(batch["latitude"], batch["longitude"], draws.absent)
        text = torch.cat([text, place.to(text.dtype)], dim=1)
    with assembly.unet_cast(), assembly.attention():
        predicted: Tensor = assembly.unet(state, draws.times, text, return_dict=False)[0]
    return predicted


def loss(assembly: Assembly, batch: Batch, draws: Draws) -> Tensor:
    """Mean squared error of the predicted noise, over all latents (masked or not, as SD trains)."""
    predicted = predict(assembly, inputs(assembly, batch, draws), batch, draws)
    return F.mse_loss(predicted.float(), draws.noise)
