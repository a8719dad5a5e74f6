"""The validation loss, with noise and timesteps that are equal at every call and in every recipe.

Sample k has one timestep and one noise, both functions of k alone: the timesteps are the van der Corput sequence over
the schedule, of which the first 2^m fall one into each of 2^m equal strata; the noise is drawn on the CPU with k as
seed. Images and masks are the caller's. Nothing here reads or changes any other random state, so that a run with
validation trains as one without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from inpaint_bench.data.samples import Batch
from inpaint_bench.models import generation
from inpaint_bench.models.generation import Predict
from inpaint_bench.models.networks import LATENT_CHANNELS, Networks

SEED = 2_025  # different from training's: samples with the same number share no noise


def losses(
    networks: Networks, batches: Iterable[Batch], *, predict: Predict | None = None, shuffle_positions: bool = False
) -> Tensor:
    """Return each image's mean squared error over all its latents, [N] float64 on the CPU.

    `predict(sample, timesteps, states)` replaces the plain UNet. With `shuffle_positions` every image has another
    one's position (the same at every call), which tells whether the right position helps or merely any; noise and
    timesteps are the same, so that the differences are paired. The result does not depend on the batch size, but for
    rounding. Synchronises with the device.
    """
    held_out = list(batches)
    coordinates = torch.cat([torch.stack([b["latitude"], b["longitude"]], dim=1).double().cpu() for b in held_out])
    if shuffle_positions:
        coordinates = coordinates[_derangement(len(coordinates))]
    device, predict = networks.device, predict or generation.unet_prediction(networks)
    results, start = [], 0
    with generation.evaluation_mode(networks):
        for batch in held_out:
            # Numbered through all batches: the batch size must not change which noise an image gets.
            numbers = range(start, start + len(batch["image"]))
            start = numbers.stop
            latitude, longitude = coordinates[numbers.start : numbers.stop].to(device).unbind(1)
            image, mask = batch["image"].to(device), batch["mask"].to(device)
            latents = generation.mean_latents(networks, image)
            schedule = len(networks.sqrt_alphas_cumprod)
            timesteps = torch.tensor([timestep(number, schedule) for number in numbers], device=device)
            noise = torch.stack([_noise(number, latents.shape[-2:]) for number in numbers]).to(device)
            signal_weight = networks.sqrt_alphas_cumprod[timesteps, None, None, None]
            noise_weight = networks.sqrt_one_minus_alphas_cumprod[timesteps, None, None, None]
            noisy = signal_weight * latents + noise_weight * noise
            sample = torch.cat([noisy, generation.inpainting_channels(networks, image, mask)], dim=1)
            states = generation.encoder_states(networks, batch["tokens"].to(device), latitude, longitude)
            error = predict(sample, timesteps, states).float() - noise
            results.append(error.square().mean(dim=(1, 2, 3)).double().cpu())
    return torch.cat(results)


def timestep(number: int, schedule: int) -> int:
    """Return the timestep of sample `number`: its binary digits mirrored at the point, times the schedule's length."""
    mirrored = int(f"{number:b}"[::-1], 2)
    return mirrored * schedule >> number.bit_length()


def _noise(number: int, size: Sequence[int]) -> Tensor:
    return torch.randn((LATENT_CHANNELS, *size), generator=torch.Generator().manual_seed(SEED + number))


def _derangement(count: int) -> list[int]:
    """Return another image for every image, each one once: its predecessor in a seeded order. `count` is 2 or more."""
    order = np.random.default_rng(SEED).permutation(count)
    donors = np.empty(count, np.int64)
    donors[order] = np.roll(order, 1)
    return donors.tolist()
