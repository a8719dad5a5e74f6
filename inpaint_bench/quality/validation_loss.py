"""The held-out loss: the same question at every call, in every recipe, so that two answers can be compared.

Sample k is asked at one timestep and with one noise, both functions of k alone: the times are the van der Corput
sequence over the schedule, of which the first 2^m fall one into each of 2^m equal strata, the noise is drawn on the
processor with k as seed. The images and masks are the caller's, and fixed if those are. Nothing here reads or moves
any other random state, so that a run with validation trains as one without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inpaint_bench.models.networks import LATENT_CHANNELS, Models

from .inputs import Predict, context, device_of, evaluating, hidden, latents, plain

POSITIONS = ("true", "shuffled", "none")
SEED = 2_025  # apart from training's seeds: samples with the same number share no noise
Held = dict[str, Tensor]  # a batch as in data/loader.py; image, mask, latitude, longitude and tokens are read


def validate(
    nets: Models, batches: Iterable[Held], *, predict: Predict | None = None, positions: str = "true"
) -> dict[str, Any]:
    """{"loss": mean squared error of the predicted noise, "n": images}; see `losses`."""
    each = losses(nets, batches, predict=predict, positions=positions)
    return {"loss": float(each.mean()), "n": len(each)}


def losses(nets: Models, batches: Iterable[Held], *, predict: Predict | None = None, positions: str = "true") -> Tensor:
    """[N] float64 on the processor: each image's mean squared error, over all its latents.

    `predict(state, times, context)` gives the noise (default: the UNet itself); a compiled or cast one goes there.
    `positions`: "true"; "shuffled", where every image has another one's (the same at every call), which tells
    whether positions help or merely any position does; or "none", the learned null tokens. The three are asked
    with the same noise and times, so their difference is paired. The result does not depend on the batches' size,
    but for rounding. Synchronises with the device.

    Raises ValueError where there is no image, for another word, and for one image that is to be shuffled.
    """
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r}: not one of {', '.join(POSITIONS)}")
    held = list(batches)
    count = sum(len(batch["image"]) for batch in held)
    if not count:
        raise ValueError("nothing is held out: no image to validate on")
    places = _places(held, positions)
    device, predict = device_of(nets), predict or plain(nets)
    found, start = [], 0
    with evaluating(nets):
        for batch in held:
            numbers = range(start, start + len(batch["image"]))
            start = numbers.stop
            latitude, longitude = places[numbers.start : numbers.stop].to(device).unbind(1)
            image, mask = batch["image"].to(device), batch["mask"].to(device)
            latent = latents(nets, image)
            times = torch.tensor([timestep(number, len(nets.signal)) for number in numbers], device=device)
            noise = torch.stack([_noise(number, latent.shape[-2:]) for number in numbers]).to(device)
            kept, added = nets.signal[times, None, None, None], nets.noise[times, None, None, None]
            state = torch.cat([kept * latent + added * noise, hidden(nets, image, mask)], dim=1)
            states = context(nets, batch["tokens"].to(device), latitude, longitude)
            wrong = predict(state, times, states).float() - noise
            found.append(wrong.square().mean(dim=(1, 2, 3)).double().cpu())
    return torch.cat(found)


def timestep(number: int, times: int) -> int:
    """Where in a schedule of `times` steps sample `number` is asked: its binary digits mirrored at the point."""
    share, digit = 0.0, 0.5
    while number:
        share += digit * (number & 1)
        number, digit = number >> 1, digit / 2
    return int(share * times)


def _noise(number: int, size: Sequence[int]) -> Tensor:
    return torch.randn((LATENT_CHANNELS, *size), generator=torch.Generator().manual_seed(SEED + number))


def _places(held: list[Held], positions: str) -> Tensor:
    """[N, 2] float64 degrees."""
    true = torch.cat([torch.stack([one["latitude"], one["longitude"]], dim=1).double().cpu() for one in held])
    if positions == "none":
        return torch.full_like(true, torch.nan)
    return true[list(_another(len(true)))] if positions == "shuffled" else true


def _another(count: int) -> Iterator[int]:
    """For each image the number of another one, each used once: neighbours on a circle in a seeded order."""
    if count < 2:
        raise ValueError("positions='shuffled' needs two images at least")
    order = np.random.default_rng(SEED).permutation(count)
    after = np.empty(count, np.int64)
    after[order] = np.roll(order, 1)
    yield from after.tolist()
