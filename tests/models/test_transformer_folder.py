"""Folders of FLUX, FLUX.2 and SD 3.5, as diffusers' pipelines write them: read, trained, written again, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    Flux2KleinInpaintPipeline,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image
from transformers import CLIPTokenizer, Qwen2TokenizerFast, T5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from inpaint_bench.core.errors import UserError
from inpaint_bench.models import flops
from inpaint_bench.models.networks import Networks, build_networks
from inpaint_bench.models.pipeline_folder import save_byte_tokenizer, save_pipeline
from inpaint_bench.models.weights_folder import check_weights_folder, weights_digest
from inpaint_bench.workloads import finetune_inpaint
from inpaint_bench.workloads.restore import restore_folder
from tests.run.support import bench, last_given

CPU = torch.device("cpu")
FLUX = ("model=tiny_flux_fill", "data.resolution_px=64")
TEXT = ("workload=finetune_text2image", "model.transformer.in_channels=64", "model.location_tokens=0")
KLEIN = ("model=tiny_flux2", "data.resolution_px=64", "model.location_tokens=0")
MODELS: dict[str, tuple[Any, tuple[str, ...], tuple[int, ...]]] = {
    "fill": (FluxFillPipeline, (*FLUX, "model.location_tokens=0"), (9,)),
    "flux": (FluxPipeline, (*FLUX, *TEXT), (4,)),
    "sd35": (StableDiffusion3Pipeline, ("model=tiny_sd35", "workload=finetune_text2image"), (4,)),
    "klein": (Flux2KleinInpaintPipeline, KLEIN, (9,)),
    "klein_text": (
        Flux2KleinPipeline,
        (*KLEIN, "workload=finetune_text2image", "model.transformer.inpaints=false"),
        (4,),
    ),
}
KINDS = {"sd35": SD3Transformer2DModel, "fill": FluxTransformer2DModel, "flux": FluxTransformer2DModel}
PROMPT = "Collapsed café, 12th street"


def built(name: str, *overrides: str) -> Networks:
    _, given, inputs = MODELS[name]
    torch.manual_seed(len(name))
    return build_networks(bench(*last_given(*given, *overrides)).model, CPU, inputs=inputs)


def t5_tokenizer() -> T5Tokenizer:
    letters = [chr(code) for code in range(33, 127)]
    return T5Tokenizer(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((c, -3.0) for c in letters)]
    )


CHAT = (  # Qwen3's, for one message of a user
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def qwen_tokenizer() -> Any:
    """A tokenizer of bytes, and of the words with a meaning in a chat."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    vocab = {token: number for number, token in enumerate([*bytes_to_unicode().values(), *special])}
    return Qwen2TokenizerFast(vocab=vocab, merges=[], chat_template=CHAT, additional_special_tokens=special[1:])


