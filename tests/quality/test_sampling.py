"""Restored images: pixels outside the mask, seeds, positions."""

from __future__ import annotations

import torch
from torch import Tensor

from inpaint_bench.models.generation import restore
from inpaint_bench.models.networks import Networks

from .support import listening, tiny

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


def test_result_of_a_seed_does_not_depend_on_the_batch() -> None:
    nets = tiny()
    both = restore(nets, inputs(nets), STEPS, [5, 6])
    second = {name: value[1:] for name, value in inputs(nets).items()}
    assert torch.allclose(restore(nets, second, STEPS, [6]), both[1:], atol=1e-4)
    assert not torch.allclose(restore(nets, inputs(nets), STEPS, [7, 8]), both, atol=1e-2)


def test_positions_change_the_result_once_the_gate_is_open() -> None:
    def difference(nets: Networks, latitude: float) -> float:
        arguments = inputs(nets)
        elsewhere = {**arguments, "latitude": torch.full((2,), latitude, dtype=torch.float64)}
        return float((restore(nets, arguments, STEPS, [0, 1]) - restore(nets, elsewhere, STEPS, [0, 1])).abs().max())

    assert difference(tiny(), 55.701) == 0
    assert difference(listening(), 55.701) > 0
    assert difference(listening(), float("nan")) > 0, "the null token"


def test_exact_noise_prediction_ends_at_the_clean_latent() -> None:
    """DDIM follows one line from the first noise; SD's settings end it at time 0, where 3 % of it is left."""
    nets = tiny()
    arguments = inputs(nets)
    clean = nets.vae.encode(arguments["image"]).latent_dist.mode() * nets.vae.config.scaling_factor
    times: list[int] = []

    def noise_in(state: Tensor, time: int) -> Tensor:
        return (state[:, :4] - nets.signal_weights[time] * clean) / nets.noise_weights[time]

    def oracle(state: Tensor, now: Tensor, _: Tensor) -> Tensor:
        times.append(int(now[0]))
        return noise_in(state, times[-1])

    restored = restore(nets, arguments, 20, [5, 6], predict=oracle)
    start = torch.stack([torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)])
    end = nets.signal_weights[0] * clean + nets.noise_weights[0] * noise_in(start, times[0])
    expected = nets.vae.decode(end / nets.vae.config.scaling_factor).sample.clamp(-1, 1)
    hole = arguments["mask"].expand_as(restored) > 0.5
    assert torch.allclose(restored[hole], expected[hole], atol=0.01)
    assert times == list(range(951, 0, -50))


def test_networks_stay_in_training_mode_and_random_state_unchanged() -> None:
    nets = tiny()
    before = torch.get_rng_state()
    restored = restore(nets, inputs(nets), STEPS, [0, 1])
    assert nets.unet.training
    assert not restored.requires_grad
    assert torch.equal(torch.get_rng_state(), before), "training's random numbers are untouched"
