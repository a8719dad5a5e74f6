"""Whether a folder can be read as a diffusers pipeline: files and headers, without torch and diffusers.

`launch` asks before anything is queued, `pipeline_folder` before anything is loaded.
"""

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import check_plain, expand_path, open_plain, read_json, read_plain, why_unreadable

PICKLES = (".bin", ".ckpt", ".pt", ".pth")
ADAPTERS = "pytorch_lora_weights.safetensors"  # diffusers' name of a file of LoRA weights
_HUB_ID = re.compile(r"(https://huggingface\.co/)?[A-Za-z0-9][\w.-]*/[\w.-]+")
MAX_JSON_BYTES = 2**26  # the largest tokenizers have a quarter of it
# Names of tensors of adapters: those of kohya's scripts and LyCORIS, of peft and of diffusers.
_ADAPTER = re.compile(r"(^|[._])((lora|hada|lokr|oft|dora)_|lora\.)")
# Tensors whose second size the configuration of their network has too.
_SIZES = dict.fromkeys(("conv_in.weight", "x_embedder.weight", "pos_embed.proj.weight"), "in_channels")
_SIZES |= {"decoder.conv_in.weight": "latent_channels", "embeddings.token_embedding.weight": "hidden_size"}
_DIGEST_READS, _DIGEST_BYTES = 64, 65536  # reads per file, bytes per read: 4 MiB, spread evenly


def weights_path(given: str) -> Path:
    """Return the folder that a path of the configuration names, such as `model.weights`.

    A model's own folder in the cache of the Hugging Face hub, `models--OWNER--NAME`, stands for the snapshot that its
    refs/main names.
    """
    folder = expand_path(given)
    try:
        snapshot = folder / "snapshots" / read_plain(folder / "refs" / "main", follow_links=True).decode().strip()
    except (OSError, ValueError):
        return folder
    return snapshot if snapshot.is_dir() else folder


def architecture(folder: Path) -> str | None:
    """Return the module of a folder's transformer in models/architectures, None if the folder has a UNet.

    It has the name of diffusers' class in short: `flux` of FluxTransformer2DModel. Raises UserError if there is none.
    """
    if not (folder / "transformer").is_dir():
        return None
    try:
        kind = str(read_json(folder / "transformer/config.json")["_class_name"])  # type: ignore[index]
    except (OSError, ValueError, LookupError, TypeError):
        kind = "nothing"
    name = kind.removesuffix("Transformer2DModel").lower()
    if name == kind.lower() or not name.isidentifier() or not find_spec(f"{__package__}.architectures.{name}"):
        raise UserError(
            f"model.weights={folder}: transformer cannot be loaded (its config.json names {kind}, and "
            "models/architectures has no module for it)"
        )
    return name


def numbered(name: str, count: int) -> list[str]:
    """Return the folders of parts of a kind, as diffusers numbers them: tokenizer, tokenizer_2, tokenizer_3."""
    return [name, *(f"{name}_{number}" for number in range(2, count + 1))]


def _weight_stems(folder: Path, kind: str | None) -> dict[str, str]:
    """Return the parts that hold weights, with the stem of their files; `kind` is the folder's `architecture`.

    A transformer's text encoders are those that the folder's index names, or that are there.
    """
    if not kind:
        encoders = ["text_encoder"]
    else:
        index = read_json(folder / "model_index.json") if _is_json_object(folder / "model_index.json") else {}
        names = {*index, *(path.name for path in folder.iterdir())}  # type: ignore[misc]
        encoders = sorted(name for name in names if re.fullmatch(r"text_encoder(_\d)?", name)) or ["text_encoder"]
    networks = ("transformer" if kind else "unet", "vae")
    return {**dict.fromkeys(networks, "diffusion_pytorch_model"), **dict.fromkeys(encoders, "model")}


