"""Images of prompts: samplers, guidance, and the channels-last UNet with keys and values computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inpaint_bench.kernels import dispatch
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.generation import SAMPLERS, Generation, Sampler, baseline_execution, initial_noise
from inpaint_bench.models.networks import Networks, build_networks
from tests.run.support import bench

CPU = torch.device("cpu")


def networks(model: str = "tiny") -> Networks:
    torch.manual_seed(0)
    nets = build_networks(bench(f"model={model}").model, CPU, inputs=(4, 9))
    if nets.location:
        torch.nn.init.constant_(nets.location.gate, 1.0)
    return nets


def images(nets: Networks, *, sampler: str = "plms", guidance: float = 7.5, latitude: float = 1.0) -> Tensor:
    execution = baseline_execution(bench("workload=sd_inference"), CPU, nets)
    generation = Generation(execution=execution, sampler=Sampler(sampler, nets, 4, 4), guidance=guidance)
    unknown = [float("nan")] * 2 if generation.guided else []
    degrees = torch.tensor([*unknown, latitude * 1e-4, 2e-4], dtype=torch.float64)
    tokens = nets.tokenize([*([""] * len(unknown)), "a house", "a tree"])
    states = generation.encode_text(tokens, degrees, degrees)
    channels = None
    if nets.unet.config.in_channels == 9:
        mask = torch.zeros(2, 1, 32, 32)
        mask[:, :, 8:24] = 1
        channels = generation.encode_image(torch.linspace(-1, 1, 32).expand(2, 3, 32, 32), mask)
    return generation.decode(generation.sample(initial_noise([1, 2], 4, 4), states, channels))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS.keys() - {"euler"}))
@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_both_unets_make_the_same_images(sampler: str, guidance: float) -> None:
    nets = networks("tiny_inpaint")
    expected = images(nets, sampler=sampler, guidance=guidance)
    nets.unet = NhwcUNet.from_diffusers(nets.unet, nets.location)
    assert torch.allclose(images(nets, sampler=sampler, guidance=guidance), expected, atol=1e-4)
    assert expected.shape == (2, 3, 32, 32)
    assert -1 <= expected.min() < expected.max() <= 1


def test_kernels_take_time_projections_that_all_images_share(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    nets = networks("tiny_inpaint")
    unet = NhwcUNet.from_diffusers(nets.unet, nets.location)
    sample, states, timestep = torch.randn(2, 9, 8, 8), torch.randn(2, 77 + 4, 32), torch.tensor([300])
    with torch.no_grad():
        expected = unet(sample, timestep.expand(2), states)[0]
        monkeypatch.setattr(dispatch, "interpret", True)
        shifts = [shift.expand(2, -1) for shift in unet.shifts(timestep)]
        computed = unet.predict(sample, shifts, unet.keys_values(states))
    assert float((computed - expected).norm()) <= 1e-4 * float(expected.norm())


def test_a_second_batch_does_not_depend_on_the_first() -> None:
    nets = networks()
    execution = baseline_execution(bench("workload=sd_inference"), CPU, nets)
    generation = Generation(execution=execution, sampler=Sampler("plms", nets, 4, 4), guidance=1.0)
    states = generation.encode_text(nets.tokenize(["a house"]), torch.zeros(1), torch.zeros(1))
    first, second = (generation.sample(initial_noise([1], 4, 4), states) for _ in range(2))
    assert torch.equal(first, second)


def test_position_and_guidance_change_the_images() -> None:
    nets = networks("tiny_inpaint")
    usual = images(nets)
    assert (images(nets, latitude=500.0) - usual)[0].abs().max() > 0
    assert torch.equal(images(nets, latitude=500.0)[1], usual[1])
    assert (images(nets, guidance=2.0) - usual).abs().max() > 0


@pytest.mark.parametrize(("sampler", "evaluations"), [("plms", 51), ("ddim", 50), ("dpmpp", 50)])
def test_plms_evaluates_the_unet_once_more_than_it_has_steps(sampler: str, evaluations: int) -> None:
    assert len(Sampler(sampler, networks(), 50, 4).timesteps) == evaluations


@pytest.mark.parametrize("name", sorted(SAMPLERS.keys() - {"euler"}))
def test_exact_noise_leads_back_to_the_clean_latents(name: str) -> None:
    nets = networks()
    sampler, clean, noise = Sampler(name, nets, 20, 4), torch.full((1, 4, 4, 4), 0.7), initial_noise([3], 4, 4)

    def exact(latents: Tensor, number: int) -> Tensor:
        time = sampler.timesteps[number]
        return (latents - nets.signal_weights[time] * clean) / nets.noise_weights[time]

    # SD's own settings end PLMS and DDIM at time 0, where 3 % of the noise is left.
    assert torch.allclose(sampler.run(noise, exact), clean, atol=0.12)
