"""The networks, their location path, and the arithmetic about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.utils._python_dispatch import TorchDispatchMode

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.models import flops
from inpaint_bench.models.architectures.location import LocationEncoder
from inpaint_bench.models.execution import set_fp32_precision
from inpaint_bench.models.networks import Networks, build_networks
from inpaint_bench.models.pipeline_folder import hash_tokenizer, save_byte_tokenizer
from inpaint_bench.models.training_step import diffusion_loss, draw
from inpaint_bench.workloads import finetune_inpaint
from tests.run.support import bench, constant_batch

CPU = torch.device("cpu")


def tiny(*overrides: str) -> ModelConfig:
    return bench(*overrides).model


def save(folder: Path, channels: int = 9) -> Networks:
    """A diffusers folder with tiny random networks."""
    torch.manual_seed(1)
    config = tiny("model.location_tokens=0")
    nets = build_networks(config, CPU)
    if channels != 9:
        nets.unet = UNet2DConditionModel(**{**config.unet, "in_channels": channels})
    nets.unet.save_pretrained(folder / "unet")
    nets.vae.save_pretrained(folder / "vae")
    nets.text_encoder.save_pretrained(folder / "text_encoder")
    DDPMScheduler(**config.scheduler).save_pretrained(folder / "scheduler")
    save_byte_tokenizer(folder / "tokenizer", nets.text_encoder.config)
    return nets


class TestFullModel:
    def test_has_the_parameters_of_sd15_inpainting(self) -> None:
        nets = build_networks(bench("model=sd15_inpaint").model, torch.device("meta"))
        counts = nets.parameter_counts()
        assert counts["unet"] == 859_535_364
        assert counts["vae"] == 83_653_863
        assert counts["text_encoder"] == 123_060_480
        assert sum(p.numel() for p in nets.trainable_parameters()) == counts["unet"] + counts["location"]

    def test_has_the_parameters_of_sd2(self) -> None:
        config = bench("model=sd2", "workload=finetune_text2image").model
        nets = build_networks(config, torch.device("meta"), inputs=(4,))
        assert nets.parameter_counts() == {"unet": 865_910_724, "vae": 83_653_863, "text_encoder": 340_387_840}
        assert flops.count(config, 512)["unet_forward"] / 1e12 == pytest.approx(0.804, abs=0.001)

    def test_operations_equal_the_count_by_hand(self) -> None:
        config = bench("model=sd15_inpaint", "model.location_tokens=0").model
        parts = flops.count(config, 512)
        assert parts["unet_forward"] / 1e12 == pytest.approx(0.8034, abs=0.0001)
        assert parts["vae_encode"] / 1e12 == pytest.approx(1.117, abs=0.001)
        assert parts["text_encode"] / 1e12 == pytest.approx(0.013, abs=0.001)
        assert flops.training(parts, encodes=2, text=True) / 1e12 == pytest.approx(4.657, abs=0.005)
        assert flops.count(config, 256)["unet_forward"] / 1e12 == pytest.approx(0.1801, abs=0.0001)

    def test_location_tokens_add_few_operations(self) -> None:
        config = bench("model=sd15_inpaint").model
        assert flops.count(config, 512)["unet_forward"] / 1e12 == pytest.approx(0.8034, rel=0.002)

    def test_noise_follows_the_schedule_of_sd15(self) -> None:
        nets = build_networks(tiny(), CPU)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        alphas = torch.cumprod(1 - betas, 0)
        assert torch.allclose(nets.signal_weights.double() ** 2, alphas, atol=1e-5)
        assert torch.allclose(nets.noise_weights.double() ** 2, 1 - alphas, atol=1e-5)


class TestWeightsFolder:
    def test_operations_follow_the_shapes_of_the_weights(self, tmp_path: Path) -> None:
        save(tmp_path)
        wrong_shapes = "model.unet.block_out_channels=[8,8]"  # the folder rules, not the YAML
        config = bench(f"model.weights={tmp_path}", wrong_shapes)
        workload = finetune_inpaint.build(config, CPU)
        assert torch.isfinite(workload.step(workload.next_batch()))
        expected = flops.training(flops.count(tiny(), 32), encodes=2, text=True)
        assert workload.facts.flop_per_image == expected
        assert workload.facts.own_shapes, "the report names another model then"

    def test_four_input_channels_are_widened_without_changing_the_output(self, tmp_path: Path) -> None:
        four = save(tmp_path, channels=4).unet.eval()
        nine = build_networks(tiny(f"model.weights={tmp_path}", "model.location_tokens=0"), CPU).unet.eval()
        state, rest = torch.randn(2, 4, 4, 4), torch.randn(2, 5, 4, 4)
        times, text = torch.tensor([3, 700]), torch.randn(2, 77, 32)
        with torch.no_grad():
            before = four(state, times, text).sample
            after = nine(torch.cat([state, rest], 1), times, text).sample
        assert torch.allclose(before, after, atol=1e-6)
        assert nine.config.in_channels == 9

    def test_half_precision_weights_are_trained_in_fp32(self, tmp_path: Path) -> None:
        nets = save(tmp_path)
        nets.unet.half().save_pretrained(tmp_path / "unet")
        loaded = build_networks(tiny(f"model.weights={tmp_path}"), CPU)
        assert {p.dtype for p in loaded.trainable_parameters()} == {torch.float32}


class TestLocation:
    def run(self, nets: Networks, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        state = torch.randn(2, 9, 4, 4, generator=torch.Generator().manual_seed(0))
        states = torch.cat([text, tokens], 1)
        output: torch.Tensor = nets.unet.eval()(state, torch.tensor([3, 700]), states).sample
        return output

    def test_closed_gate_does_not_change_the_output(self) -> None:
        torch.manual_seed(0)
        nets = build_networks(tiny(), CPU)
        torch.manual_seed(0)
        plain = build_networks(tiny("model.location_tokens=0"), CPU)
        text = torch.randn(2, 77, 32)
        assert nets.location is not None
        with torch.no_grad():
            place = nets.location(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
            expected = self.run(plain, torch.empty(2, 0, 32), text)
            assert torch.equal(self.run(nets, place, text), expected)
            nets.location.gate.fill_(0.5)
            assert not torch.allclose(self.run(nets, place, text), expected)

    def test_gate_learns_first_and_then_the_encoder(self) -> None:
        workload = finetune_inpaint.build(bench("workload.learning_rate=0.01"), CPU)
        encoder = workload.components.networks.location
        assert encoder is not None
        before = encoder.linear.weight.detach().clone()
        for _ in range(3):
            workload.step(constant_batch(2))
        assert encoder.gate.abs() > 0
        assert not torch.equal(encoder.linear.weight, before)

    def test_features_tell_houses_apart_but_hardly_change_within_a_metre(self) -> None:
        encoder = LocationEncoder(4, 32, (55.7, 13.2))
        latitude = torch.tensor([55.7, 55.7 + 12 / 111_195, 55.7 + 0.2 / 111_195], dtype=torch.float64)
        house, neighbour, step = encoder.features(latitude, torch.full_like(latitude, 13.2))
        assert (house - neighbour).norm() > 10 * (house - step).norm() > 0

    def test_metres_are_right_across_the_date_line(self) -> None:
        encoder = LocationEncoder(4, 32, (0.0, 179.999))
        metres = encoder.metres(torch.tensor([0.001]), torch.tensor([-179.999], dtype=torch.float64))
        assert metres[0].tolist() == pytest.approx([222.39, 111.19], abs=0.1)

    def test_positions_are_exact_in_half_precision(self) -> None:
        encoder = LocationEncoder(4, 32, (55.7, 13.2)).bfloat16()
        latitude = torch.tensor([55.75, 55.75 + 5 / 111_195], dtype=torch.float64)
        house, neighbour = encoder(latitude, torch.full_like(latitude, 13.2))
        assert house.dtype == torch.bfloat16
        assert not torch.equal(house, neighbour)

    def test_unknown_position_gives_the_null_tokens(self) -> None:
        encoder = LocationEncoder(2, 8, (0.0, 0.0))
        here = torch.zeros(2, dtype=torch.float64)
        tokens = encoder(here, here, torch.tensor([True, False]))
        assert torch.equal(tokens[0], encoder.null)
        assert not torch.equal(tokens[1], encoder.null)


class ReadsBack(TorchDispatchMode):
    """Raises where a value leaves its device, which on a GPU would wait for everything queued before."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not str(func).startswith(self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_reads_no_value_from_the_device(precision: str) -> None:
    workload = finetune_inpaint.build(bench(f"recipe.precision={precision}"), CPU)
    with ReadsBack():
        draws = draw(workload.components, 2, workload.training_step.generator)
        loss = diffusion_loss(workload.components, constant_batch(2), draws)
        loss.backward()
        with pytest.raises(AssertionError, match="waits for the device"):
            loss.item()


