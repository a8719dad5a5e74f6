"""Checkpoints on disk: written atomically, verified by checksum when they are read, no pickle anywhere.

    checkpoints/step-00000123/
        tensors.safetensors   every tensor
        values.json           everything else
        checkpoint.json       step, identity, bytes and sha256 of both files, and its own sha256

A checkpoint is written under a hidden name, synced and renamed; older ones are removed only then. A second one of
the same step is `step-00000123.1`.
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig, DataConfig, ModelConfig
from inpaint_bench.core.config.config_hash import ALWAYS_HASHED, WITHOUT_FIELD
from inpaint_bench.core.config.levers import RecipeConfig, declaring
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing_folder
from inpaint_bench.core.records import to_record
from inpaint_bench.core.schema import ATTEMPT_NAME, CHECKPOINT, CHECKPOINTS, PRODUCER
from inpaint_bench.core.workloads.finetune_inpaint import UPDATE, Config, finetune_keys

TENSORS, VALUES = "tensors.safetensors", "values.json"
LAYOUT_VERSION = 1  # version of the files in a checkpoint; the tables' schema has a version of its own
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
# PyTorch's types by their names in the safetensors format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Fields of a recipe on which neither the numbers nor the layout of the state depend.
NOT_IDENTITY = "name", *declaring("checkpoint", False)
LORA_KEYS = declaring("checkpoint", "lora_rank")
SHOWN_DIFFERENCES = 3

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint could not be written. Earlier ones are untouched, and nothing of it is left."""


class _UnusableError(Exception):
    """Why a checkpoint cannot be used by this run."""


class _DamagedError(_UnusableError):
    """Why a checkpoint can never be used."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state at a step boundary, after `step` steps. Tensors are on the CPU, contiguous, in memory of their own."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


class _FileDigest(msgspec.Struct):
    bytes: int
    sha256: str


class _Header(msgspec.Struct, kw_only=True):
    """Content of checkpoint.json, which stores it beside its own checksum."""

    schema_version: int
    producer: str
    step: int
    created_unix_ns: int
    identity: dict[str, Any]
    files: dict[str, _FileDigest]


def identity(bench: BenchConfig) -> dict[str, Any]:
    """Return what a checkpoint and a run must have in common, by dotted key: model, data, numerics, batch, seed."""
    workload = finetune_keys(bench)
    # Keys of adapters say nothing if there are none, and older checkpoints do not have them.
    left_out = (*NOT_IDENTITY, *(() if bench.recipe.lora_rank else LORA_KEYS))
    nested = {
        "model": asdict(bench.model),
        "data": asdict(bench.data),
        "recipe": {name: value for name, value in asdict(bench.recipe).items() if name not in left_out},
        "workload": {
            **{name: getattr(workload, name) for name in ("name", "module", "learning_rate")},
            **workload.update_keys(),
        },
        "batch": bench.batch if bench.searches_batch else bench.batch_size * bench.ranks,
        "seed": bench.seed,
    }
    defaults = _new_defaults()
    return {key: value for key, value in _flatten(nested) if key not in defaults or value != defaults[key]}


def _new_defaults() -> dict[str, Any]:
    """Return what an identity without a key means: defaults of fields that are newer than the list of config_hash."""
    blocks = {"model": ModelConfig(name=""), "data": DataConfig(kind=""), "recipe": RecipeConfig()}
    new = {name: {k: v for k, v in vars(keys).items() if k not in ALWAYS_HASHED[name]} for name, keys in blocks.items()}
    new["recipe"] |= WITHOUT_FIELD
    new["workload"] = {name: getattr(Config, name) for name in UPDATE}
    return dict(_flatten(new))


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    # Through JSON, as in a checkpoint: tuples become lists, which must not look like another configuration.
    for name, item in json.loads(json.dumps(value)).items():
        if isinstance(item, dict):
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def sibling_folders(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of this point's other attempts; none if `run_dir` is no attempt's."""
    if not ATTEMPT_NAME.fullmatch(run_dir.name):
        return []
    attempts = sorted(run_dir.parent.glob("attempt-*"))
    return [attempt / CHECKPOINTS for attempt in attempts if attempt.name != run_dir.name]


