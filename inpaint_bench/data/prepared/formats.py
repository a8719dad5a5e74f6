"""The formats made from images/: how each is written, and how the arrays are read.

A writer takes the folder that holds images/ and the folder to write into, and returns the paths that it wrote. Every
image is compared with its hash in the index on the way.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing
from inpaint_bench.data import transform
from inpaint_bench.data.source import Pixels

from . import layout

CHUNK = 64  # images decoded ahead

ReportProgress = Callable[[str, int, int], None]  # activity, done, total
Writer = Callable[[Path, Path, list[str], ReportProgress], list[str]]


def write_memmap(root: Path, target: Path, hashes: list[str], report: ReportProgress) -> list[str]:
    """Write pixels.npy."""
    with replacing(target / layout.PIXELS_NPY) as out:
        # Written, not memory-mapped: a full disk is then an error, not a SIGBUS.
        for index, (_, pixels) in enumerate(_read_images(root, hashes, report, "memmap")):
            if index == 0:
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(hashes), *pixels.shape)}
                np.lib.format.write_array_header_1_0(out, header)
            out.write(pixels.tobytes())
    return [layout.PIXELS_NPY]


def write_hdf5(root: Path, target: Path, hashes: list[str], report: ReportProgress) -> list[str]:
    """Write pixels.h5."""
    import h5py

    # HDF5 writes into a file object of ours: its own driver loses the reason when the disk is full.
    with replacing(target / layout.PIXELS_H5) as out, h5py.File(out, "w", track_order=False) as file:
        for index, (_, pixels) in enumerate(_read_images(root, hashes, report, "hdf5")):
            if index == 0:
                shape = (len(hashes), *pixels.shape)
                data = file.create_dataset(layout.H5_DATASET, shape, "u1", chunks=(1, *pixels.shape))
            # An image is one chunk, so it bypasses HDF5's chunk cache and filters.
            data.id.write_direct_chunk((index, 0, 0, 0), pixels.tobytes())
    return [layout.PIXELS_H5]


def write_shards(root: Path, target: Path, hashes: list[str], report: ReportProgress, shard_images: int) -> list[str]:
    """Write shards/*.tar."""
    (target / "shards").mkdir()
    paths = []
    images = enumerate(_read_images(root, hashes, report, "webdataset"))
    for number in range(math.ceil(len(hashes) / shard_images)):
        paths.append(layout.SHARD_PATTERN.format(number))
        with (
            replacing(target / paths[-1]) as out,
            tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as shard,
        ):
            for index, (jpeg, _) in islice(images, shard_images):
                # TarInfo's defaults have neither time nor owner, so that equal images give equal tars.
                member = tarfile.TarInfo(Path(layout.IMAGE_PATTERN.format(index)).name)
                member.size, member.mode = len(jpeg), 0o444
                shard.addfile(member, io.BytesIO(jpeg))
    return paths


def _read_images(
    root: Path, hashes: list[str], report: ReportProgress, activity: str
) -> Iterator[tuple[bytes, Pixels]]:
    """Yield the files of images/ and their pixels. Raises UserError naming a file that has changed."""

    def read(index: int) -> tuple[bytes, Pixels]:
        path = root / layout.IMAGE_PATTERN.format(index)
        try:
            jpeg = path.read_bytes()
            pixels = layout.decode_jpeg(jpeg)
        except transform.DECODE_ERRORS as error:
            raise UserError(f"{path}: cannot be decoded ({error}); prepare the dataset again") from None
        if hashlib.sha256(pixels.tobytes()).hexdigest() != hashes[index]:
            raise UserError(f"{path}: other pixels than were prepared; prepare the dataset again")
        return jpeg, pixels

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="decode") as pool:
        # In chunks: one map over all images would hold every decoded image that is not written yet in memory.
        for first in range(0, len(hashes), CHUNK):
            for index, image in enumerate(pool.map(read, range(first, min(first + CHUNK, len(hashes)))), first):
                report(activity, index + 1, len(hashes))
                yield image


class ArrayReader:
    """Images of pixels.npy or pixels.h5; each process opens the file itself when it first reads an image.

    HDF5 handles do not survive a fork, and a memory map that the parent has touched counts as the parent's memory.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape
        self._array: Any = None
        self._owner_pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_owner_pid": 0}  # an open h5py dataset cannot be pickled

    def __getitem__(self, index: int) -> Pixels:
        if self._owner_pid != os.getpid():
            self._array, self._owner_pid = self._open(), os.getpid()
        return np.asarray(self._array[index])

    def _open(self) -> Any:
        """Raise RuntimeError if the file does not hold what was written."""
        try:
            if self.path.name == layout.PIXELS_NPY:
                array: Any = np.load(self.path, mmap_mode="r")
            else:
                import h5py

                # No file locking: it fails on many read-only and parallel file systems.
                array = h5py.File(self.path, "r", locking=False)[layout.H5_DATASET]
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(f"{self.path}: cannot be opened: {error}") from error
        if array.shape != self.shape or array.dtype != np.uint8:
            raise RuntimeError(f"{self.path}: holds {array.dtype} {array.shape}, not uint8 {self.shape}")
        return array
