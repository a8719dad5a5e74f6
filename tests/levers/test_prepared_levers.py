"""Levers that need a prepared dataset: formats, staging, and caches of the frozen networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inpaint_bench.core.errors import UserError
from inpaint_bench.models.latent_cache import cache_inputs
from inpaint_bench.models.training_step import diffusion_loss, draw
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.data.support import prepared

from . import test_levers

CPU = torch.device("cpu")


def _changed(inputs: dict[str, Any], others: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if others[name] != value]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "set"
    return prepared(
        out, "data.num_images=40", "data.block_m=50", "model=tiny_inpaint", "recipe=cpu", "prepare.caches=true"
    )


def build(dataset: Path, *names: str, **keys: Any) -> FineTuning:
    return test_levers.build(*names, **prepared_data(dataset), **keys)


def prepared_data(dataset: Path) -> dict[str, Any]:
    return {"data": "prepared", "data__root": dataset, "data__block_m": 50, "data__num_images": "null"}


@pytest.mark.parametrize("lever", ["memmap", "hdf5", "webdataset", "stage_shm", "stage_tmp"])
def test_formats_and_staging_are_verified_as_active(dataset: Path, lever: str) -> None:
    (row,) = test_levers.verified(lever, **prepared_data(dataset)).values()
    assert row.active, row
    assert row.effective == row.requested


class TestCaches:
    def test_frozen_networks_are_not_called(self, dataset: Path) -> None:
        rows = test_levers.verified("cache_image", "cache_masked", "cache_text", "on_gpu", **prepared_data(dataset))
        assert all(row.active for row in rows.values()), rows
        assert rows["cache_image"].effective == rows["cache_text"].effective == 0

    def test_storage_does_not_change_the_losses(self, dataset: Path) -> None:
        names = ("cache_image", "cache_masked", "cache_text")
        assert test_levers.losses(build(dataset, *names)) == test_levers.losses(build(dataset, *names, "on_gpu"))

    @pytest.mark.parametrize("names", [("encoders_half",), ("half", "lora")], ids=" ".join)
    def test_frozen_networks_in_half_precision_find_the_caches_of_their_weights(
        self, dataset: Path, names: tuple[str, ...]
    ) -> None:
        """`baseline` has such encoders, so that it found no cache of a model in fp32."""
        cached = ("amp_bf16", "cache_image", "cache_masked", "cache_text")
        rows = test_levers.verified(*cached, *names, **prepared_data(dataset))
        assert all(row.active for row in rows.values()), rows
        if names == ("encoders_half",):
            losses = [test_levers.losses(build(dataset, *cached, *more)) for more in ((), names)]
            assert losses[0] == losses[1]

    def test_attention_is_read_back_from_the_step_if_no_encoder_runs_in_it(self, dataset: Path) -> None:
        cached = ("attn_math", "cache_image", "cache_masked", "cache_text")
        for names, part in ((cached, "a step"), (cached[:-1], "a forward pass of the UNet")):
            row = test_levers.verified(*names, **prepared_data(dataset))["attention"]
            assert row.active
            assert row.evidence.startswith(f"kernels by name in {part}: ")

    def test_cached_images_and_texts_give_the_losses_of_the_networks_in_half_precision(self, dataset: Path) -> None:
        cached = test_levers.losses(build(dataset, "cache_image", "cache_text"))
        assert cached == pytest.approx(test_levers.losses(build(dataset)), rel=2e-3)

    def test_masked_moments_equal_those_computed_for_the_masks_of_the_pool(self, dataset: Path) -> None:
        cached, online = build(dataset, "cache_masked"), build(dataset)
        batch = cached.next_batch()
        assert len(batch["image"])
        from inpaint_bench.data.masks import make_mask

        data = cached.bench.data
        masks = [
            np.ones((32, 32)) if pool < 0 else make_mask(32, (data.seed, index, pool), kind="sd", full_mask_share=0.0)
            for index, pool in zip(batch["index"].tolist(), batch["pool"].tolist(), strict=True)
        ]
        mask = torch.from_numpy(np.stack(masks)).float()[:, None]
        moments, latent_mask = cached.components.masked_moments(batch)
        batch |= {"mask": mask, "masked_image": batch["image"] * (1 - mask)}
        with torch.no_grad():
            expected, expected_mask = online.components.masked_moments(batch)
        assert torch.equal(latent_mask, expected_mask)
        torch.testing.assert_close(moments.float(), expected, rtol=5e-3, atol=5e-3)
        cached.close()
        online.close()

    def test_latents_are_sampled_anew_in_every_step(self, dataset: Path) -> None:
        """Moments are cached, not latents: training keeps the VAE's noise."""
        workload = build(dataset, "cache_image")
        batch = workload.next_batch()
        generator = torch.Generator().manual_seed(0)
        draws = [draw(workload.components, len(batch["index"]), generator) for _ in range(2)]
        draws[1] = draws[0]._replace(image_noise=draws[1].image_noise)  # all else is equal
        with torch.no_grad():
            first, second = (diffusion_loss(workload.components, batch, drawn) for drawn in draws)
        workload.close()
        assert not torch.equal(first, second)

    def test_cache_of_other_settings_is_refused_with_the_difference(self, dataset: Path) -> None:
        with pytest.raises(UserError, match=r"no cache fits.*mask_pool 8, here 4"):
            build(dataset, "cache_masked", recipe__mask_pool=4)
        with pytest.raises(UserError, match=r"no cache fits.*masks sd, here disaster"):
            build(dataset, "cache_masked", data__masks="disaster")

    def test_cache_of_another_tokenizer_or_activation_is_refused(self, dataset: Path) -> None:
        """Regression: a text encoder of equal weights with other tokens was trained on the states of these."""
        workload = build(dataset, "cache_text")
        components = workload.components
        networks, source = components.networks, components.source
        known = cache_inputs(workload.bench, networks, source)
        shifted = replace(networks, tokenize=lambda texts: networks.tokenize(texts).flip(1))
        assert _changed(known, cache_inputs(workload.bench, shifted, source)) == ["tokens"]
        networks.text_encoder.config.hidden_act = "relu"
        assert _changed(known, cache_inputs(workload.bench, networks, source)) == ["text_encoder"]
        workload.close()

    def test_truncated_array_is_refused(self, dataset: Path) -> None:
        (array,) = dataset.glob("cache/*/text.npy")
        whole = array.read_bytes()
        try:
            array.write_bytes(whole[:-10])
            with pytest.raises(UserError, match=r"text\.npy: \d+ bytes instead of \d+"):
                build(dataset, "cache_text")
        finally:
            array.write_bytes(whole)