def check_weights_folder(folder: Path, given: str) -> None:
    """Raise UserError if `folder` is no complete pipeline; `given` is `model.weights` as it was written."""
    label = f"model.weights={given}"
    _check_adapters(label, folder, given)
    if folder.is_file():
        names = _tensor_names(folder)  # none of a .ckpt
        if names and not any(name.startswith("first_stage_model.") for name in names):
            raise UserError(f"{label}: is a file, and a diffusers folder is needed; the file holds one network alone")
        raise UserError(
            f"{label}: is a file, and a diffusers folder is needed; in Python, "
            f'StableDiffusionInpaintPipeline.from_single_file("{given}").save_pretrained("FOLDER") writes one'
        )
    if not folder.is_dir():
        check_hub_id("model.weights", given)
        raise UserError(f"{label}: no such folder")
    if (snapshots := folder / "snapshots").is_dir():
        have = ", ".join(sorted(map(str, snapshots.iterdir()))) or "there are none"
        raise UserError(f"{label}: its refs/main names none of its snapshots; name one yourself: {have}")
    kind = architecture(folder)
    stems = _weight_stems(folder, kind)
    tokenizers = [name.replace("text_encoder", "tokenizer") for name in stems if name.startswith("text_encoder")]
    needed = [*stems, *tokenizers, "scheduler"]
    if missing := [name for name in needed if not (folder / name).is_dir()]:
        raise UserError(f"{label}: not a diffusers folder, {', '.join(missing)} missing (of {', '.join(needed)})")
    parts = [*needed, *(["location"] if (folder / "location").is_dir() else [])]
    paths = [path for part in parts for path in sorted((folder / part).iterdir())]
    files = [path for path in paths if path.suffix not in PICKLES]
    if lost := next((path for path in files if not path.exists()), None):
        raise UserError(
            f"{label}: {lost.relative_to(folder)} is a link to {lost.readlink()}, which is missing; of the hub's cache "
            "copy the whole folder models--OWNER--NAME, or one snapshot with `cp -rL`"
        )
    check_readable(label, folder, files)
    configs = {**dict.fromkeys(stems, "config.json"), "scheduler": "scheduler_config.json"}
    for part, name in configs.items():
        if not _is_json_object(folder / part / name):
            raise UserError(f"{label}: {part} cannot be loaded ({name} is missing or damaged)")
    schedule: Any = read_json(folder / "scheduler/scheduler_config.json")
    scheduler = str(schedule.get("_class_name"))
    if scheduler.startswith("FlowMatch") != bool(kind) or not scheduler.endswith("Scheduler"):
        raise UserError(f"{label}: its scheduler {scheduler} is not one for a {'transformer' if kind else 'UNet'}")
    # Without betas, as of EDM's schedulers, training would take DDPM's default schedule.
    if not kind and not (
        schedule.get("trained_betas") or {"beta_start", "beta_end", "beta_schedule"} <= schedule.keys()
    ):
        raise UserError(
            f"{label}: its scheduler {scheduler} lacks beta_start, beta_end or beta_schedule, the schedule of training"
        )
    for name in tokenizers:
        if lost_name := _lost_from_tokenizer(folder / name, is_t5=bool(kind and name == tokenizers[-1])):
            raise UserError(f"{label}: the {name} cannot be loaded ({lost_name} is missing)")
    for part, stem in stems.items():
        if problem := _find_problem(folder / part, stem):
            raise UserError(f"{label}: {part} {problem}")


def check_clip_folder(given: str) -> None:
    """Raise UserError if `quality.clip_model` names no complete CLIP model with its tokenizer."""
    folder, label = weights_path(given), f"quality.clip_model={given}"
    if not folder.is_dir():
        raise UserError(f"{label}: no such folder")
    check_readable(label, folder, sorted(folder.iterdir()))
    kind = read_json(folder / "config.json").get("model_type") if _is_json_object(folder / "config.json") else None  # type: ignore[union-attr]
    if kind != "clip":
        found = f"its config.json says model_type {kind}" if kind else "no config.json with model_type clip"
        raise UserError(f"{label}: not a CLIP model ({found}); name a folder in the format of transformers")
    problem = _find_problem(folder, "model")
    if not problem and (lost_name := _lost_from_tokenizer(folder)):
        problem = f"cannot be loaded (of its tokenizer {lost_name} is missing)"
    if problem:
        raise UserError(f"{label}: {problem}")


def _lost_from_tokenizer(folder: Path, *, is_t5: bool = False) -> str | None:
    names = {path.name for path in folder.iterdir()}
    if "tokenizer.json" in names or (not is_t5 and {"vocab.json", "merges.txt"} <= names):
        return None
    return "tokenizer.json" if is_t5 else "vocab.json or merges.txt"


