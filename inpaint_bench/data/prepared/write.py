"""Makes a prepared dataset: everything in a hidden folder beside it, which takes its name when it is whole.

Whatever ends the work early (a full disk, a signal, a bad file) leaves nothing behind. Only a SIGKILL or a power cut
can leave the hidden folder; the next `prepare` removes it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, features

from inpaint_bench.core import files
from inpaint_bench.core.config import DataConfig, PrepareConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals
from inpaint_bench.data import transform
from inpaint_bench.data.source import Source
from inpaint_bench.data.split import blocks, split

from . import layout
from .formats import Report, Writer, write_hdf5, write_memmap, write_shards
from .layout import Entry
from .lock import Lock
from .source import read_index

CHUNK = 8  # images that a process takes at a time
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class _Written:
    image: Entry
    mask: Entry | None
    pixels_sha256: str


def identity(source: Source, config: DataConfig, settings: PrepareConfig) -> str:
    """Hex digest of everything that makes the pixels and the split. Not of the formats: they hold the same."""
    content = {
        "source": source.identity,
        "transform": transform.VERSION,
        "resolution_px": config.resolution_px,
        "jpeg_quality": settings.jpeg_quality,
        "validation_share": config.validation_share,
        "block_m": config.block_m,
        "seed": config.seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(
    source: Source, config: DataConfig, settings: PrepareConfig, out: Path, formats: Sequence[str], report: Report
) -> dict[str, Any]:
    """Write the whole dataset to `out`, which must not exist or be empty. Returns its manifest. Raises UserError."""
    count = len(source)
    held_out = split(source.positions, config.validation_share, config.block_m, config.seed)
    places = blocks(source.positions, config.block_m)
    with _unfinished(out, _array_bytes(formats, count, config.resolution_px)) as folder:
        began = time.monotonic()
        written = _write_images(source, settings.jpeg_quality, folder, report)
        images_s = time.monotonic() - began
        masks, hashes = [one.mask for one in written], [one.pixels_sha256 for one in written]
        columns: dict[str, Any] = {
            "id": np.arange(count),
            "file_name": source.names,
            "latitude": source.positions[:, 0],
            "longitude": source.positions[:, 1],
            "text": source.texts,
            "split": ["validation" if held else "train" for held in held_out],
            "block": places,
            "mask": [mask.path if mask else None for mask in masks],
            "sha256": hashes,
        }
        with files.replacing(folder / layout.INDEX) as file:
            pq.write_table(pa.table(columns, schema=layout.INDEX_SCHEMA), file)
        manifest: dict[str, Any] = {
            "schema_version": layout.SCHEMA_VERSION,
            "producer": PRODUCER,
            "pillow": PIL.__version__,
            "jpeg_library": features.version("libjpeg_turbo") or features.version("jpg"),
            "identity": identity(source, config, settings),
            "source": {"kind": config.kind, "root": config.root, "identity": source.identity},
            "account": source.account.as_dict(),
            "resolution_px": config.resolution_px,
            "jpeg_quality": settings.jpeg_quality,
            "num_images": count,
            "split": {
                "block_m": config.block_m,
                "share": config.validation_share,
                "seed": config.seed,
                "train": int((~held_out).sum()),
                "validation": int(held_out.sum()),
                "blocks": len(set(places)),
                "validation_blocks": len({place for place, held in zip(places, held_out, strict=True) if held}),
            },
            "images_per_s": round(count / images_s, 1),
            "index": Entry.of(folder, layout.INDEX).as_dict(),
            "masks": [mask.as_dict() for mask in masks if mask],
            "formats": {
                "files": {"files": [one.image.as_dict() for one in written], "seconds": round(images_s, 3)},
            },
        }
        for name in formats:
            if name != "files":
                manifest["formats"][name] = _write_format(name, settings, folder, folder, hashes, report)
        files.replace_json(folder / layout.MANIFEST, manifest)
        if out.is_dir():
            out.rmdir()  # empty, or this raises
        folder.rename(out)
    files.fsync_folder(out.parent)
    return manifest


def add_formats(
    root: Path, manifest: dict[str, Any], settings: PrepareConfig, formats: Sequence[str], report: Report
) -> dict[str, Any]:
    """Write `formats` beside those that the dataset at `root` has, from its images. Returns its new manifest."""
    hashes = read_index(root, manifest)["sha256"].to_pylist()
    need = _array_bytes(formats, manifest["num_images"], manifest["resolution_px"])
    with _unfinished(root, need) as folder:
        added = {name: _write_format(name, settings, root, folder, hashes, report) for name in formats}
        for path in folder.iterdir():
            target = root / path.name
            if target.is_dir():  # of an addition that was killed before the manifest named it
                shutil.rmtree(target)
            path.replace(target)
        manifest = {**manifest, "formats": {**manifest["formats"], **added}}
        files.replace_json(root / layout.MANIFEST, manifest)
    return manifest


def _write_format(
    name: str, settings: PrepareConfig, root: Path, target: Path, hashes: list[str], report: Report
) -> dict[str, Any]:
    writers: dict[str, Writer] = {
        "memmap": write_memmap,
        "hdf5": write_hdf5,
        "webdataset": partial(write_shards, shard_images=settings.shard_images),
    }
    began = time.monotonic()
    paths = writers[name](root, target, hashes, report)
    result: dict[str, Any] = {
        "files": [Entry.of(target, path).as_dict() for path in paths],
        "seconds": round(time.monotonic() - began, 3),
    }
    return result | ({"shard_images": settings.shard_images} if name == "webdataset" else {})


def _write_images(source: Source, quality: int, folder: Path, report: Report) -> list[_Written]:
    """Every image and mask, by one process per core: drawing holds the interpreter lock, threads were slower."""
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    count, written = len(source), []
    pool = ProcessPoolExecutor(
        min(len(os.sched_getaffinity(0)), count),
        mp_context=multiprocessing.get_context("fork"),  # the source is inherited, not pickled
        initializer=_begin_process,
        initargs=(os.getpid(), source, quality, folder),
    )
    try:
        with defer_signals():  # all processes, at the first task
            results = pool.map(_write_image, range(count), chunksize=CHUNK)
        for one in results:
            written.append(one)
            report("images", len(written), count)
    finally:
        pool.shutdown(cancel_futures=True)
    if not any(one.mask for one in written):
        (folder / "masks").rmdir()
    return written


_job: tuple[Source, int, Path]


def _begin_process(parent: int, source: Source, quality: int, folder: Path) -> None:
    """Signals are the parent's business, and nobody outlives it: a pool's processes would wait for ever."""
    global _job
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    _job = source, quality, folder


def _write_image(index: int) -> _Written:
    source, quality, folder = _job
    encoded = io.BytesIO()
    Image.fromarray(source.pixels(index)).save(encoded, "JPEG", quality=quality, subsampling=0)  # 0: 4:4:4
    image = _put(folder, layout.image_name(index), encoded.getvalue())
    own, mask = source.own_mask(index), None
    if own is not None:
        encoded = io.BytesIO()
        Image.fromarray(own * np.uint8(255)).save(encoded, "PNG")
        mask = _put(folder, layout.mask_name(index), encoded.getvalue())
    pixels = layout.decode((folder / image.path).read_bytes())
    return _Written(image=image, mask=mask, pixels_sha256=hashlib.sha256(pixels.tobytes()).hexdigest())


def _put(folder: Path, path: str, content: bytes) -> Entry:
    (folder / path).write_bytes(content)
    return Entry(path=path, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@contextmanager
def _unfinished(out: Path, need: int) -> Iterator[Path]:
    """A hidden folder beside `out` to write in, gone when the block ends. Errors of the disk become UserErrors.

    In `out` where that is a mount point: nothing is renamed from one file system to another.
    `need`: bytes known in advance, refused at once where they do not fit.
    """
    place = out if out.is_mount() else out.parent
    folder, lock = place / f".{out.name}.partial", Lock(place / f".{out.name}.lock")
    with _disk_errors(out, need):
        place.mkdir(parents=True, exist_ok=True)
        if not lock.take(wait=False):
            raise UserError(f"{out}: another prepare is writing it")
    try:
        with _disk_errors(out, need):
            shutil.rmtree(folder, ignore_errors=True)
            if shutil.disk_usage(place).free < need:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release(remove=True)


@contextmanager
def _disk_errors(out: Path, need: int) -> Iterator[None]:
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            disk = next(folder for folder in (parent, *parent.parents) if folder.is_mount())
            arrays = f", of which the arrays alone need {need / 1e6:,.1f} MB" if need else ""
            raise UserError(
                f"prepare.out={out}: the disk {disk} is full ({error.strerror}); {free / 1e6:,.1f} MB were free "
                f"before{arrays}. No partial output is left; free some space or choose another prepare.out"
            ) from None
        if error.errno is None:  # not the system's
            raise
        raise UserError(f"prepare.out={out}: cannot be written ({error.strerror}: {error.filename})") from None


def _array_bytes(formats: Sequence[str], count: int, side: int) -> int:
    return sum(name in ("memmap", "hdf5") for name in formats) * count * side * side * 3


def verify(root: Path, report: Report) -> dict[str, Any]:
    """Compare every file with its SHA-256. Returns the manifest. Raises UserError naming what differs."""
    manifest = layout.read_manifest(root)
    if manifest is None:
        raise UserError(f"{root}: has no {layout.MANIFEST}, so `prepare` did not write it")
    expected = layout.entries(manifest)
    layout.check_sizes(root, expected)
    wrong = []
    for number, entry in enumerate(expected, start=1):
        if Entry.of(root, entry.path) != entry:
            wrong.append(entry.path)
        report("verify", number, len(expected))
    if wrong:
        raise UserError(f"{root}: {len(wrong)} files hold other content than was written: {', '.join(wrong[:3])}")
    return manifest
