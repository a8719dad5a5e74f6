"""Inputs of the networks outside training: equal at every call, so that two models can be compared.

B images of R x R pixels, latents of r x r (r = R / 8). Unlike in training nothing is drawn here: latents are the mean
of the VAE's distribution, and positions are known or not. Autocast is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from inpaint_bench.models.networks import Networks

# sample [B, 9, r, r], timesteps [B] int64, states [B, L + P, D] -> predicted noise [B, 4, r, r]
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def evaluation_mode(networks: Networks) -> Iterator[None]:
    """Compute no gradients and put the trained networks into evaluation mode within the block."""
    trained = [network for network in (networks.unet, networks.location) if network]
    modes = [network.training for network in trained]
    try:
        for network in trained:
            network.eval()
        with torch.no_grad():
            yield
    finally:
        for network, training in zip(trained, modes, strict=True):
            network.train(training)


def mean_latents(networks: Networks, image: Tensor) -> Tensor:
    """[B, 3, R, R] in -1..1 -> [B, 4, r, r] float32, scaled."""
    weight = next(networks.vae.parameters())
    # The mode of a Gaussian is its mean, so nothing is drawn.
    mean: Tensor = networks.vae.encode(image.to(weight.device, weight.dtype)).latent_dist.mode()
    return mean.float() * networks.vae.config.scaling_factor


def inpainting_channels(networks: Networks, image: Tensor, mask: Tensor) -> Tensor:
    """[B, 3, R, R] and [B, 1, R, R] (1 = repaint) -> the UNet's five channels after the noisy latents, float32."""
    masked = mean_latents(networks, image * (mask < 0.5))
    return torch.cat([F.interpolate(mask.float(), size=masked.shape[-2:], mode="nearest"), masked], dim=1)


def encoder_states(networks: Networks, tokens: Tensor, latitude: Tensor, longitude: Tensor) -> Tensor:
    """[B, L] token ids, [B] and [B] degrees (NaN: unknown) -> [B, L + P, D] text and location states."""
    text: Tensor = networks.text_encoder(tokens).last_hidden_state
    if networks.location is None:
        return text
    location = networks.location(latitude, longitude, latitude.isnan() | longitude.isnan())
    return torch.cat([text, location.to(text.dtype)], dim=1)


def unet_prediction(networks: Networks) -> Predict:
    """Return the prediction of the plain UNet."""
    dtype = next(networks.unet.parameters()).dtype

    def predict(sample: Tensor, timesteps: Tensor, states: Tensor) -> Tensor:
        noise: Tensor = networks.unet(sample.to(dtype), timesteps, states.to(dtype), return_dict=False)[0]
        return noise

    return predict
