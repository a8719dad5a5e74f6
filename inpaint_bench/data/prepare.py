"""Write a prepared dataset, or add formats to one: in a hidden folder, which is renamed when it is complete.

Whatever ends the work early (a full disk, a signal, a bad file) leaves nothing behind. Only a SIGKILL or a power cut
can leave the hidden folder; the next `prepare` removes it.
"""

import ctypes
import errno
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout, UnixFileLock
from PIL import Image, features

from inpaint_bench.core import files
from inpaint_bench.core.config.bench import BenchConfig, PrepareConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.records import write_record
from inpaint_bench.core.schema import PRODUCER
from inpaint_bench.core.signals import defer_signals, obey_parent
from inpaint_bench.data import transform
from inpaint_bench.data.open import open_source
from inpaint_bench.data.source import Source, blocks, split

from . import prepared
from .prepared import DatasetManifest, Entry, Format, ReportProgress
from .prepared_source import PreparedSource, read_index

CHUNK = 8  # images per task of a worker process
_PR_SET_PDEATHSIG = 1  # prctl(2)
_WrittenImage = tuple[Entry, Entry | None, str]  # image, its own mask, SHA-256 of the decoded pixels

log = logging.getLogger(__name__)


def prepare_dataset(bench: BenchConfig, report: ReportProgress) -> tuple[Path, DatasetManifest]:
    """Write what is missing of the dataset that `bench` describes, and return its folder and manifest.

    Raises UserError for settings that contradict each other, and if prepare.out holds anything else.
    """
    data, settings = bench.data, bench.prepare
    unknown = sorted(set(settings.formats) - set(prepared.FORMATS))
    if unknown:
        raise UserError(f"prepare.formats={','.join(unknown)}: not one of {', '.join(prepared.FORMATS)}")
    # Formats are added to an existing dataset in place, from the images that it holds.
    if data.kind == "prepared":
        if settings.out is not None:
            raise UserError("prepare.out: data=prepared adds formats to data.root itself; do not set prepare.out")
        root = expand_path(data.root or "").resolve()
        return root, _add_missing(root, PreparedSource(data).manifest, settings, settings.formats, report)
    if not settings.out:
        raise UserError("prepare.out is empty: prepare needs prepare.out=<the folder to make>")
    out = expand_path(settings.out).resolve()
    files.check_can_be_made(out)
    if data.kind in ("folder", "parquet") and expand_path(data.root or "").resolve() in (out, *out.parents):
        raise UserError(f"prepare.out={out}: lies inside data.root={data.root}, whose images it would join")
    existing = _read_existing(out)
    source = open_source(data)
    # `files` comes first, because the other formats are made from it.
    formats = list(dict.fromkeys(["files", *settings.formats]))
    if existing is None:
        try:
            return out, _write_dataset(source, bench, out, formats, report)
        except RuntimeError as error:  # a file that became unreadable
            raise UserError(f"{error}; nothing was written") from error
    if existing.identity != _dataset_identity(source, bench):
        raise UserError(
            f"prepare.out={out}: holds another dataset ({existing.num_images:,} images at {existing.resolution_px} px "
            f"of {existing.source.root or existing.source.kind}, identity {existing.identity[:12]}); choose another "
            "prepare.out, or remove it"
        )
    return out, _add_missing(out, existing, settings, formats, report)


def _read_existing(out: Path) -> DatasetManifest | None:
    """Return the manifest of a dataset at `out`, or None. Raises UserError if something else is there."""
    manifest = prepared.read_manifest(out)
    if manifest is None and out.is_mount():
        raise UserError(f"prepare.out={out}: is a mount point, which cannot be replaced; name a folder in it")
    if manifest is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"prepare.out={out}: exists and is not a prepared dataset; nothing was written")
    return manifest


