"""A network is complete and finite, or it is refused by name, whatever the index of its shards says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.models import flops, pipeline_folder
from inpaint_bench.models.weights_folder import check_weights_folder
from inpaint_bench.quality.metrics import _load_clip, _tiny_clip
from tests.models.test_transformer_folder import built, written
from tests.quality.support import listening, loaded, noise
from tests.run.support import bench

Tensors = dict[str, Tensor]
PARTS = ["unet", "vae", "text_encoder"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of FLUX Fill; not to be changed."""
    return written("fill", tmp_path_factory.mktemp("flux"))


@pytest.fixture(params=["with accelerate", "without accelerate"])
def my_flux(flux: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of FLUX Fill to damage, read in both ways that diffusers has."""
    if request.param == "without accelerate":
        monkeypatch.setattr(pipeline_folder, "find_spec", lambda _: None)
    return Path(shutil.copytree(flux, tmp_path / "flux"))


def weights_of(part: Path) -> Path:
    (file,) = part.glob("*.safetensors")
    return file


def change(part: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(weights_of(part))
    edit(tensors)
    save_file(tensors, weights_of(part), {"format": "pt"})


def set_key(path: Path, **keys: Any) -> None:
    content = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def divide(part: Path, edit: Callable[[Tensors, Tensors, dict[str, str]], object] = lambda *_: None) -> None:
    """Divide the weights into two shards; `edit` changes their tensors and the index."""
    path = weights_of(part)
    tensors, stem = load_file(path), path.stem
    path.unlink()
    names = [f"{stem}-{number}-of-00002.safetensors" for number in ("00001", "00002")]
    shards = [{key: tensors[key] for key in sorted(tensors)[start::2]} for start in (0, 1)]
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    edit(*shards, index)
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, part / name, {"format": "pt"})
    (part / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def refused(folder: Path, *sentences: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(folder)
    assert [text for text in sentences if text not in str(error.value)] == [], str(error.value)
    assert "\n" not in str(error.value)


def refused_at_launch(folder: Path, *sentences: str) -> None:
    with pytest.raises(UserError) as error:
        check_weights_folder(folder, "given")
    assert [text for text in sentences if text not in str(error.value)] == [], str(error.value)


# --- shards --------------------------------------------------------------------------------------


def lose(_: Tensors, second: Tensors, __: dict[str, str]) -> None:
    del second[min(second)]


def unlist(_: Tensors, second: Tensors, index: dict[str, str]) -> None:
    del index[min(second)]


def misplace(first: Tensors, second: Tensors, index: dict[str, str]) -> None:
    index[min(second)] = index[min(first)]


def repeat(first: Tensors, second: Tensors, _: dict[str, str]) -> None:
    second[min(first)] = torch.zeros_like(first[min(first)])


class TestShards:
    @pytest.mark.parametrize("part", PARTS)
    def test_are_loaded_as_one_file(self, saved_copy: Path, part: str) -> None:
        divide(saved_copy / part)
        assert torch.allclose(noise(loaded(saved_copy)), noise(listening()), atol=1e-5)

    @pytest.mark.parametrize("part", PARTS)
    @pytest.mark.parametrize(
        ("edit", "sentence"),
        [
            (lose, "they lack 1 of its tensors, such as"),
            (unlist, "it lacks 1 of theirs, such as"),
            (misplace, "they lack 1 of its tensors, such as"),
            (repeat, "it lacks 1 of theirs, such as"),
        ],
    )
    def test_that_differ_from_their_index_are_refused_at_launch(
        self, saved_copy: Path, part: str, edit: Any, sentence: str
    ) -> None:
        divide(saved_copy / part, edit)
        refused_at_launch(saved_copy, f"{part} cannot be loaded", ".index.json does not fit its files", sentence)

    def test_that_are_not_there_are_named(self, saved_copy: Path) -> None:
        divide(saved_copy / "unet")
        (saved_copy / "unet" / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
        refused_at_launch(saved_copy, "diffusion_pytorch_model-00002-of-00002.safetensors is missing")

    @pytest.mark.parametrize("content", ["[]", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1'])
    def test_with_a_damaged_index_are_refused(self, saved_copy: Path, content: str) -> None:
        (saved_copy / "vae/diffusion_pytorch_model.safetensors.index.json").write_text(content)
        refused_at_launch(
            saved_copy, "vae cannot be loaded (diffusion_pytorch_model.safetensors.index.json is damaged)"
        )

    @pytest.mark.parametrize("part", ["transformer", "text_encoder_2"])
    def test_of_flux_that_lack_a_tensor_are_refused(self, my_flux: Path, part: str) -> None:
        divide(my_flux / part)
        built("fill", f"model.weights={my_flux}")
        for path in (my_flux / part).glob("*00002.safetensors"):
            tensors = load_file(path)
            del tensors[min(tensors)]
            save_file(tensors, path, {"format": "pt"})
        with pytest.raises(UserError, match=f"{part} cannot be loaded .*does not fit its files"):
            built("fill", f"model.weights={my_flux}")


# --- values and types ----------------------------------------------------------------------------


def spoil(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        name = sorted(tensors)[3]
        tensors[name] = tensors[name].to(dtype)
        tensors[name].view(-1)[0] = value

    return edit


class TestValues:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("part", [*PARTS, "location"])
    def test_that_are_not_finite_name_tensor_and_file(self, saved_copy: Path, part: str, value: float) -> None:
        change(saved_copy / part, spoil(value))
        file = weights_of(saved_copy / part).name
        refused(saved_copy, f"{part}: ", f" in {file} has values that are NaN or infinite")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_that_are_not_finite_are_seen_in_every_type(self, saved_copy: Path, dtype: torch.dtype) -> None:
        change(saved_copy / "unet", spoil(float("nan"), dtype))
        refused(saved_copy, "has values that are NaN or infinite")

    def test_that_are_not_finite_name_the_shard(self, saved_copy: Path) -> None:
        divide(saved_copy / "unet", lambda _, second, __: second["conv_in.weight"].fill_(float("nan")))
        refused(saved_copy, "unet: conv_in.weight in diffusion_pytorch_model-00002-of-00002.safetensors has values")

    def test_of_half_precision_whose_sum_overflows_are_finite(self) -> None:
        layer = torch.nn.Linear(64, 64).half()
        torch.nn.init.constant_(layer.weight, 60000.0)
        assert not layer.weight.sum().isfinite()
        pipeline_folder.check_network(layer, "a layer", Path(), {})

    def test_of_flux_that_are_not_finite_are_refused(self, my_flux: Path) -> None:
        change(my_flux / "transformer", spoil(float("nan")))
        with pytest.raises(UserError, match=r"transformer: .* has values that are NaN or infinite"):
            built("fill", f"model.weights={my_flux}")


class TestDamaged:
    @pytest.mark.parametrize("part", [*PARTS, "location"])
    def test_truncated_weights_name_the_part(self, saved_copy: Path, part: str) -> None:
        file = weights_of(saved_copy / part)
        file.write_bytes(file.read_bytes()[:-1000])
        refused(saved_copy, f"{part} cannot be loaded")

    @pytest.mark.parametrize("part", [*PARTS, "location"])
    def test_integers_are_no_weights(self, saved_copy: Path, part: str) -> None:
        change(saved_copy / part, spoil(1, torch.int64))
        refused(saved_copy, "is not of floating point" if part == "location" else "in I64: quantized weights")

    def test_eight_bits_are_no_weights(self, saved_copy: Path) -> None:
        change(saved_copy / "unet", spoil(1, torch.float8_e4m3fn))
        refused_at_launch(saved_copy, "in F8_E4M3: quantized weights")

    @pytest.mark.parametrize("part", PARTS)
    def test_missing_tensor_is_an_error(self, saved_copy: Path, part: str) -> None:
        change(saved_copy / part, lambda tensors: tensors.pop(min(tensors)))
        refused(saved_copy, f"{part} is incomplete, 1 of its tensors are missing")

    @pytest.mark.parametrize("part", PARTS)
    def test_pickled_weights_are_refused_unread(self, saved_copy: Path, part: str) -> None:
        weights_of(saved_copy / part).rename(saved_copy / part / "weights.bin")
        refused(saved_copy, f"{part} holds pickled weights only")

    @pytest.mark.parametrize(
        ("file", "content", "sentence"),
        [
            ("unet/config.json", "{", "unet cannot be loaded"),
            ("vae/config.json", "{", "vae cannot be loaded"),
            ("text_encoder/config.json", "{", "text_encoder cannot be loaded"),
            ("scheduler/scheduler_config.json", "{", "scheduler cannot be loaded"),
            ("tokenizer/vocab.json", "[]", "the tokenizer cannot be loaded"),
            ("location/config.json", '{"tokens": 4}', "config.json: Object missing required field `width`"),
            ("location/config.json", "[]", "config.json: Expected `object`, got `array`"),
        ],
    )
    def test_damaged_description_is_named(self, saved_copy: Path, file: str, content: str, sentence: str) -> None:
        (saved_copy / file).write_text(content)
        refused(saved_copy, sentence)

    def test_missing_part_is_named(self, saved_copy: Path) -> None:
        (saved_copy / "vae").rename(saved_copy / "other")
        refused(saved_copy, "not a diffusers folder, vae missing")


class TestConfiguration:
    @pytest.mark.parametrize(
        ("file", "keys", "sentence"),
        [
            ("vae/config.json", {"scaling_factor": 0}, "scaling_factor 0, which must be a number above 0"),
            ("vae/config.json", {"scaling_factor": float("nan")}, "scaling_factor nan, which must be"),
            ("vae/config.json", {"scaling_factor": "0.18"}, "scaling_factor 0.18, which must be"),
            ("text_encoder/config.json", {"num_attention_heads": 3}, "text_encoder cannot be loaded"),
            ("scheduler/scheduler_config.json", {"_class_name": None}, "its scheduler None is not one for a UNet"),
            (
                "scheduler/scheduler_config.json",
                {"_class_name": "EDMEulerScheduler", "beta_start": ..., "beta_schedule": ...},
                "its scheduler EDMEulerScheduler lacks beta_start",
            ),
            ("location/config.json", {"tokens": 6}, "has tokens 6, not 4; set model.location_tokens"),
            ("location/config.json", {"shortest_m": 20.0}, "location encoder has shortest_m 20.0, not 10.0"),
            (
                "tokenizer/vocab.json",
                {"<|endoftext|>": 49407},
                "the tokenizer has ids up to 49407, the text encoder has 1000 ids",
            ),
        ],
        ids=lambda value: "",
    )
    def test_that_cannot_be_used_is_refused(
        self, saved_copy: Path, file: str, keys: dict[str, Any], sentence: str
    ) -> None:
        set_key(saved_copy / file, **keys)
        refused(saved_copy, sentence)

    def test_keys_that_diffusers_passes_by_are_passed_by(self, saved_copy: Path) -> None:
        """Regression: a UNet saved with its EMA's settings ended the run once its operations were counted."""
        for part in ("unet", "vae"):
            set_key(saved_copy / part / "config.json", decay=0.9999, power=0.75)
        networks = loaded(saved_copy)
        assert networks.unet.config["decay"] == 0.9999
        model = bench("model=tiny_inpaint", f"model.weights={saved_copy}").model
        assert flops.count(model, 64, networks)["unet_forward"] > 0

    def test_keys_that_diffusers_passes_by_are_passed_by_in_a_transformer(self, my_flux: Path) -> None:
        set_key(my_flux / "transformer/config.json", decay=0.9999)
        networks = built("fill", f"model.weights={my_flux}")
        model = bench("model=tiny_flux_fill", f"model.weights={my_flux}").model
        assert flops.count(model, 64, networks)["unet_forward"] > 0

    @pytest.mark.parametrize(
        ("part", "keys", "sentence"),
        [
            (
                "unet",
                {"in_channels": 4},
                "says in_channels 4, conv_in.weight in diffusion_pytorch_model.safetensors is",
            ),
            ("vae", {"latent_channels": 16}, "says latent_channels 16, decoder.conv_in.weight in"),
            ("text_encoder", {"hidden_size": 64}, "says hidden_size 64, embeddings.token_embedding.weight in"),
        ],
    )
    def test_that_differs_from_the_header_is_refused_at_launch(
        self, saved_copy: Path, part: str, keys: dict[str, Any], sentence: str
    ) -> None:
        set_key(saved_copy / part / "config.json", **keys)
        refused_at_launch(saved_copy, f"{part} cannot be loaded (its config.json {sentence}")

    @pytest.mark.parametrize(
        ("part", "keys", "sentence"),
        [
            ("unet", {"cross_attention_dim": 48}, "attn2.to_k.weight is [32, 32], not [32, 48]"),
            ("text_encoder", {"intermediate_size": 65}, "encoder.layers.0.mlp.fc1.bias is [64], not [65]"),
        ],
    )
    def test_of_other_sizes_names_a_tensor_and_both_sizes(
        self, saved_copy: Path, part: str, keys: dict[str, Any], sentence: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        set_key(saved_copy / part / "config.json", **keys)
        refused(saved_copy, f"{part} does not fit its config.json", "of the tensors have other sizes there", sentence)
        assert capfd.readouterr() == ("", ""), "the libraries would tell to train the random ones"

    def test_of_fewer_layers_than_the_file_has_is_refused(self, saved_copy: Path) -> None:
        change(saved_copy / "unet", lambda tensors: tensors.update({"mid_block.more.weight": torch.ones(2)}))
        refused(saved_copy, "unet does not fit its config.json, 1 of the tensors are not in it: mid_block.more.weight")

    def test_of_flux_that_differs_is_refused(self, my_flux: Path) -> None:
        set_key(my_flux / "transformer/config.json", joint_attention_dim=48)
        with pytest.raises(UserError, match=r"transformer .*context_embedder\.weight"):
            built("fill", f"model.weights={my_flux}")
        set_key(my_flux / "transformer/config.json", in_channels=320)
        with pytest.raises(UserError, match=r"says in_channels 320, x_embedder\.weight in .* is \[\d+, 384\]"):
            check_weights_folder(my_flux, "given")


class TestOtherModel:
    """A folder that is whole, and not SD 1.5 inpainting."""

    @pytest.mark.parametrize(
        ("part", "changes", "sentence"),
        [
            ("vae", {"latent_channels": 16}, "vae.latent_channels is 16, in SD 1 and 2 it is 4"),
            ("unet", {"in_channels": 5}, "unet.in_channels is 5, this workload needs 9"),
            ("unet", {"out_channels": 8}, "unet.out_channels is 8, in SD 1 and 2 it is 4"),
            (
                "unet",
                {"cross_attention_dim": 48},
                "unet.cross_attention_dim is 48, in SD 1 and 2 it is 32",
            ),
            ("unet", {"num_class_embeds": 10}, "unet.num_class_embeds is 10, in SD 1 and 2 it is none"),
            (
                "unet",
                {
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 8,
                    "projection_class_embeddings_input_dim": 64,
                },
                "unet.addition_embed_type is text_time, in SD 1 and 2 it is none",
            ),
            (
                "scheduler",
                {"prediction_type": "sample"},
                "scheduler.prediction_type is sample, in SD 1 and 2",
            ),
        ],
        ids=lambda value: "",
    )
    def test_is_refused_with_actual_and_expected_value(
        self, saved_copy: Path, part: str, changes: dict[str, Any], sentence: str
    ) -> None:
        model = bench().model
        kinds = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "scheduler": DDPMScheduler}
        kinds[part](**{**getattr(model, part), **changes}).save_pretrained(saved_copy / part)
        refused(saved_copy, sentence)


class TestScheduler:
    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            ({"rescale_betas_zero_snr": True}, "scheduler.rescale_betas_zero_snr is True, in SD 1 and 2 it is False"),
            ({"trained_betas": [0.5] * 999 + [1.0]}, "the noise schedule of its scheduler leaves no signal"),
            ({"beta_end": 2.0}, "the noise schedule of its scheduler leaves no signal, or is not one"),
            (
                {"_class_name": "FlowMatchEulerDiscreteScheduler"},
                "its scheduler FlowMatchEulerDiscreteScheduler is not one for a UNet",
            ),
        ],
        ids=["zero SNR", "no signal", "no schedule", "flow"],
    )
    def test_for_which_the_network_does_not_predict_noise_is_refused(
        self, saved_copy: Path, keys: dict[str, Any], sentence: str
    ) -> None:
        set_key(saved_copy / "scheduler/scheduler_config.json", **keys)
        refused(saved_copy, sentence)

    def test_of_a_unet_is_none_for_a_flow(self, my_flux: Path) -> None:
        set_key(my_flux / "scheduler/scheduler_config.json", _class_name="PNDMScheduler")
        refused_at_launch(my_flux, "its scheduler PNDMScheduler is not one for a transformer")


