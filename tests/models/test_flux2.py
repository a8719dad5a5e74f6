"""FLUX.2 klein: the loss and the predictions of diffusers' pipeline, shapes, operations, and adapters that it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import Flux2KleinInpaintPipeline, Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor, nn

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.models import adapters, flops
from inpaint_bench.models.generation import Sampler
from inpaint_bench.models.networks import build_networks
from inpaint_bench.models.training_step import diffusion_loss, draw
from inpaint_bench.workloads import finetune_inpaint, finetune_text2image
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.models.test_transformer_folder import MODELS, written
from tests.run.support import bench, last_given

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("klein", tmp_path_factory.mktemp("klein"))


@pytest.fixture(params=["klein", "klein_text"])
def workload(request: pytest.FixtureRequest, folder: Path) -> Iterator[FineTuning]:
    module = finetune_inpaint if request.param == "klein" else finetune_text2image
    built = module.build(bench(*last_given(*MODELS[request.param][1], f"model.weights={folder}")), CPU)
    yield built
    built.close()


@torch.no_grad()
def test_loss_is_that_of_diffusers_pipeline(workload: FineTuning, folder: Path) -> None:
    """Latents, places and texts by the pipeline's own methods, with the same noise and times."""
    components, networks = workload.components, workload.components.networks
    inpaints = networks.inpaints
    pipeline = (Flux2KleinInpaintPipeline if inpaints else Flux2KleinPipeline).from_pretrained(folder)
    batch = workload.next_batch()
    count = len(batch["image"])
    draws = draw(components, count, torch.Generator().manual_seed(5))

    def encoded(image: Tensor, noise: Tensor) -> Tensor:
        """As the pipeline's, but for a sample of the latents in the place of their mean."""
        moments = pipeline.vae.encode(image).latent_dist
        latents = pipeline._patchify_latents(moments.mean + moments.std * noise)
        statistics = pipeline.vae.bn
        deviation = torch.sqrt(statistics.running_var + pipeline.vae.config.batch_norm_eps)
        return (latents - statistics.running_mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)

    latents, noise = encoded(batch["image"], draws.image_noise), pipeline._patchify_latents(draws.noise)
    pipeline.scheduler.set_timesteps(sigmas=(draws.timesteps / 1000).tolist(), mu=0.0)
    noisy = torch.cat([pipeline.scheduler.scale_noise(*row) for row in zip(
        latents.split(1), draws.timesteps.float().split(1), noise.split(1), strict=True)])  # fmt: skip
    tokens, places = pipeline._pack_latents(noisy), pipeline._prepare_latent_ids(noisy)
    if inpaints:
        masked = encoded(batch["masked_image"], draws.masked_noise)
        reference, more = pipeline.prepare_image_latents([masked], count, None, CPU, torch.float32)
        tokens, places = torch.cat([tokens, reference], dim=1), torch.cat([places, more], dim=1)
    texts = [components.samples().distinct_texts[number] for number in batch["text_id"]]
    states, text_places = pipeline.encode_prompt(texts, max_sequence_length=64)
    velocity = pipeline.transformer(
        hidden_states=tokens,
        timestep=draws.timesteps / 1000,
        encoder_hidden_states=states,
        img_ids=places,
        txt_ids=text_places,
        return_dict=False,
    )[0][:, :16]
    maps = pipeline._unpack_latents_with_ids(velocity, places[:, :16])
    expected = F.mse_loss(maps, noise - latents)
    assert float(diffusion_loss(components, batch, draws)) == pytest.approx(float(expected), rel=1e-5)
    maps, architecture = pipeline._unpatchify_latents(latents), networks.architecture
    decoded = architecture.unscaled(networks.vae, maps)
    torch.testing.assert_close(architecture.scaled(networks.vae, decoded), maps)


