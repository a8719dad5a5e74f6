"""Checkpoints on disk: each is whole or not there, and one that was damaged since is refused by its checksum.

    checkpoints/step-00000123/
        tensors.safetensors   every tensor
        values.json           everything that is no tensor
        checkpoint.json       step, identity, bytes and sha256 of both files, and its own sha256

No pickle anywhere. A checkpoint is written under a hidden name, synced and renamed; older ones are removed
only then. A second one of the same step is `step-00000123.1`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.files import fsync_folder
from inpaint_bench.core.schema import CHECKPOINT, CHECKPOINTS, PRODUCER

TENSORS, VALUES = "tensors.safetensors", "values.json"
LAYOUT_VERSION = 1  # of checkpoint.json and what lies beside it; the tables' schema has a version of its own
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
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
# Fields of a recipe that neither a number nor the layout of the state depends on.
SAME_NUMBERS = ("name", "num_workers", "prefetch_factor", "pin_memory", "non_blocking", "stage_to", "cache_storage")
SHOWN = 3  # differences that a refusal names

log = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A checkpoint could not be written. The ones before it are as they were, and nothing of it is left."""


class _RefusedError(Exception):
    """Why a checkpoint cannot be used. `damaged`: nor ever will be."""

    def __init__(self, reason: str, *, damaged: bool = False) -> None:
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved at a step boundary, after `step` steps. Tensors are on the CPU, contiguous, their own."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def identity(bench: BenchConfig) -> dict[str, Any]:
    """What must be equal to go on from a checkpoint, by dotted key: model, data, numerics, batch, seed."""
    recipe = {name: value for name, value in asdict(bench.recipe).items() if name not in SAME_NUMBERS}
    data = {name: value for name, value in asdict(bench.data).items() if name != "out"}
    wanted = bench.workload
    whole = {
        "model": asdict(bench.model),
        "data": data,
        "recipe": recipe,
        "workload": {"name": wanted.name, "module": wanted.module, "learning_rate": wanted.learning_rate},
        "batch": bench.batch,
        "seed": bench.seed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(dict(_flat(whole))))
    return plain