def written(name: str, folder: Path) -> Path:
    """A folder that diffusers' own pipeline writes, of its own classes."""
    networks = built(name)
    encoders = list(networks.text_encoder.children())
    transformer = KINDS.get(name, Flux2Transformer2DModel).from_config(networks.unet.config)
    transformer.load_state_dict(networks.unet.state_dict())
    parts: dict[str, Any] = {"transformer": transformer, "vae": networks.vae, "scheduler": networks.scheduler}
    if name.startswith("klein"):
        parts["vae"].bn.running_mean.normal_()
        parts["vae"].bn.running_var.uniform_(0.5, 2)
        MODELS[name][0](**parts, text_encoder=encoders[0], tokenizer=qwen_tokenizer()).save_pretrained(folder)
        return folder
    save_byte_tokenizer(folder / "bytes", encoders[0].config)
    clip = CLIPTokenizer.from_pretrained(str(folder / "bytes"))
    shutil.rmtree(folder / "bytes")
    for number, encoder in enumerate(encoders):
        end = "" if number == 0 else f"_{number + 1}"
        last = number == len(encoders) - 1
        parts |= {f"text_encoder{end}": encoder, f"tokenizer{end}": t5_tokenizer() if last else clip}
    MODELS[name][0](**parts).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each; not to be changed."""
    root = tmp_path_factory.mktemp("folders")
    for name in MODELS:
        (root / name).mkdir()
    return {name: written(name, root / name) for name in MODELS}


def states_of_diffusers(pipeline: Any, name: str) -> torch.Tensor:
    """Return the text's rows as the pipeline makes them, the pooled embedding first and padded."""
    if name.startswith("klein"):
        rows: torch.Tensor = pipeline.encode_prompt(PROMPT, max_sequence_length=64)[0]
        return rows
    if name == "sd35":
        states, _, pooled, _ = pipeline.encode_prompt(
            PROMPT, None, None, max_sequence_length=16, do_classifier_free_guidance=False
        )
    else:
        states, pooled, _ = pipeline.encode_prompt(PROMPT, None, max_sequence_length=16)
    return torch.cat([torch.nn.functional.pad(pooled, (0, states.shape[2] - pooled.shape[1]))[:, None], states], dim=1)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_folder_is_read_and_written_as_diffusers_does(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    loaded, original = built(name, f"model.weights={folders[name]}"), built(name)
    check_weights_folder(folders[name], "given")
    for ours, theirs in zip(loaded.unet.state_dict().values(), original.unet.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(loaded.vae.encode(images).latent_dist.mean, original.vae.encode(images).latent_dist.mean)
    save_pipeline(loaded, tmp_path / "again")
    assert weights_digest(tmp_path / "again") is not None
    for folder in (folders[name], tmp_path / "again"):
        pipeline = MODELS[name][0].from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        expected = states_of_diffusers(pipeline, name)
        actual = loaded.text_encoder(loaded.tokenize([PROMPT])).last_hidden_state
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert type(pipeline.transformer) is KINDS.get(name, Flux2Transformer2DModel)
    settings: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 1, "max_sequence_length": 16}
    if name in ("fill", "klein"):
        settings |= {"image": Image.new("RGB", (64, 64)), "mask_image": Image.new("L", (64, 64), 255)}
    assert pipeline(prompt=PROMPT, **settings).images[0].size == (64, 64)


@pytest.mark.parametrize("name", ["fill", "klein"])
def test_folder_is_trained_saved_with_its_location_encoder_and_restores(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = MODELS[name][1][:2]
    keys = ("workload.train_steps=1", "workload.save_weights=true", "model.location_tokens=4")
    config = bench(*model, f"model.weights={folders[name]}", *keys, "recipe=[cpu,grad_checkpoint]")
    config.workload.check(config)
    workload = finetune_inpaint.build(config, CPU)
    workload.step(workload.next_batch())
    saved = tmp_path / workload.finish(tmp_path)["weights"]
    trained = workload.components.networks
    again = build_networks(bench(*model, f"model.weights={saved}").model, CPU)
    assert again.location is not None
    for ours, theirs in zip(again.trainable_parameters(), trained.trainable_parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert flops.count(config.model, 64, trained)["text_encode"] > 0
    workload.close()
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "photos" / "one.png")
    report = restore_folder(
        weights=saved, images=tmp_path / "photos", output=tmp_path / "restored", masks=None, mask_kind="sd", steps=1,
        seed=0, device="cpu",
    )  # fmt: skip
    assert (report.resolution_px, len(report.restored)) == (64, 1)


def test_what_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def refused(message: str, folder: Path, *overrides: str) -> None:
        with pytest.raises(UserError, match=message):
            build_networks(bench(*overrides, f"model.weights={folder}").model, CPU, inputs=(4, 9))

    refused("in_channels 64, that of model=tiny_flux_fill 384", folders["flux"], *FLUX)
    refused("has a transformer .sd3., and model=tiny_flux_fill is for a transformer .flux.", folders["sd35"], *FLUX)
    refused("has a transformer .flux., and model=tiny_inpaint is for a UNet", folders["fill"])
    saved_copy = Path(shutil.copytree(folders["fill"], tmp_path / "saved_copy"))
    (saved_copy / "tokenizer_2" / "tokenizer.json").unlink()
    refused("the tokenizer_2 cannot be loaded .tokenizer.json is missing", saved_copy, *FLUX)
    shutil.rmtree(saved_copy / "text_encoder_2")
    refused("not a diffusers folder, text_encoder_2 missing", saved_copy, *FLUX)
    config = saved_copy / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "UNet3D"}))
    refused("its config.json names UNet3D, and models/architectures has no module for it", saved_copy, *FLUX)
