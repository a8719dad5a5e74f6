"""LoRA: what is trained, how exact its gradients are, and files that diffusers loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline, UNet2DConditionModel

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.models import adapters
from inpaint_bench.models.architectures import location
from inpaint_bench.models.networks import Networks, widen_input
from inpaint_bench.models.pipeline_folder import read_location_description, save_pipeline
from inpaint_bench.models.weights_folder import ADAPTERS
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.quality.support import CPU, listening, loaded, noise, tiny
from tests.run.support import bench, constant_batch

from .test_levers import build, losses, validated, verified

EVERYWHERE = ("lora", "lora_targets_all", "lora_text_encoder")


def trained(*names: str, steps: int = 4, **keys: Any) -> FineTuning:
    """A workload that has taken steps so large that the adapters matter."""
    workload = build(*names, workload__learning_rate=0.01, **keys)
    for _ in range(steps):
        workload.step(constant_batch(2))
    return workload


def install_location(unet: Any, networks: Networks) -> None:
    """Let `unet` attend to locations as that of the networks."""
    assert networks.location
    location.install(unet, networks.location)


class TestUnavailable:
    @pytest.mark.parametrize(
        ("names", "why"),
        [
            ("lora,unet_nhwc", "set recipe.unet=diffusers"),
            ("lora,bf16_split", "LoRA freezes them: set fp32 or half"),
            ("lora,half", "precision=fp32 has no half"),
            ("half", r"for weights that LoRA freezes \(recipe.lora_rank=4\)"),
            ("lora_targets_all", "set recipe.lora_rank too"),
            ("lora_text_encoder", "set recipe.lora_rank too"),
            ("lora,lora_text_encoder,cache_text", "leave cache_text out"),
        ],
    )
    def test_what_does_not_combine_is_named(self, names: str, why: str) -> None:
        with pytest.raises(UnavailableError, match=why):
            levers.require(bench(f"recipe=[cpu,{names}]", "data=prepared", "data.root=/nowhere"), CPU)

    def test_sharding_is_refused(self) -> None:
        with pytest.raises(UnavailableError, match=r"lever lora: .*set sharding=none, or pipeline .*, not zero1"):
            levers.require(bench("recipe=[cpu,lora,zero1]", "gpus=2"), CPU)

    def test_missing_peft_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inpaint_bench.levers.lora.find_spec", lambda name: None)
        with pytest.raises(UnavailableError, match=r"lever lora: .*pip install 'inpaint-bench\[lora\]'"):
            levers.require(bench("recipe=[cpu,lora]"), CPU)

    def test_weights_without_inpainting_channels_are_refused(self) -> None:
        networks = tiny("model=tiny", "model.unet.in_channels=9")
        networks.unet.conv_in = torch.nn.Conv2d(4, 32, 3, padding=1)
        widen_input(networks.unet)
        with pytest.raises(UserError, match="they would never see the mask"):
            adapters.add(networks, bench("recipe=[cpu,lora]").recipe)


class TestVerification:
    def test_layers_parameters_and_state_are_read_back(self) -> None:
        row = verified("lora")["lora_rank"]
        assert row.active
        # 32 layers of width 32 and 64, four of a block; then the location encoder.
        assert row.effective["layers"] == 32
        assert row.effective["parameters"] == 9_984 + 8_449
        assert row.effective["state_mib"] == pytest.approx(2 * 4 * (9_984 + 8_449) / 2**20, rel=0.01)
        assert "8 to_q, 8 to_k, 8 to_v, 8 to_out.0" in row.evidence
        assert "own weights are frozen" in row.evidence

    def test_each_key_is_read_back(self) -> None:
        rows = verified(*EVERYWHERE, "lora_rank=2", "lora_alpha=6")
        assert all(row.active for row in rows.values()), rows
        assert rows["lora_rank"].effective["rank"] == 2
        assert rows["lora_alpha"].effective == [6.0]
        assert "8 conv1" in rows["lora_targets"].evidence
        assert "2 q_proj" in rows["lora_text_encoder"].evidence

    def test_weights_that_are_trained_after_all_are_noticed(self) -> None:
        workload = build("lora")
        workload.components.networks.unet.conv_in.requires_grad_(True)
        workload.step(workload.next_batch())
        (row,) = levers.verify(workload.execution, workload.probe)
        workload.close()
        assert row.active is False

    def test_facts_count_what_is_trained_and_computed(self) -> None:
        plain, lora = build().facts, build("lora").facts
        assert lora.parameters == plain.parameters
        assert lora.parameters_by_network["lora"] == 9_984
        assert lora.parameters_trained == 9_984 + lora.parameters_by_network["location"]
        step = lora.flop_parts["unet_step"] / lora.flop_parts["unet_forward"]
        assert 2 < step < 2.2  # without gradients of weights
        assert plain.flop_per_image - lora.flop_per_image == pytest.approx((3 - step) * 12_677_120)

    def test_gradients_are_recomputed_up_to_the_first_adapter(self) -> None:
        assert verified("lora", "grad_checkpoint")["grad_checkpoint"].active


class TestParity:
    def test_first_prediction_and_loss_are_those_of_the_weights_beneath(self) -> None:
        parity = build(*EVERYWHERE).parity
        assert parity
        assert parity.update_rel == 0
        assert max(parity.prediction_rel, parity.loss_rel, parity.encoder_rel) < 1e-5
        assert 0 < parity.gradient_rel < 1e-5  # of B, from those of the weights beneath
        assert losses(build(*EVERYWHERE), 1) == losses(build(), 1)

    def test_wrong_scale_is_found_in_the_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add = adapters.add

        def add_wrongly(networks: Networks, recipe: Any) -> None:
            add(networks, recipe)
            for layer in adapters.layers(networks.unet).values():
                layer.lora_A[adapters.ADAPTER].register_forward_hook(lambda _, __, out: 2 * out)

        monkeypatch.setattr(adapters, "add", add_wrongly)
        parity = build("lora").parity
        assert parity
        assert parity.gradient_rel == pytest.approx(1, rel=1e-3)
        assert parity.far

    @pytest.mark.parametrize("targets", ["attention", "all"])
    def test_gradients_of_a_and_b_follow_from_those_of_the_merged_weights(self, targets: str) -> None:
        """In float64, with B not zero: dA = s B^T dW and dB = s dW A^T, at the weights W + s B A."""
        recipe = bench("recipe=[cpu,lora]", f"recipe.lora_targets={targets}", "recipe.lora_alpha=10").recipe
        networks = tiny()
        adapters.add(networks, recipe)
        unet = networks.unet.double()
        merged = UNet2DConditionModel.from_config(unet.config).double().train()
        layers, scale = adapters.layers(unet), 10 / 4
        weights = {name.replace(".base_layer", ""): p.detach() for name, p in unet.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        for name, layer in layers.items():
            a, b = layer.lora_A[adapters.ADAPTER].weight, layer.lora_B[adapters.ADAPTER].weight
            torch.nn.init.normal_(b, std=0.1, generator=generator)
            product = (b.flatten(1) @ a.flatten(1)).view(layer.base_layer.weight.shape)
            weights[f"{name}.weight"] = layer.base_layer.weight.detach() + scale * product.detach()
        merged.load_state_dict({name: weights[name] for name in merged.state_dict()})
        assert networks.location
        networks.location.double()
        install_location(merged, networks)
        inputs = (
            torch.randn(2, 9, 8, 8, dtype=torch.float64, generator=generator),
            torch.tensor([3, 700]),
            torch.randn(2, 81, 32, dtype=torch.float64, generator=generator),
        )
        outputs = [network(*inputs)[0] for network in (unet, merged)]
        assert torch.allclose(*outputs, rtol=1e-9, atol=1e-10)
        for output in outputs:
            output.square().mean().backward()
        for name, layer in layers.items():
            a, b = layer.lora_A[adapters.ADAPTER].weight, layer.lora_B[adapters.ADAPTER].weight
            gradient = merged.get_parameter(f"{name}.weight").grad.flatten(1)
            of_a = scale * b.flatten(1).T @ gradient
            of_b = scale * gradient @ a.flatten(1).T
            assert torch.allclose(a.grad.flatten(1), of_a, rtol=1e-7, atol=1e-12), name
            assert torch.allclose(b.grad.flatten(1), of_b, rtol=1e-7, atol=1e-12), name


class TestTraining:
    def test_only_adapters_and_location_change(self) -> None:
        workload = build(*EVERYWHERE, workload__learning_rate=0.01)
        networks = workload.components.networks
        before = {name: p.clone() for name, p in networks.unet.named_parameters()}
        text = {name: p.clone() for name, p in networks.text_encoder.named_parameters()}
        for _ in range(2):
            workload.step(workload.next_batch())
        workload.close()
        changed = {n for n, p in networks.unet.named_parameters() if not torch.equal(p, before[n])}
        changed |= {n for n, p in networks.text_encoder.named_parameters() if not torch.equal(p, text[n])}
        assert changed == {name for name in (*before, *text) if ".lora_" in name}

    def test_learns(self) -> None:
        workload, batch = build("lora", "lora_targets_all", workload__learning_rate=0.003), constant_batch(2)
        before = validated(workload, batch)
        for _ in range(100):
            workload.step(batch)
        assert validated(workload, batch) < 0.95 * before
        workload.close()

    def test_half_weights_beneath_give_similar_losses(self) -> None:
        plain = losses(build("lora", "amp_bf16"))
        half = build("lora", "amp_bf16", "half", data__validation_share=0.5)
        assert half.validate()["loss"] > 0
        types = {p.dtype for p in half.components.networks.unet.parameters()}
        assert types == {torch.bfloat16, torch.float32}
        assert {p.dtype for p in half.training_step.parameters} == {torch.float32}
        assert all(row.active for row in levers.verify(half.execution, half.probe))
        assert losses(build("lora", "amp_bf16", "half")) == pytest.approx(plain, rel=0.02)

    @pytest.mark.faults  # the compiler takes a minute and more
    @pytest.mark.timeout(1800)
    def test_compiled_unet_gives_equal_losses(self) -> None:
        workload = build("lora", "compile")
        assert workload.parity
        assert workload.parity.gradient_rel < 1e-3
        found = [workload.step(workload.next_batch()).item() for _ in range(3)]
        assert {row.field: row.active for row in levers.verify(workload.execution, workload.probe)} == {
            "lora_rank": True,
            "compile": True,
        }
        workload.close()
        assert found == pytest.approx(losses(build("lora")), rel=1e-3)


class TestFiles:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[FineTuning, Path]:
        """A training from a saved model, `tmp_path/base`, and the folder of its adapters."""
        torch.manual_seed(0)
        save_pipeline(listening(), tmp_path / "base")
        workload = trained(*EVERYWHERE, model__weights=tmp_path / "base", recipe__lora_alpha=8)
        adapters.save(workload.components.networks, tmp_path / "lora")
        return workload, tmp_path / "lora"

    def test_diffusers_loads_them_and_predicts_the_same(self, saved: tuple[FineTuning, Path]) -> None:
        workload, folder = saved
        networks = workload.components.networks
        base = folder.parent / "base"
        pipeline: Any = StableDiffusionInpaintPipeline.from_pretrained(base, safety_checker=None)
        tokens = torch.arange(77)[None]
        plain = pipeline.text_encoder(tokens)[0]
        pipeline.load_lora_weights(folder)
        with torch.no_grad():
            expected = networks.text_encoder(tokens)[0]
            found = pipeline.text_encoder(tokens)[0]
        assert torch.allclose(found, expected, atol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-2)
        ours = noise(networks)
        theirs = loaded(base)
        theirs.location, theirs.unet = networks.location, pipeline.unet
        install_location(theirs.unet, networks)
        assert torch.allclose(noise(theirs), ours, atol=1e-5)
        pipeline.unet.disable_adapters()
        assert not torch.allclose(noise(theirs), ours, atol=1e-2)

    def test_a_unet_alone_loads_them(self, saved: tuple[FineTuning, Path]) -> None:
        workload, folder = saved
        networks = workload.components.networks
        again = loaded(folder.parent / "base")
        again.unet.load_lora_adapter(folder, prefix="unet", weight_name=ADAPTERS)
        again.location = networks.location
        install_location(again.unet, networks)
        assert torch.allclose(noise(again), noise(networks), atol=1e-5)

    def test_merged_as_the_message_says_they_are_whole_weights(self, saved: tuple[FineTuning, Path]) -> None:
        workload, folder = saved
        with pytest.raises(UserError, match="holds LoRA adapters only") as refused:
            loaded(folder)
        code = str(refused.value).partition("trained on, ")[2].partition(" writes them")[0]
        code = code.replace("BASE", str(folder.parent / "base")).replace("FOLDER", str(folder.parent / "merged"))
        exec(code, {"StableDiffusionInpaintPipeline": StableDiffusionInpaintPipeline})
        shutil.copytree(folder / "location", folder.parent / "merged" / "location")
        merged = loaded(folder.parent / "merged")
        assert torch.allclose(noise(merged), noise(workload.components.networks), atol=1e-5)

    def test_hold_adapters_and_location_only(self, saved: tuple[FineTuning, Path]) -> None:
        _, folder = saved
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert files == {ADAPTERS, "location/config.json", "location/model.safetensors"}
        description = read_location_description(folder)
        assert description is not None
        assert description.tokens == 4
