"""The validation loss: equal noise, timesteps and masks at every call."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from inpaint_bench.data.samples import Batch
from inpaint_bench.models.networks import Networks
from inpaint_bench.workloads.evaluation import losses, timestep

from .support import listening, tiny


def held(nets: Networks, sizes: tuple[int, ...] = (4, 4)) -> list[Batch]:
    """The same eight or so images however they are cut into batches."""
    random = torch.Generator().manual_seed(0)
    count = sum(sizes)
    masks = torch.zeros(count, 1, 32, 32)
    masks[:, :, 8:24] = 1
    whole = {
        "image": torch.rand(count, 3, 32, 32, generator=random) * 2 - 1,
        "mask": masks,
        "latitude": torch.linspace(55.70, 55.71, count, dtype=torch.float64),
        "longitude": torch.linspace(13.20, 13.21, count, dtype=torch.float64),
        "tokens": nets.tokenize(["a house"]).expand(count, -1),
    }
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [{name: value[a:b] for name, value in whole.items()} for a, b in pairwise(edges)]


def test_is_equal_at_every_call() -> None:
    nets = tiny()
    first = losses(nets, held(nets))
    torch.manual_seed(99)
    torch.rand(5)
    assert torch.equal(losses(nets, held(nets)), first)
    assert first.shape == (8,)


def test_changes_neither_random_state_nor_networks() -> None:
    nets = tiny()
    before = torch.get_rng_state()
    losses(nets, held(nets))
    assert torch.equal(torch.get_rng_state(), before)
    assert nets.unet.training
    assert all(p.grad is None for p in nets.trainable_parameters())


def test_does_not_depend_on_the_batch_size() -> None:
    nets = tiny()
    assert torch.allclose(losses(nets, held(nets, (4, 4))), losses(nets, held(nets, (1, 5, 2))), atol=1e-5)


def test_exact_prediction_has_no_loss_and_zeros_have_one() -> None:
    nets = tiny()
    batches = held(nets, (64,))
    clean = nets.vae.encode(batches[0]["image"]).latent_dist.mode() * nets.vae.config.scaling_factor

    def exact(state: Tensor, times: Tensor, _: Tensor) -> Tensor:
        signal_weight = nets.signal_weights[times, None, None, None]
        noise_weight = nets.noise_weights[times, None, None, None]
        return (state[:, :4] - signal_weight * clean) / noise_weight

    assert float(losses(nets, batches, predict=exact).mean()) < 1e-5
    zeros = losses(nets, batches, predict=lambda state, *_: torch.zeros_like(state[:, :4]))
    assert float(zeros.mean()) == pytest.approx(1, abs=0.1)


def test_timesteps_fill_the_schedule_evenly() -> None:
    drawn = [timestep(number, 1024) for number in range(64)]
    assert sorted(time * 64 // 1024 for time in drawn) == list(range(64))
    assert [timestep(number, 1000) for number in range(4)] == [0, 500, 250, 750]


class TestShuffledPositions:
    def test_every_image_has_another_ones_position_and_the_same_noise(self) -> None:
        nets = listening()
        assert nets.location is not None
        results: list[Tensor] = []
        tokens: list[Tensor] = []
        for shuffle in (False, True):
            contexts: list[Tensor] = []

            def predict(state: Tensor, _: Tensor, context: Tensor, contexts: list[Tensor] = contexts) -> Tensor:
                contexts.append(context[:, -4:])
                return torch.zeros_like(state[:, :4])

            results.append(losses(nets, held(nets), predict=predict, shuffle_positions=shuffle))
            tokens.append(torch.cat(contexts))
        assert torch.equal(*results)
        true, shuffled = tokens
        equal = [[torch.allclose(new, old, atol=1e-6) for old in true] for new in shuffled]
        assert [sum(row) for row in equal] == [1] * 8, "every position belongs to one image"
        assert not any(equal[number][number] for number in range(8)), "and never to the image itself"
