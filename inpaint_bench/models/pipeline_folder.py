"""Weights as a diffusers folder, safetensors only: written atomically, read with every part checked.

`save_pipeline` writes a plain pipeline of Stable Diffusion, FLUX or SD 3, and beside it `location/`, which diffusers
ignores. So `StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)` loads the model without
positions, and `model.weights=folder` loads both here. Pickled weights (`.bin`, `.ckpt`) are refused: reading them may
run code.
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.core.files import replace_json, replacing_folder
from inpaint_bench.core.records import read_record, write_record

from .architectures.base import Architecture
from .architectures.location import LocationDescription, LocationEncoder
from .weights_folder import check_model, check_weights_folder, file_of, numbered

INDEX = "model_index.json"
LOCATION = "location"
LOCATION_WEIGHTS = "model.safetensors"
# What diffusers, transformers and safetensors raise for damaged or foreign files.
_READ_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
# In a job's log each bar is many lines about a second of work; what they warn of is checked here.
for library in (diffusers_logging, transformers_logging):
    library.disable_progress_bar()
    library.set_verbosity_error()


def save_pipeline(networks: Any, folder: Path) -> None:
    """Write `Networks` (untyped: their module imports this one) as a pipeline folder.

    An existing pipeline is replaced once the new one is complete and synced.
    The saved scheduler is DDIM over the training schedule. The tokenizer is that of the loaded weights; random
    weights get one of bytes. Raises UserError if `folder` is something other than a pipeline, or cannot be written.
    """
    with replacing_folder(folder, INDEX) as new:
        index = _save_parts(networks, new)
        for tokenizer_folder in networks.tokenizer_folders:
            shutil.copytree(tokenizer_folder, new / tokenizer_folder.name, copy_function=shutil.copyfile)
        if not networks.tokenizer_folders:
            save_byte_tokenizer(new / "tokenizer", networks.text_encoder.config)
        if networks.location:
            save_location(networks.location, new / LOCATION)
        replace_json(new / INDEX, {"_diffusers_version": diffusers.__version__, **index})


def _save_parts(networks: Any, new: Path) -> dict[str, Any]:
    """Write the networks and the scheduler. Returns what the index of the folder says."""
    architecture = networks.architecture
    encoders = [encoder for encoder, _ in architecture.tokenized(networks.text_encoder)]
    texts = dict(zip(numbered("text_encoder", len(encoders)), encoders, strict=True))
    scheduler = architecture.saved_scheduler(networks.scheduler)
    parts = {architecture.role: networks.unet, "vae": networks.vae, **texts, "scheduler": scheduler}
    index: dict[str, Any] = {"_class_name": architecture.pipelines[not networks.inpaints], **architecture.index}
    for name, part in parts.items():
        part.save_pretrained(new / name)
        # The index names classes of the libraries: of a class of ours the one that it extends, and of a network that a
        # lever has replaced that of the architecture.
        kinds = architecture.network.__mro__ if part is networks.unet else type(part).__mro__
        kind = next(kind for kind in kinds if kind.__module__.startswith(("diffusers", "transformers")))
        index[name] = [kind.__module__.partition(".")[0], kind.__name__]
    config = new / architecture.role / "config.json"
    replace_json(config, {**json.loads(config.read_bytes()), "_class_name": index[architecture.role][1]})
    for name, tokenizer in zip(numbered("tokenizer", len(encoders)), architecture.tokenizers, strict=True):
        index[name] = ["transformers", tokenizer]
    return index


def load_networks(config: ModelConfig, folder: Path, architecture: Architecture) -> tuple[Any, Any, list[Any], Any]:
    """Return network, VAE, text encoders and scheduler. Raises UserError if a part cannot be used."""
    check_weights_folder(folder, str(folder))
    check_model(config, folder)
    names = numbered("text_encoder", len(architecture.text_encoders))
    texts = dict(zip(names, architecture.text_encoders, strict=True))
    kinds = {architecture.role: architecture.network, "vae": architecture.vae, **texts}
    dtype = architecture.dtype(config)
    unet, vae, *encoders = (_load_network(folder, name, kind, dtype) for name, kind in kinds.items())
    return unet, vae, encoders, _load_part(folder, "scheduler", architecture.scheduler.from_pretrained)


def _load_network(folder: Path, name: str, kind: Any, dtype: torch.dtype) -> nn.Module:
    # Sizes are compared below: transformers names those that differ in its log alone.
    settings: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if name in ("unet", "vae", "transformer"):
        # With accelerate no random weights are drawn first. If it is not installed, diffusers complains of True.
        settings["low_cpu_mem_usage"] = name == "transformer" and find_spec("accelerate") is not None
        settings["torch_dtype"] = dtype
    network, report = _load_part(folder, name, kind.from_pretrained, **settings)
    # Checkpoints of text encoders have more: of CLIP's other half, or layers that the configuration skips.
    report["unexpected_keys"] = [] if name.startswith("text_encoder") else report["unexpected_keys"]
    # Half-precision files too: trained weights of a UNet are fp32. diffusers' own `to` warns about modules it lacks.
    check_network(nn.Module.to(network, dtype), f"model.weights={folder}: {name}", folder / name, report)
    return network


def check_network(network: nn.Module, label: str, folder: Path, report: Mapping[str, Any]) -> None:
    """Raise UserError if a network is not complete and finite; `report` is the libraries' loading info."""
    state = network.state_dict()
    missing = sorted({*report.get("missing_keys", ()), *(name for name, tensor in state.items() if tensor.is_meta)})
    if missing:
        raise UserError(f"{label} is incomplete, {len(missing)} of its tensors are missing, such as {missing[0]}")
    sizes = [f"{name} is {list(held)}, not {list(needed)}" for name, held, needed in report.get("mismatched_keys", ())]
    if other := sorted(sizes or report.get("unexpected_keys", ())):
        problem = "have other sizes there" if sizes else "are not in it"
        raise UserError(f"{label} does not fit its config.json, {len(other)} of the tensors {problem}: {other[0]}")
    for name, tensor in state.items():
        # The sum is twenty times as fast; one of fp16 may overflow.
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise UserError(f"{label}: {name} in {file_of(folder, name)} has values that are NaN or infinite")