def _check_adapters(label: str, folder: Path, given: str) -> None:
    """Raise UserError if a file, a folder or the network in it is LoRA adapters, and no whole weights."""
    for place, whole in ((folder, "vae"), (folder / "unet", "config.json"), (folder / "transformer", "config.json")):
        peft = (place / "adapter_config.json").is_file()
        files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
        adapters = peft or any(map(_ADAPTER.search, (name for path in files for name in _tensor_names(path))))
        if (place / ADAPTERS).is_file() or (adapters and not (place / whole).exists()):
            load = f'pipe.load_lora_weights("{given}"); pipe.fuse_lora(); pipe.unload_lora_weights()'
            if peft:
                load = f'pipe.unet = peft.PeftModel.from_pretrained(pipe.unet, "{place}").merge_and_unload()'
            raise UserError(
                f"{label}: holds LoRA adapters only, and whole weights are needed; in Python, with the folder BASE "
                f'that they were trained on, pipe = StableDiffusionInpaintPipeline.from_pretrained("BASE", '
                f'safety_checker=None); {load}; pipe.save_pretrained("FOLDER") writes them; then copy the '
                "folder location into it, if there is one"
            )


def check_readable(label: str, folder: Path, files: Iterable[Path]) -> None:
    """Raise UserError for a pipe, a file without permission and an endless JSON file among the files of a folder."""
    for path in (path for path in files if not path.is_dir()):
        if problem := why_unreadable(path, MAX_JSON_BYTES if path.suffix == ".json" else None):
            raise UserError(f"{label}: {path.relative_to(folder)} cannot be read ({problem})")


def check_model(model: ModelConfig, folder: Path) -> int | None:
    """Return the input channels of the network in a folder. Raises UserError if the model is of another kind.

    Those of transformers count as four or nine, see `ModelConfig.input_channels`.
    """
    kind, configured = architecture(folder), model.network.get("architecture")
    if kind != configured:
        has, wanted = (f"a transformer ({name})" if name else "a UNet" for name in (kind, configured))
        raise UserError(f"model.weights={folder}: has {has}, and model={model.name} is for {wanted}")
    config: Any = read_json(folder / (f"{'transformer' if kind else 'unet'}/config.json"))
    channels: int | None = config.get("in_channels")
    if not kind:
        return channels
    if channels != (expected := model.network.get("in_channels", channels)):
        raise UserError(
            f"model.weights={folder}: its transformer has in_channels {channels}, that of model={model.name} {expected}"
        )
    return 4 if model.text_to_image else 9


def saved_multiple_px(model: ModelConfig, folder: Path) -> int:
    """Return `ModelConfig.multiple_px` of the networks in a folder."""
    unet: Any = {} if model.transformer else read_json(folder / "unet/config.json")
    vae: Any = read_json(folder / "vae/config.json")
    return replace(model, unet=unet, vae=vae).multiple_px


def check_side(name: str, side_px: int, multiple_px: int) -> None:
    """Raise UserError for a side of images that the networks of a model cannot halve."""
    if side_px % multiple_px:
        raise UserError(f"data.resolution_px={side_px}: model {name} needs a multiple of {multiple_px}")


def check_channels(name: str, channels: int | None, allowed: Collection[int]) -> None:
    """Raise UserError if the UNet of a model has other input channels than a workload takes."""
    if channels not in allowed:
        raise UserError(
            f"model {name}: unet.in_channels is {channels}, this workload needs {' or '.join(map(str, allowed))}"
        )


