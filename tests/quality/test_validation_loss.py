"""The held-out loss: the same question every time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from inpaint_bench.data.samples import Batch
from inpaint_bench.models.networks import Networks
from inpaint_bench.quality.validation_loss import losses, timestep, validate

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


def test_is_a_number_over_all_images_and_the_same_at_every_call() -> None:
    nets = tiny()
    first = validate(nets, held(nets))
    torch.manual_seed(99)
    torch.rand(5)
    assert validate(nets, held(nets)) == first
    assert first["n"] == 8
    assert first["loss"] == pytest.approx(float(losses(nets, held(nets)).mean()))


def test_neither_moves_training_s_random_numbers_nor_leaves_the_networks_changed() -> None:
    nets = tiny()
    before = torch.get_rng_state()
    validate(nets, held(nets))
    assert torch.equal(torch.get_rng_state(), before)
    assert nets.unet.training
    assert all(p.grad is None for p in nets.trainable_parameters())


def test_an_image_is_asked_the_same_in_batches_of_any_size() -> None:
    nets = tiny()
    assert torch.allclose(losses(nets, held(nets, (4, 4))), losses(nets, held(nets, (1, 5, 2))), atol=1e-5)


def test_whoever_knows_the_noise_has_no_loss_and_who_says_nothing_has_one() -> None:
    nets = tiny()
    batches = held(nets, (64,))
    clean = nets.vae.encode(batches[0]["image"]).latent_dist.mode() * nets.vae.config.scaling_factor

    def knows(state: Tensor, times: Tensor, _: Tensor) -> Tensor:
        signal_weight = nets.sqrt_alphas_cumprod[times, None, None, None]
        noise_weight = nets.sqrt_one_minus_alphas_cumprod[times, None, None, None]
        return (state[:, :4] - signal_weight * clean) / noise_weight

    assert validate(nets, batches, predict=knows)["loss"] < 1e-5
    silent = losses(nets, batches, predict=lambda state, *_: torch.zeros_like(state[:, :4]))
    assert float(silent.mean()) == pytest.approx(1, abs=0.1)


def test_times_fill_the_schedule_evenly() -> None:
    drawn = [timestep(number, 1024) for number in range(64)]
    assert sorted(time * 64 // 1024 for time in drawn) == list(range(64))
    assert [timestep(number, 1000) for number in range(4)] == [0, 500, 250, 750]


class TestPositions:
    def test_shuffled_ones_belong_to_other_images_and_the_rest_of_the_question_stays(self) -> None:
        seen: dict[str, Tensor] = {}
        nets = listening()
        assert nets.location is not None
        for positions in ("true", "shuffled", "none"):
            contexts: list[Tensor] = []

            def predict(state: Tensor, _: Tensor, context: Tensor, kept: list[Tensor] = contexts) -> Tensor:
                kept.append(context[:, -4:])
                return torch.zeros_like(state[:, :4])

            seen[positions] = losses(nets, held(nets), predict=predict, positions=positions)
            seen[f"{positions} tokens"] = torch.cat(contexts)
        assert torch.equal(seen["true"], seen["shuffled"])
        assert torch.equal(seen["true"], seen["none"])
        true, shuffled = seen["true tokens"], seen["shuffled tokens"]
        moved = [[torch.allclose(new, old, atol=1e-6) for old in true] for new in shuffled]
        assert [sum(row) for row in moved] == [1] * 8, "every position is someone's"
        assert not any(moved[number][number] for number in range(8)), "and never one's own"
        assert torch.equal(seen["none tokens"], nets.location.null.expand(8, -1, -1))

    def test_change_the_loss_only_where_the_model_listens(self) -> None:
        deaf, nets = tiny(), listening()
        assert validate(deaf, held(deaf)) == validate(deaf, held(deaf), positions="shuffled")
        assert validate(nets, held(nets)) != validate(nets, held(nets), positions="shuffled")

    def test_of_another_kind_and_single_images_to_shuffle_are_refused(self) -> None:
        nets = tiny()
        with pytest.raises(ValueError, match="'false': not one of true, shuffled, none"):
            losses(nets, held(nets), positions="false")
        with pytest.raises(ValueError, match="needs two images"):
            losses(nets, held(nets, (1,)), positions="shuffled")
        with pytest.raises(ValueError, match="nothing is held out"):
            losses(nets, [])
