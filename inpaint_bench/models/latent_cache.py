"""Outputs of the frozen networks, computed once per data set: moments of images and masked images, text states.

Moments (mean and log variance) are stored, not latents: every step samples from them, so training keeps the VAE's
noise. Masked images are stored for a pool of K masks per image, and once for the mask that repaints everything.

Folder `<prepared data>/cache/<key>/`, N images, latents of r x r, T distinct texts of L states and width D:

| file | shape | type |
|---|---|---|
| image.npy | N, 8, r, r | float16 |
| masked.npy | N, K, 8, r, r | float16 |
| masks.npy | N, K, r, r | uint8, 1 = repaint |
| full.npy | 8, r, r | float16 |
| text.npy | T, L, D | float16 |
| cache.json | | `CacheDescription` |
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, replacing_folder
from inpaint_bench.core.records import write_record
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.prepared.caches import (
    CACHES,
    DESCRIPTION,
    CacheDescription,
    data_inputs,
    describe_mismatch,
    read_description,
)
from inpaint_bench.data.samples import FULL_MASK, Batch
from inpaint_bench.data.source import Source

from .components import StepComponents
from .networks import FROZEN_SEED, Networks, build_networks

ARRAYS = ("image", "masked", "masks", "full", "text")
BATCH, TEXT_BATCH = 32, 256  # encoded at once

Progress = Callable[[int, int], None]  # images done, images in total


def cache_inputs(bench: BenchConfig, networks: Networks, source: Source) -> dict[str, Any]:
    """Return everything that determines a cache: equal inputs give equal content but for rounding."""
    return {
        **data_inputs(bench, source.identity),
        "vae": weights_hash(networks.vae),
        "text_encoder": weights_hash(networks.text_encoder),
        "texts": hashlib.sha256("\0".join(sorted(set(source.texts))).encode()).hexdigest()[:16],
    }


def cache_key(inputs: dict[str, Any]) -> str:
    """Return the 16 hex digits that name the cache's folder."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def weights_hash(network: nn.Module) -> str:
    """Return 16 hex digits over names and values, as they are in fp32."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


class LatentCache:
    """A cache opened for training: in the GPU's memory where `device` is given, else read row by row by the loader."""

    def __init__(
        self, folder: Path, description: CacheDescription, arrays: set[str], device: torch.device | None
    ) -> None:
        self.folder, self._arrays = folder, arrays
        self._mapped: dict[str, np.ndarray[Any, Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        if device is not None:
            for name in sorted(arrays):
                # Mapped copy-on-write, which PyTorch needs: it may be too large to be held in host memory as well.
                self._on_device[name] = torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")).to(device)
        self.facts: dict[str, Any] = {
            "key": description.key,
            "inputs": description.inputs,
            "storage": "disk" if device is None else "gpu",
            "arrays": sorted(arrays),
            "bytes": sum((folder / f"{name}.npy").stat().st_size for name in arrays),
        }

    @classmethod
    def open(cls, bench: BenchConfig, networks: Networks, source: Source, device: torch.device) -> LatentCache:
        """Open the cache that fits the run. Raises UserError where none does, with what differs from the nearest."""
        root = expand_path(bench.data.root or "") / CACHES
        inputs = cache_inputs(bench, networks, source)
        folder = root / cache_key(inputs)
        description = read_description(folder)
        if description is None:
            raise UserError(describe_mismatch(root, inputs))
        recipe = bench.recipe
        arrays = {"image"} if recipe.cache_image else set()
        arrays |= {"masked", "masks", "full"} if recipe.cache_masked else set()
        arrays |= {"text"} if recipe.cache_text else set()
        for name in arrays:
            path = folder / f"{name}.npy"
            # Sizes only: checksums of a large cache would delay the start of every run.
            size, expected = path.stat().st_size if path.is_file() else 0, description.bytes[name]
            if size != expected:
                raise UserError(f"{path}: {size} bytes instead of {expected}; remove the folder and prepare it again")
        return cls(folder, description, arrays, device if recipe.cache_storage == "gpu" else None)

    @property
    def in_loader(self) -> bool:
        """Tell whether the loader reads the rows."""
        return not self._on_device

    def rows(self, index: int, pool: int, text: int) -> Batch:
        """Return what the loader adds to a sample where the arrays are on disk."""
        rows: Batch = {}
        if "image" in self._arrays:
            rows["cached_image"] = self._row("image", index)
        if "masked" in self._arrays:
            # Under the mask that repaints everything all images are equal: one stored row serves them all.
            full = pool == FULL_MASK
            rows["cached_masked"] = self._row("full") if full else self._row("masked", index, pool)
            rows["cached_mask"] = (
                torch.ones_like(self._row("masks", index, 0)) if full else self._row("masks", index, pool)
            )
        if "text" in self._arrays:
            rows["cached_text"] = self._row("text", text)
        return rows

    def image_moments(self, batch: Batch) -> Tensor:
        """Return [B, 8, r, r] moments of the images."""
        return batch["cached_image"] if self.in_loader else self._on_device["image"][batch["index"]]

    def masked_moments(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return [B, 8, r, r] moments of the masked images and their masks, [B, 1, r, r] float32."""
        if self.in_loader:
            return batch["cached_masked"], batch["cached_mask"][:, None].float()
        # FULL_MASK is -1, no index: row 0 is read, then replaced. A branch would wait for the GPU.
        index, pool = batch["index"], batch["pool"].clamp(min=0)
        full = (batch["pool"] == FULL_MASK)[:, None, None, None]
        moments = torch.where(full, self._on_device["full"], self._on_device["masked"][index, pool])
        return moments, torch.where(full, 1.0, self._on_device["masks"][index, pool][:, None].float())

    def text_states(self, batch: Batch) -> Tensor:
        """Return [B, L, D] float32 text states."""
        states = batch["cached_text"] if self.in_loader else self._on_device["text"][batch["text_id"]]
        return states.float()

    def _row(self, name: str, *index: int) -> Tensor:
        if name not in self._mapped:  # mapped on first use: every loader process has its own
            self._mapped[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return torch.from_numpy(np.array(self._mapped[name][index]))


# --- building a cache ----------------------------------------------------------------------------


class _ImagesWithMasks(Dataset[tuple[int, Tensor, Tensor]]):
    """(index, pixels [R, R, 3] uint8, masks [K, R, R] uint8)."""

    def __init__(self, bench: BenchConfig, source: Source) -> None:
        self.bench, self.source = bench, source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        masks = [self._mask(index, number) for number in range(self.bench.recipe.mask_pool)]
        return index, torch.from_numpy(np.array(self.source.pixels(index))), torch.from_numpy(np.stack(masks))

    def _mask(self, index: int, number: int) -> Any:
        own = self.source.own_mask(index)
        if own is not None:
            return own
        data = self.bench.data
        return make_mask(data.resolution_px, (data.seed, index, number), kind=data.masks, full_mask_share=0.0)


def build_cache(
    bench: BenchConfig, source: Source, device: torch.device, progress: Progress
) -> tuple[Path, CacheDescription]:
    """Write the cache of `bench` into its data's folder, unless it exists. Return its folder and description.

    Raises UserError for a full disk. An unfinished cache is removed, however this ends.
    """
    torch.manual_seed(FROZEN_SEED)
    networks = build_networks(bench.model, device)
    inputs = cache_inputs(bench, networks, source)
    root = expand_path(bench.data.root or "") / CACHES
    folder = root / cache_key(inputs)
    if existing := read_description(folder):
        return folder, existing
    components = StepComponents.baseline(bench, device, networks, source)
    if device.type == "cuda":
        _speed_up_encoder(components)
    with replacing_folder(folder, DESCRIPTION) as new:
        encoding_s = _encode_images(components, new, progress)
        _encode_texts(components, new)
        description = CacheDescription(
            producer=PRODUCER,
            key=folder.name,
            inputs=inputs,
            images=len(source),
            encoding_s=round(encoding_s, 3),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            bytes={name: (new / f"{name}.npy").stat().st_size for name in ARRAYS},
        )
        write_record(new / DESCRIPTION, description)
    return folder, description


def _speed_up_encoder(components: StepComponents) -> None:
    """Run the encoder as it was fastest on an H200, see benchmarks/README.md.

    Its only attention has a single head of 512, for which the fused kernels are four times slower than two matmuls.
    """
    components.memory_format = torch.channels_last
    components.networks.vae.to(memory_format=torch.channels_last)
    components.vae_encoder = torch.compile(components.networks.vae.encoder, dynamic=False)
    # By default the math backend computes 16-bit attention in fp32.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    components.attention_kernels = lambda: sdpa_kernel(SDPBackend.MATH)


def _create_array(folder: Path, name: str, dtype: Any, *shape: int) -> Any:
    """Create an .npy file with all its space allocated: a full disk is an error here, not a SIGBUS later."""
    path = folder / f"{name}.npy"
    array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with path.open("rb+") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@torch.no_grad()
def _encode_images(components: StepComponents, folder: Path, progress: Progress) -> float:
    """Encode all images and masked images. Return the seconds after the first pass, which includes compilation."""
    bench, source, device = components.bench, components.source, components.device
    downscale, pool, count = components.networks.downscale, bench.recipe.mask_pool, len(source)
    side = bench.data.resolution_px // downscale
    images = _create_array(folder, "image", np.float16, count, 8, side, side)
    masked = _create_array(folder, "masked", np.float16, count, pool, 8, side, side)
    masks = _create_array(folder, "masks", np.uint8, count, pool, side, side)
    full = _create_array(folder, "full", np.float16, 8, side, side)
    # A fully masked image is zero everywhere. Its encoding also compiles the encoder, before the time is taken.
    blank = torch.zeros(BATCH, 3, bench.data.resolution_px, bench.data.resolution_px, device=device)
    full[:] = _moments(components, blank)[0]
    start_s = time.monotonic()
    loader = DataLoader(
        _ImagesWithMasks(bench, source),
        batch_size=BATCH,
        num_workers=bench.recipe.num_workers,
        pin_memory=device.type == "cuda",
    )
    done = 0
    with defer_signals():  # while worker processes are forked
        batches = iter(loader)
    for index, pixels, batch_masks in batches:
        image = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        hidden = batch_masks.to(device, non_blocking=True)
        rows = index.numpy()
        images[rows] = _moments(components, image)
        for number in range(pool):
            masked[rows, number] = _moments(components, image * (1 - hidden[:, number, None].float()))
        # The same pixels as F.interpolate(mode="nearest") takes in StepComponents.encode_masked_image.
        masks[rows] = batch_masks[:, :, ::downscale, ::downscale].numpy()
        done += len(rows)
        progress(done, count)
    for array in (images, masked, masks, full):
        array.flush()
    return time.monotonic() - start_s


def _moments(components: StepComponents, image: Tensor) -> Any:
    """[B, 3, R, R] -> float16 [B, 8, r, r] in host memory. Padded to BATCH images: one compiled shape."""
    padding = BATCH - len(image)
    if padding:
        image = torch.cat([image, image[-1:].expand(padding, -1, -1, -1)])
    with components.autocast(), components.attention_kernels():
        moments = components.vae_moments(image)
    return moments[: BATCH - padding].half().cpu().numpy()


@torch.no_grad()
def _encode_texts(components: StepComponents, folder: Path) -> None:
    networks, texts = components.networks, sorted(set(components.source.texts))
    tokens = networks.tokenize(texts)
    shape = len(texts), networks.state_rows, networks.text_encoder.config.hidden_size
    states = _create_array(folder, "text", np.float16, *shape)
    for start in range(0, len(texts), TEXT_BATCH):
        rows = slice(start, start + TEXT_BATCH)
        with components.autocast():
            states[rows] = components.text_encoder(tokens[rows].to(components.device)).half().cpu().numpy()
    states.flush()