def _add_missing(
    root: Path, manifest: DatasetManifest, settings: PrepareConfig, formats: Sequence[str], report: ReportProgress
) -> DatasetManifest:
    """Write those of `formats` that the dataset lacks from its images, and return its new manifest."""
    prepared.check_sizes(root, prepared.list_entries(manifest))
    if "webdataset" in formats and "webdataset" in manifest.formats:
        shard_images = manifest.formats["webdataset"].shard_images
        if shard_images != settings.shard_images:
            raise UserError(f"{root}: has shards of {shard_images} images; set prepare.shard_images={shard_images}")
    missing = [name for name in formats if name not in manifest.formats]
    if not missing:
        log.info("%s is complete; nothing was written", root)
        return manifest
    hashes = read_index(root, manifest)["sha256"].to_pylist()
    with _partial_folder(root, root) as folder:
        added = {name: _write_format(name, settings, root, folder, hashes, report) for name in missing}
        # Files are moved before the manifest names them: killed in between, they are ignored and later written again.
        for path in folder.iterdir():
            target = root / path.name
            if target.is_dir():  # left by an addition that was killed before the manifest named it
                shutil.rmtree(target)
            path.replace(target)
        manifest = msgspec.structs.replace(manifest, formats={**manifest.formats, **added})
        write_record(root / prepared.MANIFEST, manifest)
    return manifest


def verify_dataset(root: Path, report: ReportProgress) -> DatasetManifest:
    """Compare every file with its SHA-256 and return the manifest. Raises UserError naming the files that differ."""
    manifest = prepared.read_manifest(root)
    if manifest is None:
        raise UserError(f"{root}: has no {prepared.MANIFEST}, so `prepare` did not write it")
    expected = prepared.list_entries(manifest)
    # Sizes first: that takes a moment and reveals most damage.
    prepared.check_sizes(root, expected)
    wrong = []
    for number, entry in enumerate(expected, start=1):
        if Entry.of(root, entry.path) != entry:
            wrong.append(entry.path)
        report("verify", number, len(expected))
    if wrong:
        raise UserError(f"{root}: {len(wrong)} files hold other content than was written: {', '.join(wrong[:3])}")
    return manifest


