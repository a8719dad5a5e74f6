"""SDXL through the same workload as SD 1.5: it computes what diffusers does, and caches, levers and samples hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLInpaintPipeline, UNet2DConditionModel
from transformers import CLIPTokenizer

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.models import flops
from inpaint_bench.models.networks import Networks, build_networks
from inpaint_bench.models.pipeline_folder import save_byte_tokenizer
from tests.data.support import prepared
from tests.levers.test_levers import build, losses
from tests.quality.support import CPU, tiny
from tests.run.support import bench

TINY = "model=tiny_sdxl_inpaint"
META = torch.device("meta")


def plain_networks() -> Networks:
    return tiny(TINY, "model.location_tokens=0")


def test_full_size_has_the_published_number_of_parameters() -> None:
    counts = build_networks(bench("model=sdxl_inpaint").model, META).parameter_counts()
    # 2,567,463,684 with four input channels, and five more of 320 filters of 3 x 3.
    assert counts["unet"] == 2_567_463_684 + 5 * 320 * 9
    assert counts["text_encoder"] == 123_060_480 + 694_659_840


def test_operations_of_an_image_are_those_of_the_published_layers() -> None:
    """2.99 TMAC at 1024 px without attention's own products, which are 0.376 [calculated]; two operations each."""
    parts = flops.count(bench("model=sdxl_inpaint").model, 1024)
    assert parts["unet_forward"] / 2e12 == pytest.approx(2.99 + 0.376, rel=0.01)


def test_unet_computes_what_diffusers_does_with_sizes_and_pooled_text() -> None:
    networks = plain_networks()
    plain = UNet2DConditionModel.from_config(networks.unet.config)
    plain.load_state_dict(networks.unet.state_dict())
    generator = torch.Generator().manual_seed(0)
    sample, steps = torch.randn(2, 9, 8, 8, generator=generator), torch.tensor([5, 900])
    pooled, states = torch.randn(2, 24, generator=generator), torch.randn(2, 77, 48, generator=generator)
    conditions = {"text_embeds": pooled, "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}
    row = torch.nn.functional.pad(pooled, (0, 24))[:, None]
    with torch.no_grad():
        expected = plain(sample, steps, states, added_cond_kwargs=conditions).sample
        found = networks.unet(sample, steps, torch.cat([row, states], dim=1), return_dict=False)[0]
        other = networks.unet(sample, steps, torch.cat([2 * row, states], dim=1), return_dict=False)[0]
    assert torch.equal(found, expected)
    assert not torch.allclose(other, expected, atol=1e-4)


def test_text_encoder_computes_what_the_pipeline_does(tmp_path: Path) -> None:
    networks = plain_networks()
    save_byte_tokenizer(tmp_path / "tokenizer", networks.text_encoder.config)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    encoder, unet = networks.text_encoder, networks.unet
    pipeline: Any = StableDiffusionXLInpaintPipeline(
        networks.vae, encoder.first, encoder.second, tokenizer, tokenizer, unet, networks.scheduler
    )
    texts = ["a brick house", ""]
    expected, _, pooled, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False)
    ids = tokenizer(texts, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        found = encoder(ids).last_hidden_state
    assert torch.allclose(found[:, 1:], expected, atol=1e-6)
    assert torch.allclose(found[:, 0, :24], pooled, atol=1e-6)
    assert not found[:, 0, 24:].any()


class TestTraining:
    def test_levers_compute_what_its_baseline_does(self) -> None:
        workload = build("channels_last", "grad_checkpoint", "adamw_fused", "lora", model="tiny_sdxl_inpaint")
        assert workload.parity
        assert not workload.parity.far
        assert workload.parity.gradient_rel < 1e-4
        found = losses(workload, 2)
        assert found[0] == pytest.approx(losses(build(model="tiny_sdxl_inpaint"), 1)[0], rel=1e-5)

    def test_its_unet_is_compiled_as_one_graph(self) -> None:
        networks = plain_networks()
        compiled: Any = torch.compile(networks.unet, backend="eager", dynamic=False, fullgraph=True)
        inputs = torch.randn(2, 9, 8, 8), torch.tensor([5, 900]), torch.randn(2, 78, 48)
        found, expected = compiled(*inputs, return_dict=False)[0], networks.unet(*inputs, return_dict=False)[0]
        assert torch.allclose(found, expected, atol=1e-6)

    def test_caches_hold_its_text_states(self, tmp_path: Path) -> None:
        root = prepared(tmp_path / "set", TINY, "recipe=cpu", "data.num_images=6", "prepare.caches=true")
        given = {"data": "prepared", "data__root": root, "model": "tiny_sdxl_inpaint"}
        found = losses(build("cache_image", "cache_masked", "cache_text", **given))
        assert found == pytest.approx(losses(build("cache_masked", **given)), rel=1e-2)

    def test_validates_and_samples(self, tmp_path: Path) -> None:
        workload = build(
            model="tiny_sdxl_inpaint",
            workload__train_steps=2,
            workload__sample_images=1,
            workload__sample_steps=2,
            data__validation_share=0.5,
        )
        assert workload.validate()["loss"] > 0
        result = workload.finish(tmp_path)
        workload.close()
        assert (tmp_path / result["pictures"]).is_file()


class TestRefused:
    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ("model.weights=sdxl", "weights of tiny_sdxl_inpaint cannot be loaded; leave it out"),
            ("workload.save_weights=true", "random weights of SDXL and of transformers are for measuring"),
        ],
    )
    def test_real_weights(self, given: str, why: str) -> None:
        with pytest.raises(UserError, match=why):
            bench(TINY, "workload.train_steps=2", given)

    def test_channels_last_unet(self) -> None:
        with pytest.raises(UserError, match="the channels-last UNet needs"):
            build("unet_nhwc", model="tiny_sdxl_inpaint")

    def test_adapters_of_the_text_encoder(self) -> None:
        with pytest.raises(UnavailableError, match="SDXL has two"):
            levers.require(bench(TINY, "recipe=[cpu,lora,lora_text_encoder]"), CPU)