class CheckpointStore:
    """The checkpoints of one run, and read-only those of other attempts (`other_folders`).

    One process at a time writes to `folder`, so temporary folders there are left over from killed writers and are
    removed. The newest `num_kept` are kept. `rejected` maps those that cannot be used to the reason.
    """

    def __init__(
        self, folder: Path, num_kept: int, identity: dict[str, Any], other_folders: Sequence[Path] = ()
    ) -> None:
        self.folder, self.num_kept, self.identity = folder, num_kept, identity
        self.rejected: dict[Path, str] = {}
        self._damaged: set[Path] = set()
        self._other_folders = list(other_folders)
        for leftover in folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def load_latest(self) -> Checkpoint | None:
        """Return the newest usable one of this run, else the one with most steps of another attempt, else None."""
        # Own checkpoints exist after a requeue, those of other attempts if `rerun` started this one.
        others = [path for folder in self._other_folders for path in _list_checkpoints(folder)]
        for path in (*reversed(_list_checkpoints(self.folder)), *sorted(others, key=_order, reverse=True)):
            # Trainer asks again if the workload refuses a checkpoint that is intact.
            if path in self.rejected:
                continue
            try:
                return _read(path, self.identity)
            except _UnusableError as error:
                if isinstance(error, _DamagedError):
                    self._damaged.add(path)
                self.reject(path, str(error))
        return None

    def reject(self, path: Path, reason: str) -> None:
        """Skip this checkpoint from now on."""
        log.warning("checkpoint %s is not used: %s", path, reason)
        self.rejected[path] = reason

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> Path:
        """Write a checkpoint and return its folder; tensors pass through host memory one at a time.

        Raises CheckpointError if the disk refuses it. Damaged checkpoints and all but the newest are then removed.
        """
        target = self._next_name(step)
        try:
            # Synced before and after the rename: the name never stands for part of a checkpoint.
            with replacing_folder(target, CHECKPOINT) as temporary:
                header = _Header(
                    schema_version=LAYOUT_VERSION,
                    producer=PRODUCER,
                    step=step,
                    created_unix_ns=time.time_ns(),
                    identity=self.identity,
                    files={
                        TENSORS: _write(temporary / TENSORS, _safetensors(tensors)),
                        VALUES: _write(temporary / VALUES, [msgspec.json.encode(values)]),
                    },
                )
                content = msgspec.to_builtins(header)
                sealed = json.dumps({"sha256": _checksum(content), "content": content}, indent=1)
                _write(temporary / CHECKPOINT, [sealed.encode()])
        except UserError as error:
            # Its cause is what the disk said.
            raise CheckpointError(self._failure(step, error.__cause__ or error)) from error
        self._prune(target)
        return target

    def _next_name(self, step: int) -> Path:
        """Return a name that is not taken: nothing is ever overwritten."""
        taken = [_order(path)[1] for path in _list_checkpoints(self.folder) if _order(path)[0] == step]
        name = f"step-{step:08d}"
        return self.folder / (f"{name}.{max(taken) + 1}" if taken else name)

    def _failure(self, step: int, error: BaseException) -> str:
        usable = [path.name for path in _list_checkpoints(self.folder) if path not in self.rejected]
        last = f"the last good one is {usable[-1]}" if usable else "there is no earlier one"
        reason = getattr(error, "strerror", None) or error
        return f"could not write the checkpoint of step {step} in {self.folder}: {reason}; {last}"

    def _prune(self, newest: Path) -> None:
        """Remove damaged checkpoints, and all but `num_kept` up to the newest. Those of another run stay."""
        usable = [path for path in _list_checkpoints(self.folder) if path not in self.rejected]
        # Checkpoints of more steps are an earlier run's: with workload.resume=false none was read and rejected.
        older = [path for path in usable if _order(path) <= _order(newest)]
        damaged = [path for path in self._damaged if path.parent == self.folder]
        for path in (*older[: -self.num_kept], *damaged):
            # Renamed first: a folder that is removed only in part must not be taken for a checkpoint.
            hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                path.rename(hidden)
                shutil.rmtree(hidden)
            except FileNotFoundError:
                pass  # a damaged one that was removed before
            except OSError as error:
                log.warning("%s: could not be removed (%s)", path, error)


