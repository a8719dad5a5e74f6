"""Levers on the CPU with tiny networks: availability, effect, verification."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch._inductor.runtime import compile_tasks

from inpaint_bench import levers
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.records import LeverReport
from inpaint_bench.kernels.adamw import FlatAdamW, master
from inpaint_bench.levers.execution import Compile
from inpaint_bench.models.execution import Execution
from inpaint_bench.workloads import finetune_inpaint
from inpaint_bench.workloads import parity as parity_of
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.models.live_memory import LiveMemory
from tests.run.support import bench, constant_batch

CPU = torch.device("cpu")


def build(*names: str, **keys: Any) -> FineTuning:
    """A tiny workload with these levers on the CPU's baseline; `a__b=value` sets the key a.b."""
    choices = split_choices([f"recipe=[{','.join(('cpu', *names))}]"])
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    return finetune_inpaint.build(bench(*choices, *overrides), CPU)


def losses(workload: FineTuning, steps: int = 3) -> list[float]:
    found = [workload.step(workload.next_batch()).item() for _ in range(steps)]
    workload.close()
    return found


def verified(*names: str, **keys: Any) -> dict[str, LeverReport]:
    workload = build(*names, **keys)
    try:
        workload.step(workload.next_batch())
        return {row.field: row for row in levers.verify(workload.execution, workload.probe)}
    finally:
        workload.close()


class TestUnavailable:
    @pytest.mark.parametrize(
        ("lever", "why"),
        [
            ("tf32", "needs a GPU"),
            ("attn_cudnn", "needs a GPU"),
            ("attn_efficient", "needs a GPU"),
            ("cuda_graph", "needs a GPU"),
            ("pin_memory", "needs a GPU"),
            ("non_blocking", "needs a GPU"),
            ("cudnn_benchmark", "needs a GPU"),
            ("cudnn_all_plans", "cuDNN measures nothing"),
            ("cudnn_all_plans,cudnn_benchmark", "needs a GPU"),
            ("force_layout", "set recipe.compile too"),
            ("force_layout,compile", "needs a GPU"),
            ("pdl", "set recipe.compile too"),
            ("pdl,compile", "needs a GPU"),
            ("memmap", "needs data=prepared"),
            ("stage_shm", "needs data=prepared"),
            ("cache_image", "needs data=prepared"),
            ("on_gpu", "nothing is cached"),
            ("prefetch_factor=4", "without loader processes"),
        ],
    )
    def test_lever_that_cannot_run_is_an_error_with_its_reason(self, lever: str, why: str) -> None:
        with pytest.raises(UnavailableError, match=why):
            build(lever)

    def test_unavailable_lever_is_found_before_data_is_opened(self) -> None:
        with pytest.raises(UnavailableError, match="lever tf32"):
            levers.require(bench("recipe=[cpu,tf32]", "data=prepared", "data.root=/nowhere"), CPU)

    def test_grad_checkpoint_and_attention_exclude_each_other(self) -> None:
        with pytest.raises(UnavailableError, match="lever attn_math: grad_checkpoint recomputes"):
            build("attn_math", "grad_checkpoint")

    @pytest.mark.parametrize(
        ("lever", "why"),
        [("compile", "has its own kernels"), ("grad_checkpoint", "keeps its activations")],
    )
    def test_levers_of_diffusers_unet_exclude_the_channels_last_unet(self, lever: str, why: str) -> None:
        with pytest.raises(UnavailableError, match=why):
            build(lever, "unet_nhwc")

    def test_channels_last_unet_needs_16_bit_weights_on_a_gpu(self) -> None:
        with pytest.raises(UnavailableError, match=r"recipe\.weights=bf16_split"):
            levers.require(bench("recipe=[baseline,unet_nhwc]"), torch.device("cuda"))

    def test_channels_last_encoder_without_an_image_to_encode_is_refused(self) -> None:
        recipe = "recipe=[baseline,vae_encoder_nhwc,cache_image,cache_masked]"
        with pytest.raises(UnavailableError, match="no image is encoded in the step"):
            levers.require(bench(recipe, "data=prepared", "data.root=/nowhere"), torch.device("cuda"))

    def test_flash_attention_4_needs_the_channels_last_unet_and_a_hopper_gpu(self) -> None:
        with pytest.raises(UnavailableError, match=r"set recipe\.unet=nhwc too"):
            build("attn_flash4")
        with pytest.raises(UnavailableError, match="needs a GPU"):
            build("attn_flash4", "unet_nhwc")

    def test_batch_not_divisible_by_accumulate_is_refused(self) -> None:
        with pytest.raises(UnavailableError, match="batch 3 cannot be divided into 2"):
            build("accumulate=2", batch=3)