def weights_digest(folder: Path) -> str | None:
    """Return 8 hex digits that tell the weights of two folders apart, wherever they lie. None if none can be read.

    Samples of the files are enough: training changes every weight, and whole files take seconds on a shared disk.
    """
    digest, num_files = hashlib.sha256(), 0
    try:
        stems = _weight_stems(folder, architecture(folder))
    except UserError:  # the model is loaded later, and says so
        return None
    for part, stem in stems.items():
        for path in sorted([*folder.glob(f"{part}/{stem}.safetensors"), *folder.glob(f"{part}/{stem}-*.safetensors")]):
            try:
                with os.fdopen(open_plain(path, follow_links=True), "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    digest.update(f"{part}/{path.name} {size};".encode())
                    for index in range(_DIGEST_READS):
                        file.seek(max(0, size - _DIGEST_BYTES) * index // (_DIGEST_READS - 1))
                        digest.update(file.read(_DIGEST_BYTES))
            except OSError:
                return None
            num_files += 1
    return digest.hexdigest()[:8] if num_files else None


def _is_json_object(path: Path) -> bool:
    try:
        return isinstance(read_json(path), dict)
    except (OSError, ValueError):
        return False


def check_hub_id(key: str, given: str) -> None:
    """Raise UserError if the value of `key` looks like a model of the Hugging Face hub, and no such folder is here.

    `models--OWNER--NAME` in the hub's cache on this machine is named, if it is there.
    """
    if not _HUB_ID.fullmatch(given) or Path(given).exists():
        return
    hub_id = given.removeprefix("https://huggingface.co/")
    # The cache, as the hub's own library finds it.
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = expand_path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub")
    if (cached := cache / f"models--{hub_id.replace('/', '--')}").is_dir():
        raise UserError(f"{key}={given}: no such folder; on this machine the hub's cache has it: {key}={cached}")
    target = hub_id.rpartition("/")[2]
    raise UserError(
        f"{key}={given}: no such folder, and a run downloads nothing. Of the Hugging Face hub, "
        f"`hf download {hub_id} --local-dir {target} --exclude '*.bin' --exclude '*.ckpt' --exclude '*.fp16.*'` "
        f"downloads a model, and "
        f'`{key}="$PWD/{target}"` names it'
    )


def _find_problem(folder: Path, stem: str) -> str | None:
    """Return what is wrong with the weight files of one network, or None."""
    files = sorted(path.name for path in folder.iterdir())
    index, names = folder / f"{stem}.safetensors.index.json", [f"{stem}.safetensors"]
    listed: set[tuple[str, str]] = set()
    if index.is_file():
        try:
            listed = {(tensor, str(name)) for tensor, name in read_json(index)["weight_map"].items()}  # type: ignore[index]
            if not (names := sorted({name for _, name in listed})):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return f"cannot be loaded ({index.name} is damaged)"
    if missing := [name for name in names if name not in files]:
        others = [name for name in files if name.endswith(".safetensors")]
        if not others and any(name.endswith(PICKLES) for name in files):
            return "holds pickled weights only, and reading those may run code; save them as safetensors"
        have = f"; it has {', '.join(others)}, rename or save it again" if others else ""
        return f"cannot be loaded ({', '.join(missing)} is missing{have})"
    try:
        headers = {name: read_header(folder / name) for name in names}
    except ValueError as error:
        return f"cannot be loaded ({error})"
    held = {(tensor, name) for name, header in headers.items() for tensor in header}
    unlike = {"they lack {} of its tensors": listed - held, "it lacks {} of theirs": held - (listed or held)}
    for text, tensors in unlike.items():
        computed = ("position_ids", "embed_tokens.weight")  # by text encoders; the second is T5's `shared`
        if odd := [f"{tensor} in {name}" for tensor, name in sorted(tensors) if not tensor.endswith(computed)]:
            return f"cannot be loaded ({index.name} does not fit its files: {text.format(len(odd))}, such as {odd[0]})"
    config: Any = read_json(folder / "config.json")
    scale = config.get("scaling_factor", 1.0)  # a VAE has it
    if not isinstance(scale, int | float) or not 0 < scale < float("inf"):
        return f"cannot be loaded (its config.json says scaling_factor {scale}, which must be a number above 0)"
    for tensor, name in sorted(held):
        kind, shape = headers[name][tensor]
        # Integers are positions, and the batches that a batch norm counted.
        counts = kind == "I64" and tensor.endswith(("position_ids", "num_batches_tracked"))
        is_trained = folder.name in ("unet", "transformer")
        if (not kind.startswith(("F", "BF")) and not counts) or (is_trained and kind.startswith("F8")):
            return f"cannot be loaded ({name} has {tensor} in {kind}: quantized weights cannot be trained on)"
        key = _SIZES.get(tensor.removeprefix("text_model."), "")
        if (value := config.get(key)) and [value] != shape[1:2]:
            return f"cannot be loaded (its config.json says {key} {value}, {tensor} in {name} is {shape})"
    return None


def read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Return type and shape of each tensor of a safetensors file. Raises ValueError for another or a damaged file."""
    try:
        try:
            check_plain(path)
        except OSError as error:
            raise ValueError(f"{path.name}: {error.strerror}") from None
        with safe_open(path, "np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} is damaged or incomplete: {error}") from None


def _tensor_names(path: Path) -> Collection[str]:
    try:
        return read_header(path)
    except ValueError:
        return ()


def file_of(folder: Path, tensor: str) -> str:
    """Return the name of the file of a network that holds a tensor; libraries add to its name, or take from it."""
    paths = ((path.name, name) for path in sorted(folder.glob("*.safetensors")) for name in _tensor_names(path))
    return next((path for path, name in paths if name.endswith(tensor) or tensor.endswith(name)), "its files")
