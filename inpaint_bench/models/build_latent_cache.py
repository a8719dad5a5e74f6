"""Running the frozen networks over a prepared dataset once; see `caches` for what is written."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import fsync_folder, read_json, replace_json
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.source import Source

from . import builders, latent_cache
from .assembly import Assembly

CHUNK = 32  # images encoded at once
TEXTS_AT_ONCE = 256

Progress = Callable[[int, int], None]  # images done, images in all


class _Pictures(Dataset[tuple[int, Tensor, Tensor]]):
    """(index, pixels [R, R, 3] uint8, masks [K, R, R] uint8): made by loader processes, encoded by the GPU."""

    def __init__(self, bench: BenchConfig, source: Source) -> None:
        self.bench, self.source = bench, source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        pixels = np.array(self.source.pixels(index))
        own = self.source.own_mask(index)
        count = self.bench.recipe.mask_pool
        masks = [own if own is not None else self._mask(index, number) for number in range(count)]
        return index, torch.from_numpy(pixels), torch.from_numpy(np.stack(masks))

    def _mask(self, index: int, number: int) -> Any:
        data = self.bench.data
        return make_mask(data.resolution_px, (data.seed, index, number), kind=data.masks, full_mask_share=0.0)


def build(bench: BenchConfig, source: Source, device: torch.device, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """Write the cache that `bench` asks for below its data's folder, unless it is there. Returns it and its account.

    Raises UserError for a full disk; what was begun is removed, however it ends.
    """
    torch.manual_seed(builders.FROZEN_SEED)
    nets = builders.build(bench.model, device)
    made_of = latent_cache.ingredients(bench, nets, source)
    key = latent_cache.key(made_of)
    root = Path(bench.data.root or "") / latent_cache.CACHES
    if account := read_json(root / key / latent_cache.ACCOUNT):
        return root / key, account
    assembly = Assembly.base(bench, device, nets, source)
    if device.type == "cuda":
        _quicken(assembly)
    with _whole(root, key) as folder:
        encodes, first_s, encoding_s = _encode_images(assembly, folder, progress)
        _encode_texts(assembly, folder)
        account = {
            "producer": PRODUCER,
            "key": key,
            "made_of": made_of,
            "images": len(source),
            "encodes": encodes,
            "first_s": round(first_s, 3),
            "encoding_s": round(encoding_s, 3),
            "encodes_per_s": round(encodes / encoding_s, 2),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "bytes": {name: (folder / f"{name}.npy").stat().st_size for name in latent_cache.ARRAYS},
        }
        replace_json(folder / latent_cache.ACCOUNT, account)
    return root / key, account


def _quicken(assembly: Assembly) -> None:
    """The encoder as it was fastest on an H200, see benchmarks/README.md.

    Its one attention has a single head of 512, for which the fused kernels are four times slower than two
    matrix products.
    """
    assembly.layout = torch.channels_last
    assembly.nets.vae.to(memory_format=torch.channels_last)
    assembly.encoder = torch.compile(assembly.nets.vae.encoder, dynamic=False)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    assembly.attention = lambda: sdpa_kernel(SDPBackend.MATH)


@contextmanager
def _whole(root: Path, key: str) -> Iterator[Path]:
    """A folder that becomes `root/key` when the block ends, and is gone where it raises."""
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f".{key}.{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
        fsync_folder(folder)
        folder.rename(root / key)
        fsync_folder(root)
    except OSError as error:
        free = shutil.disk_usage(root).free
        raise UserError(f"{root}: the cache could not be written ({error}); {free / 2**30:.1f} GiB are free") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _array(folder: Path, name: str, kind: Any, *shape: int) -> Any:
    """A new .npy of this shape, all of its room taken at once: a full disk shows here, not as a crash later."""
    path = folder / f"{name}.npy"
    array = open_memmap(path, mode="w+", dtype=kind, shape=shape)
    with path.open("rb+") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


@torch.no_grad()
def _encode_images(assembly: Assembly, folder: Path, progress: Progress) -> tuple[int, float, float]:
    """Returns how many pictures went through the encoder after the first, seconds of the first, and of the rest.

    The first has the compiler's time, the rest decoding, masks, copies and writing.
    """
    bench, source, device = assembly.bench, assembly.source, assembly.device
    side, pool = bench.data.resolution_px // assembly.nets.downscale, bench.recipe.mask_pool
    count = len(source)
    images = _array(folder, "image", np.float16, count, 8, side, side)
    masked = _array(folder, "masked", np.float16, count, pool, 8, side, side)
    masks = _array(folder, "masks", np.uint8, count, pool, side, side)
    blank = torch.zeros(CHUNK, 3, bench.data.resolution_px, bench.data.resolution_px, device=device)
    full = _array(folder, "full", np.float16, 8, side, side)
    begun = time.monotonic()
    full[:] = _moments(assembly, blank)[0]
    started = time.monotonic()
    workers = bench.recipe.num_workers
    loader = DataLoader(
        _Pictures(bench, source), batch_size=CHUNK, num_workers=workers, pin_memory=device.type == "cuda"
    )
    done = 0
    with defer_signals():
        batches = iter(loader)
    for index, pixels, shown in batches:
        picture = pixels.to(device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        hidden = shown.to(device, non_blocking=True)
        place = index.numpy()
        images[place] = _moments(assembly, picture)
        for number in range(pool):
            masked[place, number] = _moments(assembly, picture * (1 - hidden[:, number, None].float()))
        masks[place] = shown[:, :, :: assembly.nets.downscale, :: assembly.nets.downscale].numpy()
        done += len(place)
        progress(done, count)
    for array in (images, masked, masks, full):
        array.flush()
    return count * (1 + pool), started - begun, time.monotonic() - started


def _moments(assembly: Assembly, picture: Tensor) -> Any:
    """[B, 3, R, R] -> float16 [B, 8, r, r] in host memory. Always CHUNK pictures at once: one compiled shape."""
    short = CHUNK - len(picture)
    if short:
        picture = torch.cat([picture, picture[-1:].expand(short, -1, -1, -1)])
    with assembly.cast(), assembly.attention():
        moments = assembly.moments(picture)
    return moments[: CHUNK - short].half().cpu().numpy()


@torch.no_grad()
def _encode_texts(assembly: Assembly, folder: Path) -> None:
    texts = sorted(set(assembly.source.texts))
    tokens = assembly.nets.tokenize(texts)
    width = assembly.nets.text_encoder.config.hidden_size
    states = _array(folder, "text", np.float16, len(texts), tokens.shape[1], width)
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        rows = slice(start, start + TEXTS_AT_ONCE)
        with assembly.cast():
            states[rows] = assembly.text(tokens[rows].to(assembly.device)).half().cpu().numpy()
    states.flush()