class TestVerification:
    def test_report_has_requested_and_effective_values(self) -> None:
        rows = verified("channels_last", "amp_bf16", "adamw_fused", "accumulate=2", "grad_checkpoint", "ema")
        assert {name: row.requested for name, row in rows.items()} == {
            "precision": "bf16",
            "channels_last": True,
            "optimizer": "adamw_fused",
            "accumulate": 2,
            "grad_checkpoint": True,
            "ema": True,
        }
        assert all(row.active for row in rows.values()), rows
        assert rows["precision"].effective == "bf16"
        assert rows["channels_last"].effective == 1
        assert rows["accumulate"].effective == 2
        assert "the last block ran 4 times in 2 UNet passes" in rows["grad_checkpoint"].evidence

    def test_bf16_weights_report_the_type_of_the_moments(self) -> None:
        assert "moments bf16" in verified("bf16_stochastic")["weights"].evidence
        assert "moments fp32" in verified("bf16_master")["weights"].evidence
        assert "optimizer SplitMasterAdamW" in verified("bf16_split")["weights"].evidence

    def test_channels_last_unet_is_verified_by_its_class(self) -> None:
        rows = verified("unet_nhwc", "bf16_split")
        assert rows["unet"].effective == "NhwcUNet"
        assert rows["unet"].active
        assert rows["weights"].active

    def test_channels_last_encoder_is_verified_by_its_class_and_calls(self) -> None:
        row = verified("vae_encoder_nhwc")["vae_encoder"]
        assert row.active
        assert row.evidence == "NhwcEncoder; 2 calls in a step, by its reference in plain PyTorch"

    def test_attention_counts_operators_of_the_unet(self) -> None:
        for name in ("flash", "math"):
            row = verified(f"attn_{name}")["attention"]
            assert row.active
            assert {kind for kind, count in row.effective.items() if count} == {name}

    def test_attention_ignores_the_cross_attention_of_the_channels_last_unet(self) -> None:
        """Regression: its softmaxes made every backend look inactive."""
        row = verified("unet_nhwc", "attn_flash")["attention"]
        assert row.effective["flash"] > 0
        assert row.active

    def test_norms_compute_in_bf16_with_bf16_weights(self) -> None:
        workload = build("bf16_master")
        seen: list[torch.dtype] = []
        norm = next(m for m in workload.components.networks.unet.modules() if isinstance(m, torch.nn.GroupNorm))
        norm.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        workload.step(workload.next_batch())
        workload.close()
        assert seen == [torch.bfloat16]


