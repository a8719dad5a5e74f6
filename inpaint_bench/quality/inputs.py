"""What the networks are given outside training: the same at every call, so that two models can be compared.

B images of R x R pixels, latents of R/8. Unlike training nothing is drawn here: a latent is the mean of what the
VAE gives, and a position is known or not. Under whatever autocast the caller has set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from inpaint_bench.models.networks import Models

# state [B, 9, R/8, R/8], times [B] int64, context [B, L, C] -> predicted noise [B, 4, R/8, R/8]
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def evaluating(nets: Models) -> Iterator[None]:
    """No gradients, and networks in evaluation mode; afterwards as they were."""
    trained = [network for network in (nets.unet, nets.location) if network]
    before = [network.training for network in trained]
    try:
        for network in trained:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for network, training in zip(trained, before, strict=True):
            network.train(training)


def device_of(nets: Models) -> torch.device:
    return nets.signal.device


def latents(nets: Models, image: Tensor) -> Tensor:
    """[B, 3, R, R] in -1..1 -> [B, 4, R/8, R/8] float32, scaled."""
    weight = next(nets.vae.parameters())
    mean: Tensor = nets.vae.encode(image.to(weight.device, weight.dtype)).latent_dist.mode()
    return mean.float() * nets.vae.config.scaling_factor


def hidden(nets: Models, image: Tensor, mask: Tensor) -> Tensor:
    """[B, 3, R, R] and [B, 1, R, R] (1 = repaint) -> the five channels beside the noisy latents, float32."""
    masked = latents(nets, image * (mask < 0.5))
    return torch.cat([F.interpolate(mask.float(), size=masked.shape[-2:], mode="nearest"), masked], dim=1)


def context(nets: Models, tokens: Tensor, latitude: Tensor, longitude: Tensor) -> Tensor:
    """[B, L] ids and [B], [B] degrees (NaN: not known) -> [B, L + location tokens, C]."""
    text: Tensor = nets.text_encoder(tokens).last_hidden_state
    if nets.location is None:
        return text
    absent = latitude.isnan() | longitude.isnan()
    place = nets.location(latitude, longitude, absent)
    return torch.cat([text, place.to(text.dtype)], dim=1)


def plain(nets: Models) -> Predict:
    """The UNet as it stands in `nets`."""
    dtype = next(nets.unet.parameters()).dtype

    def predict(state: Tensor, times: Tensor, context: Tensor) -> Tensor:
        noise: Tensor = nets.unet(state.to(dtype), times, context.to(dtype), return_dict=False)[0]
        return noise

    return predict