def _order(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1]), int(match[2] or 0)


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, usable or not, oldest first."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=_order)


# --- one checkpoint ------------------------------------------------------------------------------


def _write(path: Path, chunks: Iterable[Any]) -> _FileDigest:
    sha256, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            sha256.update(chunk)
            size += len(chunk)
    return _FileDigest(bytes=size, sha256=sha256.hexdigest())


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """Yield the safetensors format one tensor at a time: the library's own writer holds all of them in memory twice.

    Every tensor is written contiguously, whatever memory it shares; strides are not kept.
    """
    # Wide types first, as the library does, so that every tensor is aligned to its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    # The format: length of the header in 8 bytes, JSON padded with spaces to a multiple of 8, then the data.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        # As bytes, because NumPy has neither bfloat16 nor float8.
        yield flat.view(torch.uint8).numpy().data


def read(path: Path, bench: BenchConfig) -> Checkpoint:
    """Read the checkpoint that another process of this run has chosen. Raises CheckpointError."""
    try:
        return _read(path, identity(bench))
    except _UnusableError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None


def _read(path: Path, expected_identity: dict[str, Any]) -> Checkpoint:
    """Read a checkpoint and verify every byte. Raises _UnusableError."""
    from safetensors import safe_open

    try:
        header = _read_header(path)
        if header.schema_version != LAYOUT_VERSION:
            raise _UnusableError(f"its layout has version {header.schema_version}, this is {LAYOUT_VERSION}")
        if differences := _differences(header.identity, expected_identity):
            raise _UnusableError(f"another configuration: {differences}")
        # After the cheap checks: the checksums read the whole checkpoint, 10 GB for SD 1.5.
        for name, expected in header.files.items():
            with (path / name).open("rb") as file:
                digest = _FileDigest(
                    bytes=os.fstat(file.fileno()).st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
                )
            if digest != expected:
                raise _DamagedError(f"{name} is damaged: size or checksum differ from {CHECKPOINT}")
        values = json.loads((path / VALUES).read_bytes())
        with safe_open(path / TENSORS, "pt") as file:
            # Copies: the library's tensors may be backed by the file, which will be removed one day.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise _DamagedError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        # Not damaged, so that it is never removed: a file system may fail for a moment.
        raise _UnusableError(f"it cannot be read ({error})") from None
    return Checkpoint(path=path, step=header.step, tensors=tensors, values=values)


def _read_header(path: Path) -> _Header:
    with suppress(ValueError, KeyError, TypeError, msgspec.ValidationError):
        sealed = json.loads((path / CHECKPOINT).read_bytes())
        header = to_record(sealed["content"], _Header)
        if sealed["sha256"] == _checksum(sealed["content"]) and header.step == _order(path)[0]:
            return header
    raise _DamagedError(f"{CHECKPOINT} is damaged")


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Describe the keys in which two identities differ; empty if they are equal."""
    saved, current = _new_defaults() | saved, _new_defaults() | current
    keys = [key for key in current | saved if saved.get(key) != current.get(key)]
    shown = [f"{key} was {json.dumps(saved.get(key))}, is {json.dumps(current.get(key))}" for key in keys]
    more = [f"and {len(keys) - SHOWN_DIFFERENCES} more"] if len(keys) > SHOWN_DIFFERENCES else []
    return "; ".join(shown[:SHOWN_DIFFERENCES] + more)


# --- random number generators --------------------------------------------------------------------


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the default generators of PyTorch (CPU, every GPU), NumPy and Python: tensors, and JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        # Only then: get_rng_state initialises CUDA, and a run on the CPU needs no context on the GPU.
        tensors |= {f"cuda.{index}": torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    state = {**numpy["state"], "key": numpy["state"]["key"].tolist()}
    return tensors, {"numpy": {**numpy, "state": state}, "python": random.getstate()}


def set_rng_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restore what `rng_state` returned. A GPU that is new keeps its state, that of a missing one is ignored."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if (state := tensors.get(f"cuda.{index}")) is not None:
                torch.cuda.set_rng_state(state, index)
    numpy = values["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    # JSON made lists of the tuples, and random.setstate takes a tuple only.
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the default generators after the block, whatever it draws."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(*before)