class TestParity:
    def test_fp32_is_the_reference_but_for_the_order_of_sums(self) -> None:
        parity = build(batch=3).parity
        assert (parity.reference, parity.update_rel, parity.far) == ("fp32 ieee, eager", 0, False)
        for error in (parity.prediction_rel, parity.loss_rel, parity.gradient_rel, parity.encoder_rel):
            assert error < 1e-5

    # (3, 2): the last micro-batch is smaller; (6, 3): its last two images are not compared
    @pytest.mark.parametrize(("batch", "size"), [(3, 1), (3, 2), (6, 1), (6, 3)])
    def test_micro_batches_of_the_reference_give_what_the_whole_batch_gives(self, batch: int, size: int) -> None:
        workload = build(batch=batch)
        whole = parity_of.reference(workload.components, size=batch)
        cut = parity_of.reference(workload.components, size=size)
        workload.close()
        assert len(whole.values["prediction_rel"]) == len(cut.values["prediction_rel"]) == min(batch, 4)
        assert len(cut.gradients) >= parity_of.PARAMETERS_COMPARED
        errors = parity_of._errors(workload.components, whole, cut)
        assert max(errors.values()) < 1e-5, errors
        assert all(p.requires_grad and p.grad is None for p in workload.components.networks.unet.parameters())

    def test_reference_needs_less_memory_than_a_step_of_training(self) -> None:
        workload = build(batch=4)
        batch, memory = workload.next_batch(), {}
        for name, work in (
            ("step", lambda: workload.step(batch)),
            ("reference", lambda: parity_of.reference(workload.components)),
        ):
            with LiveMemory() as live:
                work()
            memory[name] = live.peak_mib
        workload.close()
        assert 0 < memory["reference"] < 0.75 * memory["step"]

    @pytest.mark.parametrize("largest", [0, 4], ids=["reference", "recipe"])
    def test_comparison_that_runs_out_of_memory_is_named_and_training_goes_on(
        self, largest: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forward = UNet2DConditionModel.forward

        def of_few(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if len(sample) > largest and not sample.is_meta:  # where operations are counted
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return forward(self, sample, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(UNet2DConditionModel, "forward", of_few)
            workload = build(batch=5)
        found = workload.parity
        assert found.reference is None
        assert ("this recipe ran out" if largest else "the reference in fp32 ran out") in found.unavailable
        assert losses(workload) == losses(build(batch=5))

    def test_error_that_is_not_finite_is_far_and_null(self) -> None:
        workload = build()
        components = workload.components
        against = parity_of.reference(components)
        assert against is not None
        against.values["prediction_rel"][:] = float("nan")
        found, _ = parity_of.compare(components, against)
        workload.close()
        assert (found.prediction_rel, found.not_finite, found.far) == (None, ["prediction_rel"], True)
        assert found.gradient_rel < 1e-5

    def test_bf16_differs_by_its_rounding(self) -> None:
        parity = build("amp_bf16").parity
        assert parity
        assert 1e-4 < parity.prediction_rel < 0.05
        assert 1e-4 < parity.gradient_rel < 0.1

    def test_changed_encoder_is_detected(self) -> None:
        workload = build()
        components = workload.components
        against = parity_of.reference(components)
        encoder = components.calls["vae_encoder"]
        components.calls["vae_encoder"] = lambda image: 2 * encoder(image)
        found, _ = parity_of.compare(components, against)
        workload.close()
        assert found.encoder_rel > 0.5
        assert found.far

    def test_other_optimizer_differs_only_in_the_update(self) -> None:
        parity = build("adamw_fused").parity
        assert parity
        assert parity.gradient_rel < 1e-5
        assert 0 < parity.update_rel < 1e-5


class TestTraining:
    def test_micro_batches_have_the_samples_and_noise_of_the_whole_batch(self) -> None:
        whole, cut = losses(build(batch=4)), losses(build("accumulate=2", batch=4))
        assert cut == pytest.approx(whole, rel=1e-4)

    @pytest.mark.parametrize(
        "lever", ["grad_checkpoint", "channels_last", "unet_nhwc", "vae_encoder_nhwc", "attn_math"]
    )
    def test_exact_lever_gives_equal_losses(self, lever: str) -> None:
        workload = build(lever)
        assert workload.parity
        assert workload.parity.gradient_rel < 1e-4
        assert 0 <= workload.parity.encoder_rel < 1e-5
        assert workload.facts.parameters == build().facts.parameters
        assert losses(workload) == pytest.approx(losses(build()), rel=1e-4)

    @pytest.mark.parametrize("names", [("bf16_split",), ("unet_nhwc", "bf16_split"), ("bf16_master",)])
    def test_masters_begin_at_the_fp32_weights(self, names: tuple[str, ...]) -> None:
        plain, narrow = build(*(name for name in names if name == "unet_nhwc")), build(*names)
        optimizer = narrow.components.optimizers[0]
        assert isinstance(optimizer, FlatAdamW)
        buffers, flat = optimizer.buffers, optimizer._flat
        masters = buffers["master"] if "master" in buffers else master(flat, buffers["low"])
        of_plain = dict(plain.components.networks.unet.named_parameters())
        for name, p in narrow.components.networks.unet.named_parameters():
            own = torch.as_strided(masters, p.shape, p.stride(), p.storage_offset())
            assert torch.equal(own, of_plain[name]), name

    @pytest.mark.parametrize("lever", ["bf16_split", "bf16_master"])
    def test_masters_train_like_autocast_from_the_first_steps_on(self, lever: str) -> None:
        """At the default rate. With masters that begin at rounded weights losses are off by up to 0.007."""
        autocast, narrow = (losses(build("amp_bf16", *names, batch=8), 8) for names in ((), (lever,)))
        assert narrow == pytest.approx(autocast, abs=2e-3)

    @pytest.mark.parametrize(
        "lever",
        ["bf16_split", *(pytest.param(name, marks=pytest.mark.faults) for name in ("bf16_master", "bf16_stochastic"))],
    )
    def test_bf16_weights_learn_like_fp32(self, lever: str) -> None:
        """At a learning rate whose updates rounding to nearest in bf16 would lose."""
        plain, narrow = build(workload__learning_rate=3e-4), build(lever, workload__learning_rate=3e-4)
        batch = constant_batch(2)
        first = [float(one.step(batch)) for one in (plain, narrow)]
        for _ in range(60):
            last = [float(one.step(batch)) for one in (plain, narrow)]
        assert min(last) < min(first)
        shown = [validated(one, batch) for one in (plain, narrow)]
        assert shown[1] == pytest.approx(shown[0], rel=0.05)

    def test_kernels_are_timed_as_the_compiling_processes_made_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Regression: with another ptxas than theirs, `max-autotune` compiled each kernel again to time it."""
        for folder in (tmp_path / "bin", tmp_path / "torch/bin"):  # where PyTorch looks, by its version
            folder.mkdir(parents=True)
            (folder / "ptxas").touch(mode=0o755)
        monkeypatch.setattr(compile_tasks, "__file__", str(tmp_path / "torch/runtime/compile_tasks.py"))
        compile_tasks._set_triton_ptxas_path.cache_clear()
        monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # to unset it again after the test
        monkeypatch.delenv("TRITON_PTXAS_PATH")
        network = torch.nn.Linear(1, 1)
        for choice, is_set in (("default", False), ("max-autotune", True)):
            chosen = bench(*split_choices(["recipe=cpu"]), f"recipe.compile={choice}")
            calls = {"unet": network}
            Compile().apply(Execution(bench=chosen, device=CPU, networks=dict(calls), calls=calls, eager_pass=list))
            assert os.environ.get("TRITON_PTXAS_PATH", "").endswith("bin/ptxas") == is_set

    @pytest.mark.faults  # the compiler takes a minute and more
    @pytest.mark.timeout(1800)
    def test_compiled_networks_give_equal_losses(self) -> None:
        workload = build("compile")
        assert workload.facts.compile_s > 0
        assert workload.parity
        assert workload.parity.gradient_rel < 1e-3
        assert losses(workload) == pytest.approx(losses(build()), rel=1e-3)


def validated(workload: FineTuning, batch: dict[str, torch.Tensor]) -> float:
    """The mean loss on one batch over draws that are the same for every model."""
    from inpaint_bench.models.training_step import diffusion_loss, draw

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        draws = [draw(workload.components, 2, generator) for _ in range(20)]
        found = [float(diffusion_loss(workload.components, batch, drawn)) for drawn in draws]
    return sum(found) / len(found)


class TestState:
    def test_checkpoint_of_another_batch_or_data_set_is_refused(self) -> None:
        tensors, values = build(batch=2).state()
        with pytest.raises(UserError, match="different data stream: batch was 2, is 4"):
            build(batch=4).restore(tensors, values)
        with pytest.raises(UserError, match=r"different data stream: data was \w+, is \w+"):
            build(batch=2, data__num_images=9).restore(tensors, values)

    @pytest.mark.parametrize(
        "names",
        [
            (),
            ("ema", "adamw_fused"),
            ("bf16_master",),
            ("bf16_stochastic",),
            ("channels_last", "adamw_fused"),
            ("unet_nhwc", "bf16_split", "ema"),
            ("lora",),
            ("lora", "lora_targets_all", "lora_text_encoder", "ema", "adamw_fused"),
            pytest.param(
                ("adamw_8bit",), marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
            ),
        ],
    )
    def test_restored_state_gives_bit_identical_losses(self, names: tuple[str, ...]) -> None:
        whole = build(*names)
        for _ in range(3):
            whole.step(whole.next_batch())
        tensors, values = whole.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        shared = torch.get_rng_state()
        rest = losses(whole)
        again = build(*names)
        again.restore(tensors, values)
        torch.set_rng_state(shared)  # stochastic rounding draws from it; the checkpoint keeps it
        assert losses(again) == rest
        saved = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("parameter."))
        assert "lora" not in names or saved < 100_000
        eight_bit = any(tensor.dtype == torch.uint8 for name, tensor in tensors.items() if name.endswith("state1"))
        assert eight_bit == ("adamw_8bit" in names)

    def test_checkpoint_of_another_model_is_refused(self) -> None:
        tensors, values = build().state()
        other = build(model__location_tokens=2)
        before = [parameter.clone() for parameter in other.training_step.parameters]
        with pytest.raises(UserError, match=r"parameter \d+ is of shape .* in the checkpoint, of shape .* here"):
            other.restore({name: tensor + 1 for name, tensor in tensors.items()}, values)
        after = other.training_step.parameters
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing was overwritten"


def test_frozen_networks_in_16_bits_run_without_autocast() -> None:
    row = verified("amp_bf16", "encoders_half")["encoders"]
    assert row.active
    outputs = {"vae_encoder": "bf16", "text_encoder": "bf16"}
    assert row.effective == {"vae": ["bf16"], "text_encoder": ["bf16"], "outputs": outputs}
    before, after = losses(build("amp_bf16")), losses(build("amp_bf16", "encoders_half"))
    assert before == pytest.approx(after, rel=2e-2)
    assert before != after


def test_frozen_networks_of_a_training_in_fp32_are_in_fp32() -> None:
    assert verified("encoders_half")["encoders"].active
    assert losses(build("encoders_half")) == losses(build())


def test_text_encoder_that_is_trained_keeps_its_type() -> None:
    row = verified("amp_bf16", "encoders_half", "lora_text_encoder", "lora")["encoders"]
    assert row.active
    assert row.effective == {"vae": ["bf16"], "outputs": {"vae_encoder": "bf16"}}


def test_frozen_networks_of_a_transformer_run_without_autocast() -> None:
    names = ("amp_bf16", "half", "lora")
    row = verified(*names, "encoders_half", model="tiny_flux_fill")["encoders"]
    assert row.active
    assert set(row.effective["outputs"].values()) == {"bf16"}
    before, after = (losses(build(*names, *more, model="tiny_flux_fill")) for more in ((), ("encoders_half",)))
    assert before == pytest.approx(after, rel=2e-2)


def test_gradients_are_clipped_to_their_norm() -> None:
    workload = build(workload__max_grad_norm=0.25)
    step, norms = workload.training_step, []
    step.optimizers[0].register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in step.parameters if p.grad is not None]))
    )
    losses(workload)
    assert [float(norm) for norm in norms] == pytest.approx([0.25] * 3, rel=1e-3)
