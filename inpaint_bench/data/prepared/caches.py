"""The caches of a prepared dataset as their `cache.json` has them. models/latent_cache.py has the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import read_record

CACHES = "cache"
DESCRIPTION = "cache.json"
VERSION = 1  # version of how the arrays are computed; part of the key


class CacheDescription(msgspec.Struct, kw_only=True):
    """What a cache was computed from, and how long that took."""

    producer: str
    key: str
    inputs: dict[str, Any]
    images: int
    encoding_s: float  # time for all images, without compilation
    device: str
    bytes: dict[str, int]  # by array


def data_inputs(bench: BenchConfig, identity: str) -> dict[str, Any]:
    """Return what determines a cache besides the networks; `identity` is the dataset's.

    A cache for a model that makes images of texts has no masked images.
    """
    masks = {"masks": bench.data.masks, "mask_pool": bench.recipe.mask_pool, "mask_seed": bench.data.seed}
    if bench.model.text_to_image:
        masks = dict.fromkeys(masks)
    return {
        "version": VERSION,
        "data": identity,
        "resolution_px": bench.data.resolution_px,
        **masks,
    }


def read_description(folder: Path) -> CacheDescription | None:
    """Return the description of the cache in `folder`, None if there is none. Raises UserError on damage."""
    try:
        return read_record(folder / DESCRIPTION, CacheDescription)
    except ValueError as error:
        raise UserError(f"{error}; remove the folder and prepare the cache again") from None


def check_caches(root: Path, inputs: Mapping[str, Any]) -> None:
    """Raise UserError if no cache of the dataset at `root` has these inputs, of all that it was computed from."""
    folder = root / CACHES
    if not any(not _differences(cache, inputs) for cache in _read_all(folder)):
        raise UserError(describe_mismatch(folder, inputs))


def describe_mismatch(folder: Path, inputs: Mapping[str, Any]) -> str:
    """Say that there is no cache for these inputs, and what differs from the most similar one."""
    caches = _read_all(folder)
    if not caches:
        return (
            f"{folder}: no cache of the frozen networks; `prepare ... prepare.caches=true` with this model creates one"
        )
    nearest = min(caches, key=lambda cache: len(_differences(cache, inputs)))
    parts = [f"{name} {nearest.inputs.get(name)}, here {inputs[name]}" for name in _differences(nearest, inputs)]
    return (
        f"{folder}: no cache fits; the nearest, {nearest.key}, was made with {'; '.join(parts)}. "
        "`prepare ... prepare.caches=true` with these settings creates one"
    )


def _read_all(folder: Path) -> list[CacheDescription]:
    descriptions = [read_description(path.parent) for path in sorted(folder.glob(f"*/{DESCRIPTION}"))]
    return [cache for cache in descriptions if cache]


def _differences(cache: CacheDescription, inputs: Mapping[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if cache.inputs.get(name) != value]
