"""Inpainting with our own networks, location tokens included: DDIM (arXiv:2010.02502, eta 0), seeded per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inpaint_bench.models.networks import LATENT_CHANNELS, Models
from inpaint_bench.models.pipeline_folder import sampler

from .inputs import Predict, context, device_of, evaluating, hidden, plain


def restore(
    nets: Models,
    images: Tensor,
    masks: Tensor,
    tokens: Tensor,
    latitude: Tensor,
    longitude: Tensor,
    steps: int,
    seed: int | Sequence[int],
    guidance: float = 1.0,
    *,
    predict: Predict | None = None,
) -> Tensor:
    """Repaint `images` [B, 3, R, R] (-1..1) where `masks` [B, 1, R, R] are 1; what is kept is pasted back.

    `tokens` [B, L], `latitude` and `longitude` [B] in degrees, NaN where not known. `seed`: one number, from which
    image i takes seed + i, or one per image. An image starts from its own noise, drawn on the processor, so that
    its result depends neither on the others of the batch nor on the device (but for rounding). `guidance` w other
    than 1 steers by e(nothing) + w (e(text, place) - e(nothing)), nothing being no text and no position; it doubles
    the cost. `predict` replaces the UNet's plain call, as in `validate`. Returns float32 on the device of `nets`.

    Raises ValueError for steps outside 1..the training schedule's, or seeds that are not one per image.
    """
    scheduler, device, count = sampler(nets.scheduler), device_of(nets), len(images)
    if not 1 <= steps <= len(nets.signal):
        raise ValueError(f"steps={steps}: must lie between 1 and {len(nets.signal)}")
    seeds = [seed + number for number in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"{len(seeds)} seeds for {count} images")
    scheduler.set_timesteps(steps, device=device)
    images, masks = images.to(device).float(), masks.to(device)
    predict = predict or plain(nets)
    with evaluating(nets):
        given = hidden(nets, images, masks)
        states = context(nets, tokens.to(device), latitude.to(device), longitude.to(device))
        if guidance != 1.0:
            nothing = nets.tokenize([""]).to(device).expand(count, -1)
            nowhere = torch.full((count,), torch.nan, dtype=torch.float64, device=device)
            states = torch.cat([context(nets, nothing, nowhere, nowhere), states])
        shape = (LATENT_CHANNELS, *given.shape[-2:])
        latent = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(one)) for one in seeds])
        latent = latent.to(device) * scheduler.init_noise_sigma
        for time in scheduler.timesteps:
            state = torch.cat([latent, given], dim=1)
            if guidance != 1.0:
                state = torch.cat([state, state])
            noise = predict(state, time.expand(len(state)), states).float()
            if guidance != 1.0:
                without, with_all = noise.chunk(2)
                noise = without + guidance * (with_all - without)
            latent = scheduler.step(noise, time, latent).prev_sample
        weight = next(nets.vae.parameters())
        painted = nets.vae.decode((latent / nets.vae.config.scaling_factor).to(weight.dtype)).sample
    return torch.where(masks > 0.5, painted.float().clamp(-1, 1), images)
