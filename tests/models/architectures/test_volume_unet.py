"""The 3-D UNet: the published shapes, its diffusion process, and its memory layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from analysis import published
from inpaint_bench.core.workloads._volumes import SHAPES
from inpaint_bench.models.architectures.volume_unet import Attention, Diffusion, GroupNorm, VolumeUNet

PUBLISHED = {"whole_head": "whole_head", "brats": "brats_4mod"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_published_ones(name):
    models = {row["variant"]: row for row in published.read("medddpm_models.csv").to_dicts()}
    expected, shape = models[PUBLISHED[name]], SHAPES[name]
    with torch.device("meta"):
        network = VolumeUNet(shape)
        volume = torch.empty(1, shape.image_channels + shape.label_channels, *shape.volume)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            out = network(volume, torch.zeros(1, dtype=torch.long))
    modules = list(network.modules())
    counted = [sum(isinstance(m, kind) for m in modules) for kind in (nn.Conv3d, nn.GroupNorm, Attention)]
    assert out.shape == (1, expected["out_ch"], *shape.volume)
    assert sum(p.numel() for p in network.parameters()) == expected["params"]
    assert counted == [expected[key] for key in ("conv3d", "groupnorm", "attn_blocks")]
    assert counter.get_total_flops() / 1e12 == pytest.approx(expected["fwd_tflop"], rel=0.002)


def tiny() -> tuple[VolumeUNet, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return VolumeUNet(SHAPES["tiny"]), torch.randn(2, 3, 16, 16, 16), torch.tensor([3, 200])


def test_channels_last_computes_the_same():
    network, volume, steps = tiny()
    results = []
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        network.to(memory_format=layout)
        out = network(volume.contiguous(memory_format=layout), steps)
        network.zero_grad()
        out.square().mean().backward()
        results.append([out, *(p.grad.clone() for p in network.parameters())])
    for contiguous, channels_last in zip(*results, strict=True):
        assert torch.allclose(channels_last, contiguous, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_every_convolution_reads_channels_last(threads):
    """With one thread PyTorch computes 1x1x1 convolutions on a CPU with a kernel whose results are contiguous."""
    network, volume, steps = tiny()
    network.to(memory_format=torch.channels_last_3d)
    layouts = []
    for module in network.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_pre_hook(
                lambda _, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last_3d))
            )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        network(volume.contiguous(memory_format=torch.channels_last_3d), steps)
    finally:
        torch.set_num_threads(before)
    assert layouts == [True] * 25


@pytest.mark.parametrize("count", [1, 2])
def test_the_norm_leaves_the_layout_as_it_is(count):
    norm, volume = GroupNorm(64), torch.randn(count, 64, 4, 6, 8) + 3
    out = norm(volume.contiguous(memory_format=torch.channels_last_3d))
    assert out.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.allclose(out, norm(volume), atol=1e-5)
    assert norm(volume).is_contiguous()


def test_a_training_starts_with_no_predicted_noise():
    network, volume, steps = tiny()
    assert network(volume, steps).abs().max() > 0
    network.zero_last_layers()
    assert network(volume, steps).abs().max() == 0


def test_noise_grows_with_the_steps_and_is_removed_again():
    diffusion = Diffusion(250, torch.device("cpu"))
    kept = diffusion.kept.tolist()
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.999
    assert kept[-1] < 0.001
    volume, noise, steps = torch.rand(1, 1, 4, 4, 4), torch.randn(1, 1, 4, 4, 4), torch.tensor([100])
    noisy = diffusion.add_noise(volume, noise, steps)
    assert torch.allclose(diffusion.estimate(noisy, noise, steps), volume, atol=1e-4)
    assert torch.allclose(diffusion.denoise(noisy, noise, 100, None, noise), volume, atol=1e-4)


def test_a_subset_of_the_steps_has_the_first_and_the_last():
    diffusion = Diffusion(250, torch.device("cpu"))
    assert diffusion.subset(250) == list(range(249, -1, -1))
    assert diffusion.subset(3) == [249, 124, 0]
