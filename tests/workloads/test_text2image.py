"""Fine-tuning to make images of texts: the loss of diffusers' own example, caches without masks, and what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionPipeline

from inpaint_bench.core.errors import UserError
from inpaint_bench.models.training_step import diffusion_loss, draw
from inpaint_bench.workloads import finetune_text2image
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.data.support import prepared
from tests.run.support import bench

CPU = torch.device("cpu")
TINY = ("workload=finetune_text2image", "model=tiny")


def build(*overrides: str, recipe: str = "cpu") -> FineTuning:
    return finetune_text2image.build(bench(*TINY, f"recipe=[{recipe}]", *overrides), CPU)


def test_loss_is_that_of_diffusers_example() -> None:
    """The arithmetic of train_text_to_image.py, with the same noise."""
    workload = build()
    components, networks = workload.components, workload.components.networks
    batch = workload.next_batch()
    assert "mask" not in batch
    draws = draw(components, len(batch["image"]), torch.Generator().manual_seed(5))
    distribution = networks.vae.encode(batch["image"]).latent_dist
    latents = (distribution.mean + distribution.std * draws.image_noise) * networks.vae.config.scaling_factor
    scheduler = DDPMScheduler.from_config(networks.scheduler.config)
    noisy = scheduler.add_noise(latents, draws.noise, draws.timesteps)
    states = networks.text_encoder(batch["tokens"])[0]
    prediction = networks.unet(noisy, draws.timesteps, states, return_dict=False)[0]
    expected = F.mse_loss(prediction, draws.noise)
    assert float(diffusion_loss(components, batch, draws)) == pytest.approx(float(expected), rel=1e-5)
    workload.close()


def test_caches_have_no_masks_and_give_the_same_loss(tmp_path: Path) -> None:
    root = prepared(tmp_path / "set", *TINY, "data.num_images=8", "recipe=cpu", "prepare.caches=true")
    assert {path.name for path in root.glob("cache/*/*.npy")} == {"image.npy", "text.npy"}
    where = ("data=prepared", f"data.root={root}", "data.num_images=null")
    losses = []
    for recipe in ("cpu", "cpu,cache_image,cache_masked,cache_text"):
        workload = build(*where, recipe=recipe)
        losses.append(workload.step(workload.next_batch()).item())
        workload.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3), "float16 moments"


def test_training_ends_with_pictures_and_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    training = ("train_steps=1", "validate_every=1", "sample_images=1", "sample_steps=1", "save_weights=true")
    workload = build("data.validation_share=0.3", *(f"workload.{key}" for key in training))
    workload.step(workload.next_batch())
    assert 0 < workload.validate()["loss"] < 10
    finished = workload.finish(tmp_path)
    assert finished["metrics"] == {}, "an image of a text is not to be like the photograph"
    assert (tmp_path / finished["pictures"]).is_file()
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / finished["weights"], safety_checker=None)
    image = pipeline("a house", num_inference_steps=1, height=32, width=32, output_type="pt").images[0]
    assert image.isfinite().all()
    workload.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.masks=disaster", "data.masks=disaster: workload=finetune_text2image draws no masks"),
        ("model=tiny_inpaint", "unet.in_channels is 9, this workload needs 4"),
    ],
)
def test_what_has_a_mask_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(override)
