"""Weights as a diffusers folder, safetensors only: written whole or not at all, read with every part checked.

What `save_pipeline` writes is a plain Stable Diffusion inpainting pipeline and, beside it, `location/`, which
diffusers ignores. `StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)` thus gives the
path without positions, and `model.weights=folder` here gives both. Files of pickled objects (`.bin`, `.ckpt`)
are refused: reading one may run code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextModel
from transformers.utils import logging as transformers_logging

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import fsync_folder, replace_json
from inpaint_bench.core.signals import defer_signals

from . import location, tokenizer
from .location import LocationEncoder
from .networks import Models

NETWORKS = {"unet": UNet2DConditionModel, "vae": AutoencoderKL, "text_encoder": CLIPTextModel}
PARTS = (*NETWORKS, "tokenizer", "scheduler")
INDEX = "model_index.json"
LOCATION = "location"
LOCATION_WEIGHTS = "model.safetensors"
BYTES = 256
_READ_ERRORS = (OSError, ValueError, TypeError, RuntimeError, SafetensorError)


def save_pipeline(nets: Models, folder: Path) -> None:
    """Write `nets` as a pipeline folder. An older one there is replaced, once the new one is whole and synced.

    The scheduler saved is DDIM over the training schedule. The tokenizer is that of the weights that were
    loaded; networks with random weights get one of bytes (see `byte_tokenizer`). Raises UserError where
    `folder` is something else than a pipeline, or a part cannot be written.
    """
    with replacing_folder(folder, INDEX) as new:
        with _no_bars():
            for name in NETWORKS:
                getattr(nets, name).save_pretrained(new / name)
        sampler(nets.scheduler).save_pretrained(new / "scheduler")
        if nets.tokenizer_folder:
            shutil.copytree(nets.tokenizer_folder, new / "tokenizer", copy_function=shutil.copyfile)
        else:
            byte_tokenizer(new / "tokenizer", nets.text_encoder.config)
        if nets.location:
            _save_location(nets.location, new / LOCATION)
        replace_json(new / INDEX, _index())


@contextmanager
def _no_bars() -> Iterator[None]:
    """The libraries' progress bars are off within: in a job's log each is lines about a second of work."""
    libraries = (transformers_logging, diffusers_logging)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def sampler(scheduler: Any) -> Any:
    """DDIM over the noise schedule of `scheduler`, with what latents need: nothing clipped, steps as SD's own."""
    return DDIMScheduler.from_config(scheduler.config, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def _index() -> dict[str, Any]:
    absent = [None, None]
    return {
        "_class_name": "StableDiffusionInpaintPipeline",
        "_diffusers_version": diffusers.__version__,
        "feature_extractor": absent,
        "image_encoder": absent,
        "requires_safety_checker": False,
        "safety_checker": absent,
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def byte_tokenizer(folder: Path, config: Any) -> None:
    """A CLIP tokenizer without merges: every byte is a token, so any text is, and it needs no file from anywhere.

    Its 512 ids lie at the start of the vocabulary, begin and end of a text where `config` (CLIPTextConfig) has
    them. Training with random weights hashes whole words instead (tokens.py): the saved text path has other ids,
    which loses nothing, because random embeddings mean nothing. Raises UserError for a vocabulary too small.
    """
    if config.vocab_size < 2 * BYTES + 2:
        raise UserError(
            f"text_encoder.vocab_size={config.vocab_size}: a pipeline can be saved from {2 * BYTES + 2} on, two tokens "
            "per byte (within and at the end of a word), begin and end of the text"
        )
    letters = _byte_letters()
    begin, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary = {letter: number for number, letter in enumerate([*letters, *(f"{one}</w>" for one in letters)])}
    vocabulary |= {begin: config.vocab_size - 2, end: config.vocab_size - 1}
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": begin,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "model_max_length": config.max_position_embeddings,
    }
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _byte_letters() -> list[str]:
    """The visible character that stands for each byte in GPT-2's and CLIP's vocabularies."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in shown else chr(next(spare)) for byte in range(BYTES)]


def load_networks(folder: Path) -> tuple[Any, Any, Any, Any]:
    """fp32 UNet, VAE and text encoder, and a DDPM scheduler, from a diffusers folder. Nothing is downloaded.

    Raises UserError where a part is missing, damaged, incomplete or pickled.
    """
    if not folder.is_dir():
        raise UserError(f"model.weights={folder}: no such folder")
    if missing := [name for name in PARTS if not (folder / name).is_dir()]:
        raise UserError(
            f"model.weights={folder}: not a diffusers folder, {', '.join(missing)} missing in it "
            f"(it needs {', '.join(PARTS)})"
        )
    with _no_bars():
        unet, vae, text = (_network(folder, name) for name in NETWORKS)
    return unet, vae, text, _read(folder, "scheduler", DDPMScheduler.from_pretrained)


def _network(folder: Path, name: str) -> nn.Module:
    held = {path.suffix for path in (folder / name).iterdir()}
    if ".safetensors" not in held and held & {".bin", ".ckpt", ".pt", ".pth"}:
        raise UserError(
            f"model.weights={folder}: {name} holds pickled weights only, and reading those may run code; "
            "save them as safetensors"
        )
    settings: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    if name != "text_encoder":
        settings["low_cpu_mem_usage"] = False  # else diffusers complains that accelerate is not installed
    network, report = _read(folder, name, NETWORKS[name].from_pretrained, **settings)
    # The libraries would draw what is missing anew and only warn.
    if absent := sorted(report["missing_keys"]):
        raise UserError(
            f"model.weights={folder}: {name} is incomplete, {len(absent)} of its tensors are missing "
            f"({', '.join(absent[:2])}{', ...' if len(absent) > 2 else ''})"
        )
    result: nn.Module = network.float()  # half-precision files too: what is trained keeps fp32 weights
    return result


def _read(folder: Path, name: str, from_pretrained: Callable[..., Any], **settings: Any) -> Any:
    try:
        return from_pretrained(str(folder), subfolder=name, local_files_only=True, **settings)
    except _READ_ERRORS as error:
        raise UserError(f"model.weights={folder}: {name} cannot be loaded ({first_line(error)})") from error


def load_tokenizer(folder: Path, text_encoder: Any) -> tokenizer.Tokenize:
    """The tokenizer in `folder`. Raises UserError where it cannot be loaded or is another text encoder's."""
    try:
        tokenize = tokenizer.folder_tokenizer(folder / "tokenizer", text_encoder.config.max_position_embeddings)
    except Exception as error:
        if type(error) is not Exception:  # the Rust library behind it raises nothing more specific
            raise
        raise UserError(f"model.weights={folder}: the tokenizer cannot be loaded ({first_line(error)})") from None
    highest, size = int(tokenize([""]).max()), text_encoder.config.vocab_size
    if highest >= size:
        raise UserError(
            f"model.weights={folder}: the tokenizer ends a text with id {highest}, the text encoder knows {size}"
        )
    return tokenize


def _save_location(encoder: LocationEncoder, folder: Path) -> None:
    folder.mkdir()
    replace_json(folder / "config.json", encoder.description())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.state_dict().items()}
    save_file(tensors, folder / LOCATION_WEIGHTS)


