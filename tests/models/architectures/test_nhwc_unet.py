"""The channels-last UNet and encoder compute what diffusers' do: outputs, gradients, weights."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from inpaint_bench.core.errors import UserError
from inpaint_bench.kernels import dispatch
from inpaint_bench.models.architectures import location
from inpaint_bench.models.architectures.nhwc_unet import NhwcUNet
from inpaint_bench.models.architectures.nhwc_vae import NhwcDecoder, NhwcEncoder

WIDTH = 24


def diffusers_unet(dtype: torch.dtype, **changes: object) -> UNet2DConditionModel:
    torch.manual_seed(0)
    settings = {
        "sample_size": 16,
        "in_channels": 9,
        "out_channels": 4,
        "block_out_channels": [16, 32, 32, 32],
        "layers_per_block": 2,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        **changes,
    }
    unet = UNet2DConditionModel(**settings).to(dtype)
    with torch.no_grad():
        for parameter in unet.parameters():
            if parameter.ndim == 1:  # no norm at its initial ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return unet


SD2: dict[str, object] = {"attention_head_dim": [1, 2, 4, 4], "use_linear_projection": True}


@pytest.mark.parametrize(
    ("dtype", "tolerance", "changes"),
    [(torch.float64, 1e-11, {}), (torch.float64, 1e-11, SD2), (torch.float32, 2e-4, {})],
)
def test_outputs_and_gradients_equal_those_of_diffusers(
    dtype: torch.dtype, tolerance: float, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 the references run, in float32 the kernels themselves, in Triton's interpreter."""
    if dtype is torch.float32:
        pytest.importorskip("triton")
        monkeypatch.setattr(dispatch, "interpret", True)
    small = {
        "block_out_channels": [16, 32],
        "layers_per_block": 1,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    }
    interpreted = dtype is torch.float32  # which is slow
    side, unet = (8, diffusers_unet(dtype, **small)) if interpreted else (16, diffusers_unet(dtype, **changes))
    encoder = location.LocationEncoder(4, WIDTH, (30.0, -96.0)).to(dtype)
    torch.nn.init.constant_(encoder.gate, 0.5)
    location.install(unet, encoder)
    network = NhwcUNet.from_diffusers(unet, encoder)
    sample, steps = torch.randn(2, 9, side, side, dtype=dtype), torch.tensor([3, 700])
    text = torch.randn(2, 7 + 4, WIDTH, dtype=dtype)
    weight = torch.randn(2, 4, side, side, dtype=dtype)
    results = []
    for model in (unet, network):
        given = text.clone().requires_grad_()
        encoder.gate.grad = None
        prediction = model(sample, steps, given, return_dict=False)[0]
        (prediction * weight).sum().backward()
        assert given.grad is not None
        assert encoder.gate.grad is not None
        results.append([prediction.detach(), given.grad, encoder.gate.grad.clone()])
    for expected, computed in zip(*results, strict=True):
        assert float((computed - expected).norm()) <= tolerance * float(expected.norm())

    gradients = network.unpack(attrgetter("grad"))
    total = torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None]).norm()
    for name, parameter in unet.named_parameters():
        assert parameter.grad is not None
        assert float((gradients[name] - parameter.grad).norm()) <= tolerance * float(total), name


@pytest.mark.parametrize("changes", [{}, SD2], ids=["SD 1.5", "SD 2"])
def test_packed_weights_equal_those_of_diffusers(tmp_path: Path, changes: dict[str, object]) -> None:
    unet = diffusers_unet(torch.float32, **changes)
    state, network = unet.state_dict(), NhwcUNet.from_diffusers(unet)
    back = network.unpack()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert network.num_parameters() == unet.num_parameters()
    network.save_pretrained(tmp_path)
    saved = UNet2DConditionModel.from_pretrained(tmp_path, low_cpu_mem_usage=False).state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_another_kind_of_unet_is_refused() -> None:
    with pytest.raises(UserError, match="upcast_attention=False, this model has True"):
        NhwcUNet.from_diffusers(diffusers_unet(torch.float32, upcast_attention=True))


CODERS = {"encoder": NhwcEncoder, "decoder": NhwcDecoder}
INPUTS = {"encoder": (3, 64, 64), "decoder": (4, 8, 8)}


def diffusers_vae(**changes: object) -> AutoencoderKL:
    torch.manual_seed(0)
    settings = {
        "latent_channels": 4,
        "block_out_channels": [16, 32, 32, 32],
        "layers_per_block": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "norm_num_groups": 8,
        **changes,
    }
    vae = AutoencoderKL(**settings)
    with torch.no_grad():
        for parameter in vae.parameters():  # no norm at its initial ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return vae


@pytest.mark.parametrize("coder", ["encoder", "decoder"])
def test_encoder_and_decoder_equal_those_of_diffusers(coder: str) -> None:
    vae, given = diffusers_vae().double(), torch.randn(2, *INPUTS[coder], dtype=torch.float64)
    with torch.no_grad():
        expected = getattr(vae, coder)(given)
    torch.testing.assert_close(CODERS[coder](vae, torch.float64)(given), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("coder", ["encoder", "decoder"])
def test_their_kernels_equal_the_reference(coder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    channels, *sides = INPUTS[coder]
    vae, given = diffusers_vae(layers_per_block=1), torch.randn(1, channels, *(side // 2 for side in sides))
    expected = CODERS[coder](vae, torch.float64)(given)
    monkeypatch.setattr(dispatch, "interpret", True)
    computed = CODERS[coder](vae, torch.float32)(given)
    assert float((computed - expected).norm()) <= 1e-5 * float(expected.norm())


def test_another_kind_of_vae_is_refused() -> None:
    with pytest.raises(UserError, match="4 latent channels"):
        NhwcEncoder(diffusers_vae(latent_channels=6), torch.float32)
