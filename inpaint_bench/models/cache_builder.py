"""Writing a cache of the frozen networks' outputs (latent_cache.py): one pass over a data set, for `prepare`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.files import expand_path, replacing_folder
from inpaint_bench.core.records import write_record
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals
from inpaint_bench.data.prepared.caches import CACHES, DESCRIPTION, CacheDescription, read_description
from inpaint_bench.data.samples import Samples
from inpaint_bench.data.source import Source

from .components import StepComponents
from .latent_cache import cache_inputs, cache_key
from .networks import FROZEN_SEED, INPUT_CHANNELS, LATENT_CHANNELS, build_networks

BATCH, TEXT_BATCH = 32, 256  # encoded at once

Progress = Callable[[int, int], None]  # images done, images in total


class _ImagesWithMasks(Dataset[tuple[int, Tensor, Tensor]]):
    """(index, pixels [R, R, 3] uint8, masks [K, R, R] uint8)."""

    def __init__(self, samples: Samples, pool: int) -> None:
        self.samples, self.pool = samples, pool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        pixels = np.array(self.samples.source.pixels(index))
        masks = [self.samples.mask(index, number, len(pixels)) for number in range(self.pool)]
        return index, torch.from_numpy(pixels), torch.from_numpy(np.array(masks, np.uint8))


def build_cache(
    bench: BenchConfig, source: Source, device: torch.device, progress: Progress
) -> tuple[Path, CacheDescription]:
    """Write the cache of `bench` into its data's folder, unless it exists. Return its folder and description.

    Raises UserError for a full disk. An unfinished cache is removed, however this ends.
    """
    torch.manual_seed(FROZEN_SEED)
    networks = build_networks(bench.model, device, inputs=(LATENT_CHANNELS, INPUT_CHANNELS))
    inputs = cache_inputs(bench, networks, source)
    root = expand_path(bench.data.root or "") / CACHES
    folder = root / cache_key(inputs)
    if existing := read_description(folder):
        return folder, existing
    components = StepComponents(bench=bench, device=device, networks=networks, source=source)
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
            bytes={path.stem: path.stat().st_size for path in sorted(new.glob("*.npy"))},
        )
        write_record(new / DESCRIPTION, description)
    return folder, description


def _speed_up_encoder(components: StepComponents) -> None:
    """Run the encoder as it was fastest on an H200, see benchmarks/README.md.

    Its only attention has a single head of 512, for which the fused kernels are four times slower than two matmuls.
    """
    components.memory_format = torch.channels_last
    components.networks.vae.to(memory_format=torch.channels_last)
    components.calls["vae_encoder"] = torch.compile(components.networks.vae.encoder, dynamic=False)
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
    downscale, count = components.networks.downscale, len(source)
    pool = bench.recipe.mask_pool if components.networks.inpaints else 0
    side = bench.data.resolution_px // downscale
    networks = components.networks
    moments = 2 * networks.latent_channels
    images = _create_array(folder, "image", np.float16, count, moments, side, side)
    arrays = [images]
    # A fully masked image is zero everywhere. Its encoding also compiles the encoder, before the time is taken.
    blank = _moments(components, torch.zeros(BATCH, 3, *[bench.data.resolution_px] * 2, device=device))[0]
    if pool:
        mask_channels = networks.input_channels - moments
        masked = _create_array(folder, "masked", np.float16, count, pool, moments, side, side)
        masks = _create_array(
            folder, "masks", np.uint8, count, pool, *([mask_channels] if networks.flow else []), side, side
        )
        full = _create_array(folder, "full", np.float16, moments, side, side)
        full[:] = blank
        arrays += [masked, masks, full]
    start_s = time.monotonic()
    data = bench.data
    samples = Samples(source, components.networks.tokenize, data.seed, masks=data.masks, full_mask_share=0.0)
    loader = DataLoader(
        _ImagesWithMasks(samples, pool),
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
        if pool:
            read = networks.mask_channels(hidden.flatten(0, 1)[:, None].float()).unflatten(0, (-1, pool))
            masks[rows] = (read if networks.flow else read[:, :, 0]).to(torch.uint8).cpu().numpy()
        done += len(rows)
        progress(done, count)
    for array in arrays:
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
            states[rows] = components.calls["text_encoder"](tokens[rows].to(components.device)).half().cpu().numpy()
    states.flush()
