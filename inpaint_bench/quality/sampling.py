"""Inpainting with trained networks, location tokens included: DDIM (arXiv:2010.02502, eta 0), seeded per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inpaint_bench.data.samples import Batch
from inpaint_bench.models import generation
from inpaint_bench.models.generation import Predict
from inpaint_bench.models.networks import Networks
from inpaint_bench.models.samplers import Sampler


def restore(
    networks: Networks, batch: Batch, steps: int, seeds: Sequence[int], *, predict: Predict | None = None
) -> Tensor:
    """Repaint the images of a batch under their masks; the other pixels are pasted back.

    The batch has image, mask, tokens, latitude and longitude (data/samples.py; NaN: unknown). Every image starts from
    the noise of its own seed, drawn on the CPU, so that its result depends neither on the rest of the batch nor on the
    device (but for rounding). `predict` replaces the plain UNet. Returns float32 on the networks' device.
    """
    sampler, device = Sampler("ddim", networks.scheduler, steps), networks.device
    images, masks = batch["image"].to(device).float(), batch["mask"].to(device)
    predict_noise = predict or generation.unet_prediction(networks)
    with generation.evaluation_mode(networks):
        channels = generation.inpainting_channels(networks, images, masks)
        states = generation.encoder_states(
            networks, *(batch[name].to(device) for name in ("tokens", "latitude", "longitude"))
        )

        def predict_step(latents: Tensor, number: int) -> Tensor:
            sample = torch.cat([latents, channels], dim=1)
            timesteps = torch.full((len(sample),), sampler.timesteps[number], device=device)
            return predict_noise(sample, timesteps, states).float()

        latents = sampler.run(generation.initial_noise(seeds, channels.shape[-1]).to(device), predict_step)
        weight = next(networks.vae.parameters())
        decoded = networks.vae.decode((latents / networks.vae.config.scaling_factor).to(weight.dtype)).sample
    # The VAE changes kept pixels slightly when it encodes and decodes them, so the originals are pasted back.
    return torch.where(masks > 0.5, decoded.float().clamp(-1, 1), images)