class TestHashTokenizer:
    def test_ids_are_stable_padded_and_within_the_vocabulary(self) -> None:
        tokenize = hash_tokenizer(1000, 8)
        ids = tokenize(["", "A house.", "a HOUSE .", "one two three four five six seven eight"])
        assert ids[0].tolist() == [998] + [999] * 7
        assert torch.equal(ids[1], ids[2])
        assert ids[3, -1] == 999
        assert ids.max() < 1000


@pytest.mark.parametrize(("matmul", "conv"), [(True, True), (False, True), (False, False)])
def test_tf32_is_set_for_matmuls_and_convolutions(matmul: bool, conv: bool) -> None:
    """Regression: pinned through the newer interface, PyTorch refused to be asked through the older one."""
    modes = {True: "tf32", False: "ieee"}
    assert set_fp32_precision(matmul, conv) == {"matmul": modes[matmul], "conv": modes[conv]}
    assert torch.backends.cudnn.allow_tf32 is conv
    assert (torch.get_float32_matmul_precision() == "highest") is not matmul


def test_resolution_that_the_unet_cannot_halve_is_refused() -> None:
    with pytest.raises(UserError, match="multiple of 16"):
        finetune_inpaint.build(bench("data.resolution_px=40"), CPU)


def test_v_prediction_is_the_target_of_a_scheduler_that_says_so() -> None:
    networks = build_networks(tiny("model.scheduler.prediction_type=v_prediction"), CPU)
    latents, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    timesteps = torch.tensor([0, 400, 999])
    expected = networks.scheduler.get_velocity(latents, noise, timesteps)
    assert torch.allclose(networks.architecture.target(networks, latents, noise, timesteps), expected, atol=1e-6)
