"""What the frozen networks make of the data, computed once: moments of images, of masked images, text states.

Moments (mean and log variance), not latents, are stored: a sample is drawn from them in every step, so the
VAE's noise stays in the training. Masked images are stored for a pool of K masks per image, and once for the
mask that repaints everything.

Folder `<prepared data>/cache/<key>/`, N images, latents of r x r, T distinct texts of L tokens and width D:

| file | shape | type |
|---|---|---|
| image.npy | N, 8, r, r | float16 |
| masked.npy | N, K, 8, r, r | float16 |
| masks.npy | N, K, r, r | uint8, 1 = repaint |
| full.npy | 8, r, r | float16 |
| text.npy | T, L, D | float16 |
| cache.json | | the key and what it was made of |
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.data.samples import FULL, Batch
from inpaint_bench.data.source import Source

from .networks import Models

CACHES = "cache"
ACCOUNT = "cache.json"
ARRAYS = ("image", "masked", "masks", "full", "text")
VERSION = 1  # of how the arrays are made; part of the key


def ingredients(bench: BenchConfig, nets: Models, source: Source) -> dict[str, Any]:
    """Everything that made a cache; equal ingredients, equal content but for rounding."""
    return {
        "version": VERSION,
        "data": source.identity,
        "resolution_px": bench.data.resolution_px,
        "vae": weights_hash(nets.vae),
        "text_encoder": weights_hash(nets.text_encoder),
        "texts": hashlib.sha256("\0".join(sorted(set(source.texts))).encode()).hexdigest()[:16],
        "masks": bench.data.masks,
        "mask_pool": bench.recipe.mask_pool,
        "mask_seed": bench.data.seed,
    }


def key(made_of: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def weights_hash(network: nn.Module) -> str:
    """16 hex digits over names and values, as they are in fp32."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class Cache:
    """A cache opened for training. With `gpu` the arrays lie on the device; else the loader reads their rows."""

    def __init__(self, folder: Path, account: dict[str, Any], wanted: set[str], device: torch.device | None) -> None:
        self.folder, self._wanted = folder, wanted
        self._mapped: dict[str, np.ndarray[Any, Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        if device is not None:
            for name in sorted(wanted):
                array = np.load(folder / f"{name}.npy", mmap_mode="r")
                self._on_device[name] = _upload(array, device)
        total = sum((folder / f"{name}.npy").stat().st_size for name in wanted)
        self.facts: dict[str, Any] = {
            "key": account["key"],
            "made_of": account["made_of"],
            "place": "disk" if device is None else "gpu",
            "arrays": sorted(wanted),
            "bytes": total,
        }

    @classmethod
    def open(cls, bench: BenchConfig, nets: Models, source: Source, device: torch.device) -> Cache:
        """The cache that fits the run. Raises UserError where there is none, naming what differs from the nearest."""
        root = Path(bench.data.root or "") / CACHES
        made_of = ingredients(bench, nets, source)
        folder = root / key(made_of)
        account = read_json(folder / ACCOUNT)
        if account is None:
            raise UserError(_why_none(root, made_of))
        recipe = bench.recipe
        wanted = {"image"} if recipe.cache_image else set()
        wanted |= {"masked", "masks", "full"} if recipe.cache_masked else set()
        wanted |= {"text"} if recipe.cache_text else set()
        for name in wanted:
            found = (folder / f"{name}.npy").stat().st_size if (folder / f"{name}.npy").is_file() else 0
            if found != account["bytes"][name]:
                raise UserError(
                    f"{folder / name}.npy: {found} bytes, its account says {account['bytes'][name]}: "
                    "remove the folder and prepare it again"
                )
        return cls(folder, account, wanted, device if recipe.cache_storage == "gpu" else None)

    @property
    def in_loader(self) -> bool:
        return not self._on_device

    def rows(self, index: int, pool: int, text: int) -> Batch:
        """What the loader adds to a sample where the arrays lie on disk."""
        given: Batch = {}
        if "image" in self._wanted:
            given["cached_image"] = self._row("image", index)
        if "masked" in self._wanted:
            full = pool == FULL
            given["cached_masked"] = self._row("full") if full else self._row("masked", index, pool)
            mask = np.ones_like(self._array("masks")[index, 0]) if full else self._array("masks")[index, pool]
            given["cached_mask"] = torch.from_numpy(np.array(mask))
        if "text" in self._wanted:
            given["cached_text"] = self._row("text", text)
        return given

    def image(self, batch: Batch) -> Tensor:
        """[B, 8, r, r] moments."""
        return batch["cached_image"] if self.in_loader else self._on_device["image"][batch["index"]]

    def masked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, 8, r, r] moments of the masked images and their masks, [B, 1, r, r] float32."""
        if self.in_loader:
            return batch["cached_masked"], batch["cached_mask"][:, None].float()
        index, pool = batch["index"], batch["pool"]
        full, place = pool == FULL, pool.clamp(min=0)
        moments = self._on_device["masked"][index, place]
        mask = self._on_device["masks"][index, place][:, None].float()
        every = full[:, None, None, None]
        return torch.where(every, self._on_device["full"], moments), torch.where(every, 1.0, mask)

    def text(self, batch: Batch) -> Tensor:
        """[B, L, D] float32."""
        states = batch["cached_text"] if self.in_loader else self._on_device["text"][batch["text_id"]]
        return states.float()

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._mapped:  # mapped where it is used: every loader process has its own
            self._mapped[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return self._mapped[name]

    def _row(self, name: str, *place: int) -> Tensor:
        return torch.from_numpy(np.array(self._array(name)[place]))


def _upload(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """In slices: the array may be larger than what one wants to hold twice in memory."""
    result = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, device=device)
    rows = max(1, (256 << 20) // max(1, array[:1].nbytes))
    if array.ndim < 3 or len(array) <= rows:
        return result.copy_(torch.from_numpy(np.array(array)))
    for start in range(0, len(array), rows):
        result[start : start + rows] = torch.from_numpy(np.array(array[start : start + rows])).to(device)
    return result


def _why_none(root: Path, made_of: dict[str, Any]) -> str:
    accounts = [found for path in sorted(root.glob(f"*/{ACCOUNT}")) if (found := read_json(path))]
    if not accounts:
        return f"{root}: no cache of the frozen networks; `prepare ... prepare.caches=true` with this model makes one"

    def differing(account: dict[str, Any]) -> list[str]:
        return [name for name, value in made_of.items() if account["made_of"].get(name) != value]

    nearest = min(accounts, key=lambda account: len(differing(account)))
    parts = [f"{name} {nearest['made_of'].get(name)}, here {made_of[name]}" for name in differing(nearest)]
    return (
        f"{root}: no cache fits; the nearest, {nearest['key']}, was made with {'; '.join(parts)}. "
        "`prepare ... prepare.caches=true` with these settings makes one"
    )