def test_clip_that_is_not_whole_gives_no_score(saved_copy: Path, tmp_path: Path) -> None:
    model, _ = _tiny_clip()
    model.save_pretrained(tmp_path / "clip")
    shutil.copytree(saved_copy / "tokenizer", tmp_path / "clip", dirs_exist_ok=True)
    _load_clip(str(tmp_path / "clip"))
    change(tmp_path / "clip", spoil(float("nan")))
    with pytest.raises(UnavailableError, match=r"in model\.safetensors has values that are NaN or infinite"):
        _load_clip(str(tmp_path / "clip"))
    change(tmp_path / "clip", lambda tensors: tensors.pop("visual_projection.weight"))
    with pytest.raises(UnavailableError, match="is incomplete, 1 of its tensors are missing, such as visual_proj"):
        _load_clip(str(tmp_path / "clip"))


# --- adapters ------------------------------------------------------------------------------------

KOHYA = "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight"


class TestAdapters:
    def refused(self, given: Path) -> str:
        with pytest.raises(UserError, match="holds LoRA adapters only, and whole weights are needed") as error:
            check_weights_folder(given, str(given))
        return str(error.value)

    @pytest.mark.parametrize(
        "name",
        [
            KOHYA,
            "lora_te_text_model_encoder_layers_0_mlp_fc1.alpha",
            "lora_unet_mid_block.hada_w1_a",
            "unet.mid_block.attentions.0.proj_in.lora_A.weight",
            "unet.mid_block.attentions.0.processor.to_q_lora.down.weight",
            "transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight",
            "base_model.model.mid_block.attentions.0.proj_in.lora_A.weight",
        ],
    )
    def test_of_every_program_are_named_as_file_and_as_folder(self, tmp_path: Path, name: str) -> None:
        save_file({name: torch.ones(4, 4)}, tmp_path / "village.safetensors")
        for given in (tmp_path / "village.safetensors", tmp_path):
            message = self.refused(given)
            assert f'pipe.load_lora_weights("{given}")' in message
            assert "from_single_file" not in message

    @pytest.mark.parametrize("place", [".", "unet"])
    def test_of_peft_name_what_merges_them(self, tmp_path: Path, place: str) -> None:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (folder / "adapter_model.bin").touch()
        assert f'peft.PeftModel.from_pretrained(pipe.unet, "{folder}").merge_and_unload()' in self.refused(tmp_path)

    def test_in_the_place_of_the_unet_of_a_pipeline_are_named(self, saved_copy: Path) -> None:
        shutil.rmtree(saved_copy / "unet")
        (saved_copy / "unet").mkdir()
        save_file({KOHYA: torch.ones(4, 4)}, saved_copy / "unet" / "adapter_model.safetensors")
        self.refused(saved_copy)

    def test_no_others_are_taken_for_them(self, saved_copy: Path) -> None:
        save_file({KOHYA: torch.ones(4, 4)}, saved_copy / "village.safetensors")  # beside a whole pipeline
        loaded(saved_copy)
        with pytest.raises(UserError, match=r"is a file, .*; the file holds one network alone$"):
            check_weights_folder(weights_of(saved_copy / "unet"), "given")
        save_file({"first_stage_model.decoder.conv_in.weight": torch.ones(1)}, saved_copy / "whole.safetensors")
        for name in ("whole.safetensors", "sd.ckpt"):
            (saved_copy / name).touch()
            with pytest.raises(UserError, match=re.escape("is a file, and a diffusers folder is needed; in Python, ")):
                check_weights_folder(saved_copy / name, "given")