def _load_part(folder: Path, name: str, from_pretrained: Callable[..., Any], **settings: Any) -> Any:
    try:
        return from_pretrained(str(folder), subfolder=name, local_files_only=True, **settings)
    except _READ_ERRORS as error:
        raise UserError(f"model.weights={folder}: {name} cannot be loaded ({first_line(error)})") from error


# --- the location encoder ------------------------------------------------------------------------


def save_location(encoder: LocationEncoder, folder: Path) -> None:
    """Write the encoder into a new folder."""
    folder.mkdir()
    write_record(folder / "config.json", encoder.description())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.state_dict().items()}
    save_file(tensors, folder / LOCATION_WEIGHTS)


def read_location_description(folder: Path) -> LocationDescription | None:
    """Return the description of a folder's location encoder, None if there is none. Raises UserError on damage."""
    if not (folder / LOCATION).is_dir():
        return None
    path = folder / LOCATION / "config.json"
    try:
        description = read_record(path, LocationDescription)
    except (OSError, ValueError) as error:
        raise UserError(first_line(error)) from None
    if description is None:
        raise UserError(f"{path}: missing, the location encoder beside it cannot be loaded")
    return description


def load_location(folder: Path, tokens: int, width: int) -> LocationEncoder | None:
    """Return the location encoder in a pipeline folder, with its own centre; None if there is none.

    Raises UserError if it is damaged, or differs in tokens, width or wavelengths.
    """
    saved = read_location_description(folder)
    if saved is None:
        return None
    # The centre is the file's own: positions are relative to the area on which it was trained.
    expected = LocationDescription(tokens=tokens, width=width, centre=saved.centre)
    for name in LocationDescription.__struct_fields__:
        actual, needed = getattr(saved, name), getattr(expected, name)
        if actual != needed:
            hint = "; set model.location_tokens to the number in the weights" if name == "tokens" else ""
            raise UserError(f"model.weights={folder}: its location encoder has {name} {actual}, not {needed}{hint}")
    encoder = LocationEncoder(tokens, width, saved.centre)
    try:
        tensors = load_file(folder / LOCATION / LOCATION_WEIGHTS)
        if integers := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
            raise ValueError(f"{integers[0]} is not of floating point")
        encoder.load_state_dict(tensors)
    except _READ_ERRORS as error:
        raise UserError(f"model.weights={folder}: {LOCATION} cannot be loaded ({first_line(error)})") from error
    check_network(encoder, f"model.weights={folder}: {LOCATION}", folder / LOCATION, {})
    return encoder.float()