def location_tokens(folder: Path) -> int:
    """Tokens of the location encoder in a pipeline folder; 0 where it has none. Raises UserError on damage."""
    return int(_location_description(folder)["tokens"]) if (folder / LOCATION).is_dir() else 0


def load_location(folder: Path, count: int, width: int) -> LocationEncoder | None:
    """The location encoder in a pipeline folder, its centre with it; None where there is none.

    Raises UserError where it is damaged, has other tokens or width, or counts its waves differently.
    """
    if not (folder / LOCATION).is_dir():
        return None
    found = _location_description(folder)
    expected = {"tokens": count, "width": width, **location.WAVES}
    for key, value in expected.items():
        if found[key] != value:
            hint = "; set model.location_tokens to what the weights have" if key == "tokens" else ""
            raise UserError(f"model.weights={folder}: its location encoder has {key} {found[key]}, not {value}{hint}")
    encoder = LocationEncoder(count, width, (found["centre"][0], found["centre"][1]))
    try:
        encoder.load_state_dict(load_file(folder / LOCATION / LOCATION_WEIGHTS))
    except _READ_ERRORS as error:
        raise UserError(f"model.weights={folder}: {LOCATION} cannot be loaded ({first_line(error)})") from error
    return encoder.float()


def _location_description(folder: Path) -> dict[str, Any]:
    path = folder / LOCATION / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key in ("tokens", "width", *location.WAVES):
            float(found[key])
        latitude, longitude = found["centre"]
        found["centre"] = (float(latitude), float(longitude))
    except KeyError as error:
        raise UserError(f"{path}: does not say {error}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: does not describe a location encoder ({first_line(error)})") from None
    return found


@contextmanager
def replacing_folder(folder: Path, mark: str) -> Iterator[Path]:
    """An empty folder to fill that becomes `folder` when the block ends, every file synced.

    What is at `folder`, or where it points as a symlink, is replaced only where it is empty or holds the file `mark`,
    else UserError. A block that raises leaves it as it was. Killed between the two renames, old and new lie beside it
    under hidden names.
    """
    folder = folder.resolve()
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{word}") for word in ("new", "old"))
    try:
        if folder.is_mount():
            raise UserError(f"{folder}: is a mount point, which the finished folder cannot replace; name one in it")
        if folder.exists() and not (folder.is_dir() and ((folder / mark).is_file() or not any(folder.iterdir()))):
            raise UserError(f"{folder}: is there and holds no {mark}; it is not replaced, name another folder")
        new.mkdir(parents=True)
        yield new
        for path in [new, *new.rglob("*")]:
            _sync(path)
        with defer_signals():
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            fsync_folder(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"{folder}: cannot be written ({error})") from error
        raise


def _sync(path: Path) -> None:
    if path.is_dir():
        fsync_folder(path)
        return
    with path.open("rb+") as written:
        os.fsync(written.fileno())


def first_line(error: BaseException) -> str:
    """What an error says first, for a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
