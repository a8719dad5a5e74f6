"""The copies of images/ in other formats: how each is written, and how the arrays are read.

A writer takes the folder that holds images/ and the folder to write into, and returns the paths it wrote.
Every image is compared with its hash in the index on the way.
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
from inpaint_bench.data import transform
from inpaint_bench.data.source import Pixels

from . import layout

CHUNK = 64  # images decoded ahead

Report = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
Writer = Callable[[Path, Path, list[str], Report], list[str]]


def write_memmap(root: Path, target: Path, hashes: list[str], report: Report) -> list[str]:
    with (target / layout.PIXELS_NPY).open("wb") as out:
        # Written, not mapped: a full disk is then an error, not a SIGBUS.
        for number, (_, pixels) in enumerate(_images(root, hashes, report, "memmap")):
            if number == 0:
                shape = {"descr": "|u1", "fortran_order": False, "shape": (len(hashes), *pixels.shape)}
                np.lib.format.write_array_header_1_0(out, shape)
            out.write(pixels.tobytes())
        _sync(out)
    return [layout.PIXELS_NPY]


def write_hdf5(root: Path, target: Path, hashes: list[str], report: Report) -> list[str]:
    import h5py

    # HDF5 writes into a file object of ours: its own driver loses the reason when the disk is full.
    with (target / layout.PIXELS_H5).open("w+b") as out:
        with h5py.File(out, "w", track_order=False) as file:
            for number, (_, pixels) in enumerate(_images(root, hashes, report, "hdf5")):
                if number == 0:
                    shape = (len(hashes), *pixels.shape)
                    data = file.create_dataset(layout.H5_DATASET, shape, "u1", chunks=(1, *pixels.shape))
                data.id.write_direct_chunk((number, 0, 0, 0), pixels.tobytes())
        _sync(out)
    return [layout.PIXELS_H5]


def write_shards(root: Path, target: Path, hashes: list[str], report: Report, shard_images: int) -> list[str]:
    (target / "shards").mkdir()
    paths = []
    images = enumerate(_images(root, hashes, report, "webdataset"))
    for number in range(math.ceil(len(hashes) / shard_images)):
        paths.append(layout.shard_name(number))
        with (target / paths[-1]).open("wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as shard:
                for index, (jpeg, _) in islice(images, shard_images):
                    member = tarfile.TarInfo(Path(layout.image_name(index)).name)
                    member.size, member.mode = len(jpeg), 0o444
                    shard.addfile(member, io.BytesIO(jpeg))
            _sync(out)
    return paths


def _images(root: Path, hashes: list[str], report: Report, doing: str) -> Iterator[tuple[bytes, Pixels]]:
    """Files of images/ and what they hold. Raises UserError naming one that is not as it was written."""

    def one(index: int) -> tuple[bytes, Pixels]:
        path = root / layout.image_name(index)
        try:
            jpeg = path.read_bytes()
            pixels = layout.decode(jpeg)
        except transform.DAMAGE as error:
            raise UserError(f"{path}: cannot be decoded ({error}); prepare the dataset again") from None
        if hashlib.sha256(pixels.tobytes()).hexdigest() != hashes[index]:
            raise UserError(f"{path}: other pixels than were prepared; prepare the dataset again")
        return jpeg, pixels

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="decode") as pool:
        for first in range(0, len(hashes), CHUNK):
            for index, image in enumerate(pool.map(one, range(first, min(first + CHUNK, len(hashes)))), first):
                report(doing, index + 1, len(hashes))
                yield image


def _sync(out: Any) -> None:
    out.flush()
    os.fsync(out.fileno())


class ArrayReader:
    """Images of `pixels.npy` or `pixels.h5`, opened by each process for itself when it first reads one.

    HDF5 handles do not survive a fork, and a map that the parent has touched counts as the parent's memory.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.path, self.shape = path, shape
        self._array: Any = None
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None, "_owner": 0}

    def __getitem__(self, index: int) -> Pixels:
        if self._owner != os.getpid():
            self._array, self._owner = self._open(), os.getpid()
        return np.asarray(self._array[index])

    def _open(self) -> Any:
        """Raises RuntimeError where the file is not what was written."""
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