PLAIN = Architecture()
Tokenize = Callable[[list[str]], Tensor]  # T texts -> [T, L] int64
# --- text to token ids: the weights' own tokenizer of CLIP, T5 or Qwen, or a hash if weights are random

BYTES = 256


def hash_tokenizer(vocab_size: int, length: int) -> Tokenize:
    """Return a deterministic stand-in for CLIP's tokenizer, for random weights: same shapes, no files, no meaning.

    Words (letters, digits) and other single characters, in lower case, become CRC-32 modulo `vocab_size - 2`. As in
    CLIP the last two ids of the vocabulary start and end the text, the end also pads it to `length`, and longer texts
    are cut. Different words may collide: with random embeddings that changes nothing.
    """
    start, end = vocab_size - 2, vocab_size - 1

    def encode(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: length - 2]
        ids = [start, *(zlib.crc32(word.encode()) % (vocab_size - 2) for word in words), end]
        return ids + [end] * (length - len(ids))

    return lambda texts: torch.tensor([encode(text) for text in texts], dtype=torch.int64)


def load_tokenizer(
    folder: Path,
    text_config: Any,
    length: int | None = None,
    *,
    kind: str = "CLIPTokenizer",
    encode: Callable[..., Any] = PLAIN.encode,
) -> Tokenize:
    """Return the tokenizer in `folder`, of a class of transformers and called as an architecture calls it.

    Texts are padded to `length`, which is that of CLIP's own configuration. Raises ValueError if it cannot be loaded or
    does not fit.
    """
    size, vocab_size = length or text_config.max_position_embeddings, text_config.vocab_size

    def tokenize(texts: list[str]) -> Tensor:
        return torch.tensor(encode(tokenizer, texts, size), dtype=torch.int64)

    try:
        tokenizer: Any = getattr(transformers, kind).from_pretrained(str(folder), local_files_only=True)
        # Start, end and padding of an empty text are the highest ids of a CLIP vocabulary, and the lowest of T5's.
        highest = max(int(tokenize([""]).max()), len(tokenizer) - 1)
    except Exception as error:  # the Rust library behind it raises nothing more specific
        raise ValueError(f"the tokenizer cannot be loaded ({first_line(error)})") from None
    if highest >= vocab_size:
        raise ValueError(f"the tokenizer has ids up to {highest}, the text encoder has {vocab_size} ids")
    return tokenize


def save_byte_tokenizer(folder: Path, text_config: Any) -> None:
    """Write a CLIP tokenizer without merges: every byte is a token, so it encodes any text and needs no vocabulary.

    Its 512 ids are the first ones; start and end of a text are where `text_config` (CLIPTextConfig) has them. In
    training, random weights come with `hash_tokenizer`: the ids differ from those, which loses nothing, because
    random embeddings mean nothing. Raises UserError for a vocabulary that is too small.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    size = text_config.vocab_size
    if size < 2 * BYTES + 2:
        raise UserError(
            f"text_encoder.vocab_size={size}: saving a pipeline needs at least {2 * BYTES + 2} ids: two per byte "
            "(within and at the end of a word), start and end of the text"
        )
    # The visible character that stands for each byte, as in the vocabularies of GPT-2 and CLIP.
    letters = [letter for _, letter in sorted(bytes_to_unicode().items())]
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary = {letter: i for i, letter in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    vocabulary |= {start: size - 2, end: size - 1}
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": start,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "model_max_length": text_config.max_position_embeddings,
    }
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    # Readers skip this line, and no merge follows.
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
