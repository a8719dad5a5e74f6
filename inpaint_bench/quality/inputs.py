"""The networks outside training. Autocast is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
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


def unet_prediction(networks: Networks) -> Predict:
    """Return the prediction of the plain UNet."""
    dtype = next(networks.unet.parameters()).dtype

    def predict(sample: Tensor, timesteps: Tensor, states: Tensor) -> Tensor:
        noise: Tensor = networks.unet(sample.to(dtype), timesteps, states.to(dtype), return_dict=False)[0]
        return noise

    return predict
