"""Restoring pictures: what is kept stays, seeds rule, and positions reach the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inpaint_bench.models.networks import Networks
from inpaint_bench.quality.sampling import restore

from .support import listening, tiny

STEPS = 3


def inputs(nets: Networks, count: int = 2) -> dict[str, Any]:
    random = torch.Generator().manual_seed(3)
    masks = torch.zeros(count, 1, 32, 32)
    masks[:, :, 8:24, 4:20] = 1
    return {
        "images": torch.rand(count, 3, 32, 32, generator=random) * 2 - 1,
        "masks": masks,
        "tokens": nets.tokenize(["a house"] * count),
        "latitude": torch.full((count,), 55.7, dtype=torch.float64),
        "longitude": torch.full((count,), 13.2, dtype=torch.float64),
        "steps": STEPS,
    }


def test_only_what_is_masked_changes() -> None:
    nets = tiny()
    given = inputs(nets)
    restored = restore(nets, **given, seed=0)
    hole = given["masks"].expand_as(restored) > 0.5
    assert torch.equal(restored[~hole], given["images"][~hole])
    assert not torch.equal(restored[hole], given["images"][hole])
    assert -1 <= restored.min() <= restored.max() <= 1


def test_what_lies_under_the_mask_is_not_looked_at() -> None:
    nets = tiny()
    given = inputs(nets)
    hidden = {**given, "images": torch.where(given["masks"] > 0.5, torch.ones(()), given["images"])}
    assert torch.equal(restore(nets, **given, seed=0), restore(nets, **hidden, seed=0))


def test_a_seed_fixes_each_image_whatever_else_is_in_the_batch() -> None:
    nets = tiny()
    both = restore(nets, **inputs(nets), seed=[5, 6])
    second: dict[str, Any] = {
        name: value[1:] if isinstance(value, Tensor) else value for name, value in inputs(nets).items()
    }
    assert torch.allclose(restore(nets, **second, seed=[6]), both[1:], atol=1e-4)
    assert torch.equal(restore(nets, **inputs(nets), seed=5), both), "one number counts up"
    assert not torch.allclose(restore(nets, **inputs(nets), seed=7), both, atol=1e-2)


def test_positions_matter_once_the_gate_is_open() -> None:
    def apart(nets: Networks, latitude: float) -> float:
        given = inputs(nets)
        elsewhere = {**given, "latitude": torch.full((2,), latitude, dtype=torch.float64)}
        return float((restore(nets, **given, seed=0) - restore(nets, **elsewhere, seed=0)).abs().max())

    assert apart(tiny(), 55.701) == 0
    assert apart(listening(), 55.701) > 0
    assert apart(listening(), float("nan")) > 0, "the null token"


def test_guidance_steers_and_one_is_none() -> None:
    nets = listening()
    plain, same, steered = (restore(nets, **inputs(nets), seed=0, guidance=w) for w in (1.0, 1.0, 7.5))
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, steered, atol=1e-3)


def test_a_model_that_knows_the_noise_ends_at_the_clean_latent_and_the_noise_of_the_first_time() -> None:
    """DDIM follows one line from the first noise; SD's settings end it at time 0, where 3 % of it is left."""
    nets = tiny()
    given = inputs(nets)
    clean = nets.vae.encode(given["images"]).latent_dist.mode() * nets.vae.config.scaling_factor
    times: list[int] = []

    def noise_in(state: Tensor, time: int) -> Tensor:
        return (state[:, :4] - nets.sqrt_alphas_cumprod[time] * clean) / nets.sqrt_one_minus_alphas_cumprod[time]

    def oracle(state: Tensor, now: Tensor, _: Tensor) -> Tensor:
        times.append(int(now[0]))
        return noise_in(state, times[-1])

    restored = restore(nets, **{**given, "steps": 20}, seed=[5, 6], predict=oracle)
    start = torch.stack([torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)])
    end = nets.sqrt_alphas_cumprod[0] * clean + nets.sqrt_one_minus_alphas_cumprod[0] * noise_in(start, times[0])
    expected = nets.vae.decode(end / nets.vae.config.scaling_factor).sample.clamp(-1, 1)
    hole = given["masks"].expand_as(restored) > 0.5
    assert torch.allclose(restored[hole], expected[hole], atol=0.01)
    assert times == list(range(951, 0, -50))


def test_networks_are_left_training_and_without_gradients_of_it() -> None:
    nets = tiny()
    before = torch.get_rng_state()
    restored = restore(nets, **inputs(nets), seed=0)
    assert nets.unet.training
    assert not restored.requires_grad
    assert torch.equal(torch.get_rng_state(), before), "training's random numbers are untouched"


def test_impossible_steps_and_seeds_are_refused() -> None:
    nets = tiny()
    with pytest.raises(ValueError, match="steps=0: must lie between 1 and 1000"):
        restore(nets, **{**inputs(nets), "steps": 0}, seed=0)
    with pytest.raises(ValueError, match="1 seeds for 2 images"):
        restore(nets, **inputs(nets), seed=[1])