def _flat(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{path}{name}.")
        else:
            yield f"{path}{name}", item


def siblings(run_dir: Path) -> list[Path]:
    """Checkpoint folders of this point's other attempts; none where the directory is no attempt's."""
    if not re.fullmatch(r"attempt-\d+", run_dir.name):
        return []
    return [one / CHECKPOINTS for one in sorted(run_dir.parent.glob("attempt-*")) if one.name != run_dir.name]


class Checkpoints:
    """The checkpoints of one run, and those of others that it may begin from.

    One process at a time writes to `folder`: what killed writers left there is removed at once. `keep` of
    the newest stay. Folders `elsewhere` are only read. `refused` says what could not be used, and why.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], elsewhere: Sequence[Path] = ()) -> None:
        self.folder, self.keep, self.identity = folder, keep, identity
        self.refused: list[dict[str, str]] = []
        self._elsewhere = list(elsewhere)
        self._unusable: dict[Path, bool] = {}  # what was refused: whether it is damaged
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    # --- reading ---------------------------------------------------------------------------------

    def latest(self) -> Checkpoint | None:
        """The newest good one here, else the one of most steps elsewhere. What is refused on the way is noted."""
        theirs = [one for folder in self._elsewhere for one in _saved(folder)]
        for path in (*reversed(_saved(self.folder)), *sorted(theirs, key=_order, reverse=True)):
            if path in self._unusable:
                continue
            try:
                return _read(path, self.identity)
            except _RefusedError as error:
                self.refuse(path, str(error), damaged=error.damaged)
        return None

    def refuse(self, path: Path, reason: str, *, damaged: bool = False) -> None:
        """Do not offer this one again. A damaged one is removed when a new one has been written."""
        log.warning("checkpoint %s is not used: %s", path, reason)
        self._unusable[path] = damaged
        self.refused.append({"checkpoint": str(path), "reason": reason})

    # --- writing ---------------------------------------------------------------------------------

    def save(self, step: int, tensors: dict[str, Tensor], values: dict[str, Any]) -> Path:
        """Write a checkpoint; the tensors pass through the host's memory one at a time.

        Raises CheckpointError where the disk does not take it.
        """
        target = self._free(step)
        temporary = self.folder / f".{target.name}.{os.getpid()}.tmp"
        try:
            temporary.mkdir(parents=True)
            files = {
                TENSORS: _write(temporary / TENSORS, lambda out: _write_tensors(out, tensors)),
                VALUES: _write(temporary / VALUES, lambda out: out.write(json.dumps(values).encode())),
            }
            content = {
                "schema_version": LAYOUT_VERSION,
                "producer": PRODUCER,
                "step": step,
                "created_unix_ns": time.time_ns(),
                "identity": self.identity,
                "files": files,
            }
            about = json.dumps({"sha256": _digest(content), "content": content}, indent=1)
            _write(temporary / CHECKPOINT, lambda out: out.write(about.encode()))
            fsync_folder(temporary)
            temporary.rename(target)
            fsync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self._failed(step, error)) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(target)
        return target

    def _free(self, step: int) -> Path:
        """A name that is not taken: nothing is ever written over."""
        taken = [order[1] for one in _saved(self.folder) if (order := _order(one))[0] == step]
        name = f"step-{step:08d}"
        return self.folder / (f"{name}.{max(taken) + 1}" if taken else name)

    def _failed(self, step: int, error: OSError) -> str:
        good = [one for one in _saved(self.folder) if one not in self._unusable]
        left = f"the last good one is {good[-1].name}" if good else "it would be the first here"
        return f"no checkpoint of step {step} in {self.folder}: {error.strerror or error}; {left}"

    def _prune(self, newest: Path) -> None:
        """Remove the damaged, and all but `keep` up to the newest. Those that are another run's stay."""
        ours = [one for one in _saved(self.folder) if one not in self._unusable and _order(one) <= _order(newest)]
        damaged = [one for one, hopeless in self._unusable.items() if hopeless and one.parent == self.folder]
        for one in (*ours[: -self.keep], *damaged):
            hidden = one.with_name(f".{one.name}.{os.getpid()}.tmp")  # half removed, it must not look like one
            try:
                one.rename(hidden)
                shutil.rmtree(hidden)
            except FileNotFoundError:
                pass  # a damaged one that was removed before
            except OSError as error:
                log.warning("%s: could not be removed (%s)", one, error)


def _order(path: Path) -> tuple[int, int]:
    found = NAME.fullmatch(path.name)
    assert found
    return int(found[1]), int(found[2] or 0)


def _saved(folder: Path) -> list[Path]:
    """Checkpoints of a folder, good or not, oldest first."""
    return sorted((one for one in folder.glob("step-*") if NAME.fullmatch(one.name)), key=_order)


# --- one checkpoint ------------------------------------------------------------------------------


class _Hashed:
    """A file that is being written, its size and checksum."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._digest, self.size = out, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        self._out.write(data)
        self._digest.update(data)
        self.size += len(data)

    def as_dict(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}


def _write(path: Path, fill: Callable[[_Hashed], None]) -> dict[str, Any]:
    """Write and sync a file. Returns its size and checksum."""
    with path.open("wb") as file:
        out = _Hashed(file)
        fill(out)
        file.flush()
        os.fsync(file.fileno())
    return out.as_dict()


def _write_tensors(out: _Hashed, tensors: dict[str, Tensor]) -> None:
    """The safetensors format, written here because its own writer holds all tensors in memory twice.

    Each tensor is written whole and contiguous, whatever memory it shares; strides are not kept.
    """
    # Wide types first, as the library has it: every tensor then lies at a multiple of its element.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        out.write(flat.view(torch.uint8).numpy().data)


def _read(path: Path, wanted: dict[str, Any]) -> Checkpoint:
    """A checkpoint whose every byte is as it was written. Raises _RefusedError."""
    from safetensors import safe_open

    try:
        content = _content(path)
        if content["schema_version"] != LAYOUT_VERSION:
            raise _RefusedError(f"written in schema version {content['schema_version']}, this is {LAYOUT_VERSION}")
        if differing := _differing(content["identity"], wanted):
            raise _RefusedError(f"it is of another run: {differing}")
        for name, facts in content["files"].items():
            _verify(path / name, facts)
        values = json.loads((path / VALUES).read_bytes())
        with safe_open(path / TENSORS, "pt") as file:
            # Copies: what the library gives may still be the file, which is removed one day.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise _RefusedError(f"{Path(error.filename).name} is missing", damaged=True) from None
    except OSError as error:
        raise _RefusedError(f"it cannot be read ({error})") from None
    return Checkpoint(path=path, step=content["step"], tensors=tensors, values=values)


def _content(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / CHECKPOINT).read_bytes())
        content: dict[str, Any] = about["content"]
        whole = about["sha256"] == _digest(content) and content["step"] == _order(path)[0]
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise _RefusedError(f"{CHECKPOINT} is damaged", damaged=True)
    return content


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verify(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise _RefusedError(f"{path.name} is damaged: {size} bytes of {facts['bytes']}", damaged=True)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != facts["sha256"]:
        raise _RefusedError(f"{path.name} is damaged: its checksum is not that of {CHECKPOINT}", damaged=True)


def _differing(there: dict[str, Any], here: dict[str, Any]) -> str:
    """In which keys two identities differ; empty where they are equal."""
    keys = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    parts = [f"{key} is {json.dumps(there.get(key))} there and {json.dumps(here.get(key))} here" for key in keys]
    more = [f"and {len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
    return ", ".join(parts[:SHOWN] + more)