def test_samples_at_the_times_of_diffusers_pipeline() -> None:
    networks = build_networks(bench(*MODELS["klein"][1]).model, CPU)
    for side, steps in ((8, 4), (64, 50)):
        mu = compute_empirical_mu(side * side // 4, steps)
        expected = torch.linspace(1, 1 / steps, steps, dtype=torch.float64)
        expected = 1000 * expected.mul(torch.tensor(mu).exp()) / (1 + (torch.tensor(mu).exp() - 1) * expected)
        assert Sampler("euler", networks, steps, side).timesteps == pytest.approx(expected.tolist(), rel=1e-4)


def test_adapters_are_those_that_the_pipeline_loads(folder: Path, tmp_path: Path) -> None:
    keys = ("workload.train_steps=1", "workload.save_weights=true", "recipe=[cpu,lora]")
    config = bench(*MODELS["klein"][1], f"model.weights={folder}", *keys)
    workload = finetune_inpaint.build(config, CPU)
    workload.step(workload.next_batch())
    networks, saved = workload.components.networks, tmp_path / workload.finish(tmp_path)["weights"]
    layers = adapters.layers(networks.unet)
    assert len(layers) == 6 + 2, "queries, keys and values of both streams, and the joint layer of single blocks"
    for layer in layers.values():
        nn.init.normal_(layer.lora_B[adapters.ADAPTER].weight)
    adapters.save(networks, saved)
    pipeline = Flux2KleinInpaintPipeline.from_pretrained(folder)
    pipeline.load_lora_weights(saved)
    theirs: dict[str, Any] = dict(pipeline.transformer.named_modules())
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            (loaded,) = getattr(theirs[name], part).values()
            assert torch.equal(loaded.weight, getattr(layer, part)[adapters.ADAPTER].weight)
        assert [*theirs[name].scaling.values()] == [*layer.scaling.values()]
    workload.close()


@pytest.mark.parametrize(
    ("model", "parameters", "texts"),
    [("flux2_klein", 3_875_544_576, 4_022_468_096), ("flux2_klein_9b", 9_078_581_248, 8_190_735_360)],
)
def test_has_the_parameters_and_operations_of_the_published_model(model: str, parameters: int, texts: int) -> None:
    config = bench(f"model={model}", "recipe=[cpu,half,lora]")
    networks = build_networks(config.model, torch.device("meta"))
    assert networks.parameter_counts() == {
        "unet": parameters,
        "vae": networks.parameter_counts()["vae"],
        "text_encoder": texts,
        "location": networks.parameter_counts()["location"],
    }
    if model == "flux2_klein":
        adapters.add(networks, config.recipe)
        assert len(adapters.layers(networks.unet)) == 50
        found = flops.count(config.model, 512, recipe=config.recipe)
        assert found["unet_forward"] == products(config.model.transformer, images=2 * 1024, texts=512 + 4)
        assert 2 < found["unet_step"] / found["unet_forward"] < 2.4, "no gradients of frozen weights"


def products(shape: dict[str, Any], images: int, texts: int) -> int:
    """Operations of the products in a forward pass, written down from the architecture's description."""
    width = shape["num_attention_heads"] * shape["attention_head_dim"]
    tokens, hidden = images + texts, 3 * width
    attention = 2 * tokens * tokens * width  # products of queries and keys, and again with the values
    double = tokens * (4 * width * width + 3 * width * hidden) + attention
    single = tokens * (width * (3 * width + 2 * hidden) + (width + hidden) * width) + attention
    modulation = (6 + 6 + 3 + 2) * width * width + 256 * width + width * width
    outside = images * 2 * shape["in_channels"] * width + texts * shape["joint_attention_dim"] * width + modulation
    return int(2 * (shape["num_layers"] * double + shape["num_single_layers"] * single + outside))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.transformer.in_channels=64", "all of them are 128"),
        ("model.text_encoder.num_hidden_layers=27", "text_encoder has 27 layers, layer 28 is needed"),
        ("model.transformer.joint_attention_dim=32", "reads texts of widths"),
        ("model.transformer.inpaints=false", "workload=finetune_inpaint: needs model.transformer.inpaints=true"),
        ("workload=finetune_text2image", "needs model.transformer.inpaints=false, of model=tiny_flux2 it is true"),
    ],
)
def test_what_does_not_fit_is_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_networks(bench(*MODELS["klein"][1], override).model, torch.device("meta"))


def test_states_that_the_cache_cannot_hold_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = Flux2KleinInpaintPipeline.from_pretrained(folder)
    pipeline.text_encoder.model.embed_tokens.weight.data.mul_(1e8)
    pipeline.save_pretrained(tmp_path / "large")
    keys = ("recipe=cpu", "data=synthetic", "data.num_images=2", "prepare.caches=true")
    where = (f"model.weights={tmp_path / 'large'}", f"prepare.out={tmp_path / 'set'}")
    assert app.main(["prepare", *keys, *where, *MODELS["klein"][1]]) == 2
    assert "states of a text are NaN or beyond the cache's float16" in capsys.readouterr().err
