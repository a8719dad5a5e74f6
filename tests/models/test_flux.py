"""FLUX and SD 3.5: the loss of diffusers' own arithmetic, caches, adapters and samples, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor, nn

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.estimates import memory
from inpaint_bench.data.open import open_source
from inpaint_bench.data.samples import Samples
from inpaint_bench.models import adapters, flops
from inpaint_bench.models.architectures import flow
from inpaint_bench.models.networks import build_networks, build_run_networks
from inpaint_bench.models.parallel.data_parallel import block_costs, owners
from inpaint_bench.models.training_step import StepComponents, diffusion_loss, draw
from inpaint_bench.workloads import finetune_inpaint, finetune_text2image, parity
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.data.support import prepared
from tests.run.support import bench

CPU = torch.device("cpu")
TINY = ("model=tiny_flux_fill", "data.resolution_px=64")
TEXT = ("workload=finetune_text2image", "model.transformer.in_channels=64", "model.location_tokens=0")


FLUX2 = "model=tiny_flux2"
KINDS = pytest.mark.parametrize("model", ["model=tiny_flux_fill", FLUX2])


def build(*overrides: str, recipe: str = "cpu") -> FineTuning:
    return finetune_inpaint.build(bench(*last_of(*TINY, f"recipe=[{recipe}]", *overrides)), CPU)


@pytest.mark.parametrize("inpaints", [True, False])
def test_loss_is_that_of_diffusers_arithmetic(inpaints: bool) -> None:
    """As train_dreambooth_lora_flux.py trains and FluxFillPipeline joins its inputs, with the same noise and times."""
    workload = build("model.location_tokens=0") if inpaints else finetune_text2image.build(bench(*TINY, *TEXT), CPU)
    components, networks = workload.components, workload.components.networks
    batch = workload.next_batch()
    count = len(batch["image"])
    draws = draw(components, count, torch.Generator().manual_seed(5))
    vae = networks.vae

    def encoded(image: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        moments = vae.encode(image).latent_dist
        return (moments.mean + moments.std * noise - vae.config.shift_factor) * vae.config.scaling_factor

    def packed(maps: torch.Tensor) -> torch.Tensor:
        return FluxPipeline._pack_latents(maps, count, maps.shape[1], 8, 8)

    latents, sigmas = encoded(batch["image"], draws.image_noise), draws.timesteps[:, None, None, None] / 1000
    tokens = packed((1 - sigmas) * latents + sigmas * draws.noise)
    if inpaints:
        pipeline = FluxFillPipeline.__new__(FluxFillPipeline)
        pipeline.vae_scale_factor = 8
        mask, masked = FluxFillPipeline.prepare_mask_latents(
            _With(pipeline, vae), batch["mask"], batch["masked_image"], count, 16, 1, 64, 64, torch.float32, CPU, None
        )
        masked = packed(encoded(batch["masked_image"], draws.masked_noise))
        tokens = torch.cat([tokens, masked, mask], dim=2)
    clip, t5 = networks.text_encoder.clip, networks.text_encoder.t5
    transformer = FluxTransformer2DModel.from_config(networks.unet.config)
    transformer.load_state_dict(networks.unet.state_dict())
    velocity = transformer(
        hidden_states=tokens,
        timestep=draws.timesteps / 1000,
        guidance=torch.full((count,), components.bench.model.guidance),
        pooled_projections=clip(batch["tokens"][:, :77]).pooler_output,
        encoder_hidden_states=t5(batch["tokens"][:, 77:])[0],
        txt_ids=torch.zeros(16, 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(count, 4, 4, CPU, torch.float32),
        return_dict=False,
    )[0]
    expected = F.mse_loss(FluxPipeline._unpack_latents(velocity, 64, 64, 8), draws.noise - latents)
    assert float(diffusion_loss(components, batch, draws)) == pytest.approx(float(expected), rel=1e-5)
    workload.close()


def test_loss_of_sd35_is_that_of_diffusers_arithmetic() -> None:
    """As train_dreambooth_lora_sd3.py has it, with the same noise and times."""
    config = bench("model=tiny_sd35", "data.resolution_px=64", "workload=finetune_text2image")
    workload = finetune_text2image.build(config, CPU)
    components, networks = workload.components, workload.components.networks
    batch, vae, texts = workload.next_batch(), networks.vae, networks.text_encoder
    draws = draw(components, len(batch["image"]), torch.Generator().manual_seed(5))
    moments = vae.encode(batch["image"]).latent_dist
    latents = moments.mean + moments.std * draws.image_noise
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    sigmas = draws.timesteps[:, None, None, None] / 1000
    first, second, third = batch["tokens"].split([77, 77, 16], dim=1)
    clips = [
        clip(ids, output_hidden_states=True)
        for clip, ids in zip((texts.first, texts.second), (first, second), strict=True)
    ]
    states = torch.cat([clip.hidden_states[-2] for clip in clips], dim=-1)
    t5 = texts.t5(third)[0]
    states = torch.cat([F.pad(states, (0, t5.shape[-1] - states.shape[-1])), t5], dim=-2)
    transformer = SD3Transformer2DModel.from_config(networks.unet.config)
    transformer.load_state_dict(networks.unet.state_dict())
    velocity = transformer(
        hidden_states=(1 - sigmas) * latents + sigmas * draws.noise,
        timestep=draws.timesteps.float(),
        encoder_hidden_states=states,
        pooled_projections=torch.cat([clip.text_embeds for clip in clips], dim=-1),
        return_dict=False,
    )[0]
    expected = F.mse_loss(velocity, draws.noise - latents)
    assert float(diffusion_loss(components, batch, draws)) == pytest.approx(float(expected), rel=1e-5)
    full = bench("model=sd35_medium", "workload=finetune_text2image", "recipe=[cpu,half,lora]").model
    counts = build_networks(full, torch.device("meta"), inputs=(4,)).parameter_counts()
    assert counts["unet"] == 2_243_171_520
    workload.close()


def test_the_pooled_text_gets_no_gradient_where_the_location_needs_one() -> None:
    networks = build_networks(bench(*TINY, "recipe=cpu").model, CPU, inputs=(4, 9))
    networks.unet.requires_grad_(False)
    states = torch.randn(1, networks.state_rows, networks.state_width, requires_grad=True)
    networks.unet(torch.randn(1, networks.input_channels, 8, 8), torch.tensor([500]), states)[0].sum().backward()
    assert states.grad is not None
    assert not states.grad[:, 0].any()
    assert states.grad[:, 1:].any()


def test_reference_with_weights_in_bf16_is_that_of_the_same_weights_in_fp32() -> None:
    config = bench(*TINY, "recipe=[cpu,amp_bf16,half,lora]", "model.dtype=bf16", "batch=3")
    source = open_source(config.data, config.recipe)
    found = []
    for widened in (False, True):
        networks = build_run_networks(config, CPU, source.centre)
        for network in (networks.unet, networks.vae) if widened else ():
            nn.Module.to(network, torch.float32)
        components = StepComponents(bench=config, device=CPU, networks=networks, source=source)
        found.append(parity.reference(components, size=3 if widened else 2))
        assert {p.dtype for p in networks.unet.parameters()} == {torch.float32 if widened else torch.bfloat16}
    assert max(filter(None, parity._errors(components, found[1], found[0]).values())) < 1e-5
    source.close()


def test_gradients_are_compared_before_another_compiled_network_is_called() -> None:
    """Regression: inductor's CUDA graphs overwrite them then, and a job ended with RuntimeError."""
    workload = build()
    called: list[str] = []

    def noted(role: str, network: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *inputs, **named: (called.append(role), network(*inputs, **named))[1]

    calls = workload.components.calls
    calls.update({role: noted(role, network) for role, network in calls.items()})
    parity.compare(workload.components, None)
    assert called == ["vae_encoder", "unet"]
    workload.close()


def test_time_and_guidance_of_the_reference_are_those_of_bf16() -> None:
    """diffusers multiplies both by 1000 in the type of the network, where 30,000 becomes 29,952."""
    networks = build_networks(bench(*TINY, "recipe=cpu").model, CPU, inputs=(4, 9))
    networks.unet.guidance, networks.unet.conditions_dtype = 30.0, torch.bfloat16
    seen: dict[str, Tensor] = {}
    embed = networks.unet.time_text_embed
    embed.register_forward_pre_hook(lambda _, inputs: seen.update(time=inputs[0], guidance=inputs[1]))
    states = torch.randn(1, networks.state_rows, networks.state_width)
    networks.unet(torch.randn(1, networks.input_channels, 8, 8), torch.tensor([999]), states)
    assert (seen["time"].item(), seen["guidance"].item()) == pytest.approx((1000, 29_952))


@pytest.mark.parametrize("model", ["tiny_flux_fill", "tiny_flux2", "tiny_sd35"])
def test_blocks_that_are_rewritten_for_the_compiler_compute_the_same(model: str) -> None:
    workload = "finetune_text2image" if model == "tiny_sd35" else "finetune_inpaint"
    overrides = (f"model={model}", "data.resolution_px=64", f"workload={workload}", "recipe=[cpu,lora]")
    config = bench(*overrides, "recipe.lora_alpha=2")
    networks = build_networks(config.model, CPU, inputs=(4, 9))
    adapters.add(networks, config.recipe)
    unet = networks.unet
    products = [layer.lora_B[adapters.ADAPTER].weight for layer in adapters.layers(unet).values()]
    for product in products:
        nn.init.normal_(product)
    noisy = torch.randn(1, networks.input_channels, 8, 8)
    states = torch.randn(1, networks.state_rows, networks.state_width)

    def outputs() -> list[Tensor]:
        velocity = unet(noisy, torch.tensor([500]), states)[0]
        return [velocity.detach(), *torch.autograd.grad(velocity.square().sum(), products)]

    before, kinds = outputs(), [type(module) for module in unet.modules()]
    for block in unet.blocks:
        flow.rewrite(block)
    changed = [new for new, old in zip(map(type, unet.modules()), kinds, strict=True) if new is not old]
    assert model == "tiny_flux2" or len(changed) >= len(unet.blocks), "a GELU in each"
    assert all(set(layer.lora_variant) == {adapters.ADAPTER} for layer in adapters.layers(unet).values())
    for new, old in zip(outputs(), before, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5 * float(old.abs().max()))


@pytest.mark.parametrize(
    ("model", "lora"), [("model=tiny_flux_fill", True), (FLUX2, False)], ids=["frozen weights", "trained weights"]
)
def test_linear_layers_multiply_in_fp8(model: str, lora: bool) -> None:
    recipe = "cpu,amp_bf16,fp8,compile_blocks"
    workload = build(model, "model.dtype=bf16", recipe=f"{recipe},half,lora" if lora else f"{recipe},bf16_split")
    (report,) = (row for row in levers.verify(workload.execution, workload.probe) if row.field == "linears")
    assert report.active
    assert report.effective > 0
    assert ("0 trained" in report.evidence) == lora
    whole = build_networks(bench(model, "recipe=cpu").model, torch.device("meta")).parameter_counts()
    assert workload.facts.parameters == whole["unet"]
    assert 0 < workload.parity.prediction_rel < 0.1
    workload.close()


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
@KINDS
def test_frozen_weights_are_trained_in_few_bits(model: str, kind: str) -> None:
    workload = build(model, "model.dtype=bf16", recipe=f"cpu,amp_bf16,half,lora,frozen_{kind}")
    whole = build(model, "model.dtype=bf16", recipe="cpu,amp_bf16,half,lora")
    assert workload.facts.parameters_by_network == whole.facts.parameters_by_network
    assert 0 < whole.parity.prediction_rel < 0.01, "time and guidance are rounded on both sides"
    assert 0 < whole.parity.gradient_rel < 0.02
    assert 0 < workload.parity.prediction_rel < 0.1
    reports = {row.field: row for row in levers.verify(workload.components, workload.probe)}
    stored = reports["frozen_storage"]
    assert stored.active, stored.evidence
    # A double block: 8 of attention, 4 of feed-forward, 2 modulations; a single one: 3 of attention, 3 more. FLUX.2 has
    # the modulations outside of blocks, and two layers in a single one.
    assert stored.effective["layers"] == (12 + 2 * 2 if model == FLUX2 else 14 + 2 * 6)
    assert reports["lora_rank"].active
    for each in (workload, whole):
        each.close()


def recomputed(model: str, *names: str) -> tuple[list[float], int, dict[str, Any]]:
    """Return the losses of two steps, the bytes that the first kept beside the weights, and what was read back."""
    workload = build(model, recipe=",".join(("cpu", *names)))
    weights = {p.data_ptr() for p in workload.components.networks.unet.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        losses = [workload.step(workload.next_batch()).item()]
    losses.append(workload.step(workload.next_batch()).item())
    reports = {row.name: row for row in levers.verify(workload.components, workload.probe)}
    workload.close()
    return losses, sum(kept.values()), reports


@KINDS
def test_recomputed_blocks_give_the_same_losses(model: str) -> None:
    plain, kept, _ = recomputed(model)
    for names in (
        ("grad_checkpoint",),
        ("grad_checkpoint", "attn_math"),
        ("grad_checkpoint", "checkpoint_keeps_products"),
    ):
        losses, fewer, reports = recomputed(model, *names)
        assert losses == pytest.approx(plain, rel=1e-5)
        assert fewer < kept / 2
        assert all(reports[name].active for name in names), reports
    with pytest.raises(UnavailableError, match="nothing is computed again"):
        build(recipe="cpu,checkpoint_keeps_products")
    with pytest.raises(UnavailableError, match="set that, or attention=default"):
        build(recipe="cpu,grad_checkpoint,checkpoint_keeps_products,attn_math")
    with pytest.raises(UnavailableError, match="needs a GPU"):
        build(recipe="cpu,amp_bf16,attn_flash4")


@pytest.mark.faults
@KINDS
def test_compiled_blocks_are_recomputed_within_their_graphs(model: str) -> None:
    plain, kept, _ = recomputed(model, "compile_blocks")
    products, fewer, reports = recomputed(model, "compile_blocks", "grad_checkpoint", "checkpoint_keeps_products")
    everything, fewest, _ = recomputed(model, "compile_blocks", "grad_checkpoint")
    assert fewest < fewer < kept
    assert products == pytest.approx(plain, rel=1e-5)
    assert everything == pytest.approx(plain, rel=1e-5)
    # Both single blocks of FLUX.2 have one graph.
    assert reports["compile_blocks"].effective == {"graphs": 2 if model == FLUX2 else 3, "breaks": 0}


@KINDS
def test_all_weights_are_trained_in_bf16_with_recomputation(model: str) -> None:
    workload = build(
        model, "model.dtype=bf16", "workload.learning_rate=1e-3", recipe="cpu,amp_bf16,bf16_stochastic,grad_checkpoint"
    )
    batch = workload.next_batch()
    losses = [workload.step(batch).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    reports = levers.verify(workload.components, workload.probe)
    assert all(row.active for row in reports if row.field in ("weights", "grad_checkpoint")), reports
    workload.close()


class _With:
    """A pipeline of diffusers without its other parts: what `prepare_mask_latents` reads of it."""

    def __init__(self, pipeline: FluxFillPipeline, vae: object) -> None:
        self.vae, self.vae_scale_factor, self._pack_latents = vae, 8, pipeline._pack_latents


def test_times_are_shifted_towards_noise_as_far_as_the_image_is_large() -> None:
    config = bench(*TINY)
    means = []
    for side in (64, 512):
        workload = build(f"data.resolution_px={side}", "batch=1")
        timesteps = draw(workload.components, 4000, torch.Generator().manual_seed(1)).timesteps
        means.append(float(timesteps.double().mean()))
        assert 1 <= int(timesteps.min()) < int(timesteps.max()) <= 1000
        workload.close()
    assert config.model.transformer
    assert 500 < means[0] < means[1] < 800


@KINDS
def test_a_cached_training_resumes_with_the_same_losses_and_the_masks_of_its_pool(model: str, tmp_path: Path) -> None:
    root = prepared(tmp_path / "set", *last_of(*TINY, model), "data.num_images=8", "recipe=cpu", "prepare.caches=true")
    where = (model, "data=prepared", f"data.root={root}", "data.num_images=null", "workload.train_steps=4")
    cached = "cpu,lora,cache_image,cache_masked,cache_text"
    first, again = build(*where, recipe=cached), build(*where, recipe=cached)
    networks, samples = first.components.networks, first.components.samples()
    batch = next(batch for batch in iter(first.next_batch, None) if (batch["pool"] >= 0).any())
    row = int((batch["pool"] >= 0).nonzero()[0])
    seeded = Samples(samples.source, networks.tokenize, 0, masks="sd", full_mask_share=0)
    mask = torch.from_numpy(seeded.mask(int(batch["index"][row]), int(batch["pool"][row]), 64))[None, None].float()
    assert torch.equal(first.components.masked_moments(batch)[1][row : row + 1], networks.mask_channels(mask))
    first.step(first.next_batch())
    tensors, values = first.state()
    again.restore({name: tensor.clone() for name, tensor in tensors.items()}, values)
    for _ in range(2):
        assert first.step(first.next_batch()).item() == again.step(again.next_batch()).item()
    for workload in (first, again):
        workload.close()


@KINDS
def test_training_ends_with_pictures_and_adapters_that_diffusers_loads(model: str, tmp_path: Path) -> None:
    keys = ("train_steps=1", "validate_every=1", "sample_images=1", "sample_steps=2", "save_weights=true")
    workload = build(model, "data.validation_share=0.3", *(f"workload.{key}" for key in keys), recipe="cpu,lora")
    workload.step(workload.next_batch())
    assert 0 < workload.validate()["loss"] < 10
    finished = workload.finish(tmp_path)
    assert finished["metrics"]["psnr_hole_db"]["value"] is not None
    kind = Flux2Transformer2DModel if model == FLUX2 else FluxTransformer2DModel
    loaded = kind.from_config(workload.components.networks.unet.config)
    loaded.load_lora_adapter(str(tmp_path / finished["weights"]), prefix="transformer", weight_name=ADAPTERS)
    assert any("lora_B" in name and parameter.any() for name, parameter in loaded.named_parameters())
    workload.close()


ADAPTERS = "pytorch_lora_weights.safetensors"


def test_has_the_parameters_and_operations_of_flux_fill() -> None:
    config = bench("model=flux_fill", "recipe=[cpu,half,lora]").model
    networks = build_networks(config, torch.device("meta"))
    assert networks.parameter_counts()["unet"] == 11_902_391_360
    whole = flops.count(config, 512)["unet_forward"]
    assert whole / 1e12 == pytest.approx(21.56, abs=0.01)
    blocks = flops.of_blocks(config, 512, networks)
    assert len(blocks) == 19 + 38
    assert sum(blocks) == pytest.approx(whole, rel=0.001), "the rest is embeddings and projections"


@pytest.mark.parametrize(("recipe", "own"), [("half,lora", [28, 29]), ("half", [17, 40])])
def test_a_pipeline_divides_the_work_of_frozen_blocks_and_the_parameters_of_trained_ones(
    recipe: str, own: list[int]
) -> None:
    """Regression: by their bytes, the second of two GPUs had 70 % of the work beneath adapters."""
    whole = bench("model=flux_fill", f"recipe=[cpu,{recipe}]")
    costs = block_costs(whole, build_networks(whole.model, torch.device("meta")))
    ranks = owners(costs, 2)
    assert [ranks.count(rank) for rank in (0, 1)] == own


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=[cpu,half,lora,unet_nhwc]"], "recipe.unet=nhwc: is for models with a UNet"),
        (["recipe=[cpu,half,lora,lora_targets_all]"], "recipe.lora_targets=all: is for models with a UNet"),
        (["model=tiny_inpaint", "recipe=[cpu,lora,frozen_nf4]"], "recipe.frozen_storage=nf4: is for the transformers"),
        (["model=flux_fill"], "the networks of model=flux_fill are bf16. Set recipe.weights=half"),
        (
            ["workload=sd_inference"],
            "workload.sampler=plms: models with a UNet take plms, ddim or dpmpp, transformers take euler",
        ),
        (["model=tiny_inpaint", "workload=sd_inference", "workload.sampler=euler"], "transformers take euler"),
    ],
)
def test_what_a_transformer_lacks_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        checked(bench(*last_of(*TINY, *overrides)))


def last_of(*overrides: str) -> list[str]:
    return list({override.partition("=")[0]: override for override in overrides}.values())


def checked(config: BenchConfig) -> None:
    config.workload.check(config)


def test_cached_texts_leave_a_transformers_encoders_out_unless_pictures_are_made() -> None:
    def predicted(*overrides: str) -> memory.Peak:
        recipe = "recipe=[tuned_dit,attn_flash4]"
        point = bench("model=flux_fill", "gpu=h200", recipe, "batch=1", "data.resolution_px=512", *overrides)
        peak = memory.predict_point(point)
        assert peak
        return peak

    cached, validated = predicted(), predicted("workload.train_steps=20", "workload.validate_every=10")
    encoders = memory.traces()["flux_fill", "lora_rank=16 weights=half", 512].texts_mib
    assert validated.allocator_mib - cached.allocator_mib == pytest.approx(encoders, rel=0.01)
    assert cached.needed_mib > cached.loading_mib > cached.allocator_mib, "loaded, then left out"
    assert cached.error_pct == memory.factors()["flux_fill", "compile=blocks lora_rank=16 weights=half"].error_pct