def _dataset_identity(source: Source, bench: BenchConfig) -> str:
    """Return a hex digest of everything that decides pixels and split; the formats all hold the same pixels."""
    content = {
        "source": source.identity,
        "transform": transform.VERSION,
        "resolution_px": bench.data.resolution_px,
        "jpeg_quality": bench.prepare.jpeg_quality,
        "validation_share": bench.data.validation_share,
        "block_m": bench.data.block_m,
        "seed": bench.data.seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_dataset(
    source: Source, bench: BenchConfig, out: Path, formats: Sequence[str], report: ReportProgress
) -> DatasetManifest:
    """Write the dataset to `out`, which must not exist or be empty, and return its manifest. Raises UserError."""
    config, settings, count = bench.data, bench.prepare, len(source)
    held_out = split(source.positions, config.validation_share, config.block_m, config.seed)
    block_names = blocks(source.positions, config.block_m)
    with _partial_folder(out, out.parent) as folder:
        start = time.monotonic()
        # Images and masks come first, then the index, then the other formats; the manifest, which names them all, last.
        written = _write_images(source, settings.jpeg_quality, folder, report)
        images_s = time.monotonic() - start
        images, masks, hashes = map(list, zip(*written, strict=True))
        columns: dict[str, Any] = {
            "id": np.arange(count),
            "file_name": source.names,
            "latitude": source.positions[:, 0],
            "longitude": source.positions[:, 1],
            "text": source.texts,
            "split": np.where(held_out, "validation", "train"),
            "block": block_names,
            "mask": [mask.path if mask else None for mask in masks],
            "sha256": hashes,
        }
        with files.replacing(folder / prepared.INDEX) as file:
            pq.write_table(pa.table(columns, schema=prepared.INDEX_SCHEMA), file)
        stored = {"files": Format(files=images, seconds=round(images_s, 3))}
        for name in formats[1:]:  # the first is `files`
            stored[name] = _write_format(name, settings, folder, folder, hashes, report)
        manifest = DatasetManifest(
            schema_version=prepared.SCHEMA_VERSION,
            producer=PRODUCER,
            pillow=PIL.__version__,
            jpeg_library=features.version("libjpeg_turbo") or features.version("jpg"),
            identity=_dataset_identity(source, bench),
            source=prepared.SourceInfo(kind=config.kind, root=config.root, identity=source.identity),
            inventory=source.inventory,
            resolution_px=config.resolution_px,
            jpeg_quality=settings.jpeg_quality,
            num_images=count,
            split=prepared.Split(
                block_m=config.block_m,
                share=config.validation_share,
                seed=config.seed,
                train=int((~held_out).sum()),
                validation=int(held_out.sum()),
                blocks=len(set(block_names)),
                validation_blocks=len(set(np.array(block_names)[held_out])),
            ),
            images_per_s=round(count / images_s, 1),
            index=Entry.of(folder, prepared.INDEX),
            masks=[mask for mask in masks if mask],
            formats=stored,
        )
        write_record(folder / prepared.MANIFEST, manifest)
        if out.is_dir():
            out.rmdir()  # raises unless it is empty
        folder.rename(out)
    files.fsync_path(out.parent)
    return manifest


def _write_format(
    name: str, settings: PrepareConfig, root: Path, target: Path, hashes: list[str], report: ReportProgress
) -> Format:
    writers: dict[str, prepared.Writer] = {
        "memmap": prepared.write_memmap,
        "hdf5": prepared.write_hdf5,
        "webdataset": partial(prepared.write_shards, shard_images=settings.shard_images),
    }
    start = time.monotonic()
    paths = writers[name](root, target, hashes, report)
    return Format(
        files=[Entry.of(target, path) for path in paths],
        seconds=round(time.monotonic() - start, 3),
        shard_images=settings.shard_images if name == "webdataset" else None,
    )


def _write_images(source: Source, quality: int, folder: Path, report: ReportProgress) -> list[_WrittenImage]:
    """Write every image and its own mask, with one process per core: drawing holds the interpreter lock."""
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    count = len(source)
    written: list[_WrittenImage] = []
    pool = ProcessPoolExecutor(
        min(len(os.sched_getaffinity(0)), count),
        mp_context=multiprocessing.get_context("fork"),  # the source is inherited, not pickled
        initializer=_init_worker,
        initargs=(os.getpid(), source, quality, folder),
    )
    try:
        with defer_signals():  # the first task forks all processes
            results = pool.map(_write_image, range(count), chunksize=CHUNK)
        for image in results:
            written.append(image)
            report("images", len(written), count)
    finally:
        pool.shutdown(cancel_futures=True)
    if not any(mask for _, mask, _ in written):
        (folder / "masks").rmdir()
    return written


_job: tuple[Source, int, Path]


def _init_worker(parent_pid: int, source: Source, quality: int, folder: Path) -> None:
    """Leave signals to the parent, and die with it: a pool's process would wait for its next task for ever."""
    global _job
    obey_parent()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before prctl took effect.
    if os.getppid() != parent_pid:
        os._exit(1)
    _job = source, quality, folder


def _write_image(index: int) -> _WrittenImage:
    source, quality, folder = _job
    encoded = io.BytesIO()
    Image.fromarray(source.pixels(index)).save(encoded, "JPEG", quality=quality, subsampling=0)  # 0: 4:4:4
    image = _write_file(folder, prepared.IMAGE_PATTERN.format(index), encoded.getvalue())
    own_mask, mask = source.own_mask(index), None
    if own_mask is not None:
        encoded_mask = io.BytesIO()
        Image.fromarray(own_mask * np.uint8(255)).save(encoded_mask, "PNG")
        mask = _write_file(folder, prepared.MASK_PATTERN.format(index), encoded_mask.getvalue())
    # JPEG is lossy: the hash covers the pixels as every reader will decode them.
    pixels = prepared.decode_jpeg(encoded.getvalue())
    return image, mask, hashlib.sha256(pixels.tobytes()).hexdigest()


def _write_file(folder: Path, path: str, content: bytes) -> Entry:
    (folder / path).write_bytes(content)
    return Entry(path=path, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@contextmanager
def _partial_folder(out: Path, parent: Path) -> Iterator[Path]:
    """Yield a hidden folder in `parent` to write in, and remove it when the block ends. Disk errors are UserErrors."""
    folder, lock_path = parent / f".{out.name}.partial", parent / f".{out.name}.lock"
    lock, free = FileLock(lock_path, blocking=False), 0
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        with lock:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                if isinstance(lock, UnixFileLock):  # not the kind that is used if the file system lacks flock
                    lock_path.unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{out}: another prepare is writing it") from None
    except OSError as error:
        if error.errno is None:  # not an error of the operating system
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"prepare.out={out}: cannot be written ({error.strerror}: {error.filename})") from None
        disk = next(folder for folder in (parent, *parent.parents) if folder.is_mount())
        raise UserError(
            f"prepare.out={out}: the disk {disk} is full ({error.strerror}); {free / 1e6:,.1f} MB were free before. "
            "No partial output is left; free some space or choose another prepare.out"
        ) from None
