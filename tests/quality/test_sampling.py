"""Restored images: pixels outside the mask, seeds, positions."""

from __future__ import annotations

import torch
from torch import Tensor

from inpaint_bench.models.generation import restore
from inpaint_bench.models.networks import Networks

from .support import tiny

STEPS = 3


def inputs(nets: Networks, count: int = 2) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    masks = torch.zeros(count, 1, 32, 32)
    masks[:, :, 8:24, 4:20] = 1
    return {
        "image": torch.rand(count, 3, 32, 32, generator=random) * 2 - 1,
        "mask": masks,
        "tokens": nets.tokenize(["a house"] * count),
        "latitude": torch.full((count,), 55.7, dtype=torch.float64),
        "longitude": torch.full((count,), 13.2, dtype=torch.float64),
    }


def test_only_masked_pixels_change() -> None:
    nets = tiny()
    arguments = inputs(nets)
    restored = restore(nets, arguments, STEPS, [0, 1])
    hole = arguments["mask"].expand_as(restored) > 0.5
    assert torch.equal(restored[~hole], arguments["image"][~hole])
    assert not torch.equal(restored[hole], arguments["image"][hole])
    assert -1 <= restored.min() <= restored.max() <= 1


def test_pixels_under_the_mask_have_no_influence() -> None:
    nets = tiny()
    arguments = inputs(nets)
    hidden = {**arguments, "image": torch.where(arguments["mask"] > 0.5, torch.ones(()), arguments["image"])}
    assert torch.equal(restore(nets, arguments, STEPS, [0, 1]), restore(nets, hidden, STEPS, [0, 1]))


def test_networks_stay_in_training_mode_and_random_state_unchanged() -> None:
    nets = tiny()
    before = torch.get_rng_state()
    restored = restore(nets, inputs(nets), STEPS, [0, 1])
    assert nets.unet.training
    assert not restored.requires_grad
    assert torch.equal(torch.get_rng_state(), before), "training's random numbers are untouched"
