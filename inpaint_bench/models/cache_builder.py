"""Writing a cache of the frozen networks' outputs (latent_cache.py): one pass over a data set, for `prepare`."""

import logging
import math
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
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path, replacing_folder
from inpaint_bench.core.records import write_record
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals
from inpaint_bench.data.loader import start_method
from inpaint_bench.data.prepared import CACHES, DESCRIPTION, CacheDescription, frozen_settings, read_description
from inpaint_bench.data.samples import Samples
from inpaint_bench.data.source import Source

from .latent_cache import cache_inputs, cache_key
from .networks import FROZEN_SEED, INPUT_CHANNELS, LATENT_CHANNELS, build_networks
from .training_step import StepComponents

BATCH, TEXT_BATCH = 32, 256  # encoded at once

log = logging.getLogger(__name__)
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
    """Write the cache of `bench` into its data's folder. Return its folder and description.

    If it exists, only the settings of the networks are added to its description.
    Raises UserError for a full disk. An unfinished cache is removed, however this ends.
    """
    torch.manual_seed(FROZEN_SEED)
    networks = build_networks(bench.model, device, inputs=(LATENT_CHANNELS, INPUT_CHANNELS))
    inputs = cache_inputs(bench, networks, source)
    root = expand_path(bench.data.root or "") / CACHES
    folder = root / cache_key(inputs)
    settings = frozen_settings(bench.model)
    if existing := read_description(folder):
        if settings and settings not in existing.networks:
            existing.networks.append(settings)
            write_record(folder / DESCRIPTION, existing)
        return folder, existing
    components = StepComponents(bench=bench, device=device, networks=networks, source=source)
    if device.type == "cuda":
        _speed_up_encoder(components)
    shapes = _shapes(components)
    total = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in shapes.values())
    log.info("the cache takes %.2f GB, of which texts %.2f GB", total / 1e9, 2 * math.prod(shapes["text"][1]) / 1e9)
    with replacing_folder(folder, DESCRIPTION) as new:
        arrays = {name: _create_array(new, name, dtype, *shape) for name, (dtype, shape) in shapes.items()}
        encoding_s = _encode_images(components, arrays, progress)
        _encode_texts(components, arrays["text"])
        for array in arrays.values():
            array.flush()
        description = CacheDescription(
            producer=PRODUCER,
            key=folder.name,
            inputs=inputs,
            images=len(source),
            encoding_s=round(encoding_s, 3),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            bytes={path.stem: path.stat().st_size for path in sorted(new.glob("*.npy"))},
            networks=[settings] if settings else [],
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


def _shapes(components: StepComponents) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return type and shape of each array, see latent_cache.py."""
    networks, bench, source = components.networks, components.bench, components.source
    side, moments = bench.data.resolution_px // networks.downscale, 2 * networks.latent_channels
    pool = bench.recipe.mask_pool
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {"image": (np.float16, (len(source), moments, side, side))}
    if networks.inpaints:
        channels = [networks.input_channels - moments] if networks.input_channels > moments + 1 else []
        shapes["masked"] = np.float16, (len(source), pool, moments, side, side)
        shapes["masks"] = np.uint8, (len(source), pool, *channels, side, side)
        shapes["full"] = np.float16, (moments, side, side)
    shapes["text"] = np.float16, (len(set(source.texts)), networks.state_rows, networks.text_encoder.config.hidden_size)
    return shapes


def _create_array(folder: Path, name: str, dtype: Any, *shape: int) -> Any:
    """Create an .npy file with all its space allocated: a full disk is an error here, not a SIGBUS later."""
    path = folder / f"{name}.npy"
    array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with path.open("rb+") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@torch.no_grad()
def _encode_images(components: StepComponents, arrays: dict[str, Any], progress: Progress) -> float:
    """Encode all images and masked images. Return the seconds after the first pass, which includes compilation."""
    bench, source, device, networks = components.bench, components.source, components.device, components.networks
    pool, count = bench.recipe.mask_pool if networks.inpaints else 0, len(source)
    # A fully masked image is zero everywhere. Its encoding also compiles the encoder, before the time is taken.
    blank = _moments(components, torch.zeros(BATCH, 3, *[bench.data.resolution_px] * 2, device=device))[0]
    if pool:
        arrays["full"][:] = blank
    start_s = time.monotonic()
    data = bench.data
    samples = Samples(source, components.networks.tokenize, data.seed, masks=data.masks, full_mask_share=0.0)
    loader = DataLoader(
        _ImagesWithMasks(samples, pool),
        batch_size=BATCH,
        num_workers=bench.recipe.num_workers,
        multiprocessing_context=start_method(bench.recipe.num_workers),
        pin_memory=device.type == "cuda",
    )
    done = 0
    with defer_signals():  # while worker processes are forked
        batches = iter(loader)
    for index, pixels, batch_masks in batches:
        image = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        hidden = batch_masks.to(device, non_blocking=True)
        rows = index.numpy()
        arrays["image"][rows] = _moments(components, image)
        for number in range(pool):
            arrays["masked"][rows, number] = _moments(components, image * (1 - hidden[:, number, None].float()))
        if pool:
            read = networks.mask_channels(hidden.flatten(0, 1)[:, None].float()).unflatten(0, (-1, pool))
            arrays["masks"][rows] = read.reshape(len(rows), *arrays["masks"].shape[1:]).to(torch.uint8).cpu().numpy()
        done += len(rows)
        progress(done, count)
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
def _encode_texts(components: StepComponents, states: Any) -> None:
    networks, texts = components.networks, sorted(set(components.source.texts))
    tokens = networks.tokenize(texts)
    for start in range(0, len(texts), TEXT_BATCH):
        rows = slice(start, start + TEXT_BATCH)
        with components.autocast():
            encoded = components.calls["text_encoder"](tokens[rows].to(components.device)).half()
        if not encoded.isfinite().all():  # states between the layers of a language model may be large
            raise UserError("states of a text are NaN or beyond the cache's float16; train without cache_text")
        states[rows] = encoded.cpu().numpy()
