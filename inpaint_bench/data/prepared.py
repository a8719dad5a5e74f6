"""Layout of a prepared dataset on disk; `prepare` writes it, `PreparedSource` reads it.

prepared.json        the manifest: identity, source, inventory, split, files with size and SHA-256
index.parquet        one row per image, in the order of `id`
images/000000.jpg    JPEG 4:4:4; every other format holds the same images decoded (format `files`)
masks/000000.png     0 or 255; only of images whose metadata names a mask
pixels.npy           uint8 [N, R, R, 3], C order (format `memmap`)
pixels.h5            dataset `pixels`, the same, one image per chunk, uncompressed (format `hdf5`)
shards/000000.tar    members `<id>.jpg`, the bytes of images/ (format `webdataset`)
"""

import hashlib
import io
import math
import os
import re
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from inpaint_bench.core.config.bench import PREPARED, BenchConfig, ModelConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import replacing
from inpaint_bench.core.records import read_record
from inpaint_bench.data import transform
from inpaint_bench.data.source import Inventory, Pixels

SCHEMA_VERSION = 2
MANIFEST = PREPARED
INDEX = "index.parquet"
IMAGE_PATTERN = "images/{:06d}.jpg"
MASK_PATTERN = "masks/{:06d}.png"
SHARD_PATTERN = "shards/{:06d}.tar"
PIXELS_NPY = "pixels.npy"
PIXELS_H5 = "pixels.h5"
H5_DATASET = "pixels"
FORMATS = ("files", "memmap", "hdf5", "webdataset")

INDEX_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("file_name", pa.string(), nullable=False),  # in the source
        pa.field("latitude", pa.float64(), nullable=False),  # degrees
        pa.field("longitude", pa.float64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),  # train or validation
        pa.field("block", pa.string(), nullable=False),  # geographic block, see source.py
        pa.field("mask", pa.string()),  # relative path of the image's own mask
        pa.field("sha256", pa.string(), nullable=False),  # hash of the decoded pixels, C order
    ]
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the dataset as it was written."""

    path: str  # relative to the dataset
    bytes: int
    sha256: str

    @classmethod
    def of(cls, root: Path, path: str) -> Self:
        """Return the entry of an existing file, all of which is read."""
        with (root / path).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
        return cls(path=path, bytes=(root / path).stat().st_size, sha256=digest.hexdigest())


class Format(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored format of the images."""

    files: list[Entry]
    seconds: float  # that writing took
    shard_images: int | None = None  # webdataset: images per tar file


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the dataset was made from."""

    kind: str
    root: str | None
    identity: str


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the split, and the images and blocks on each side."""

    block_m: float
    share: float
    seed: int
    train: int
    validation: int
    blocks: int
    validation_blocks: int


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of prepared.json."""

    schema_version: int
    producer: str
    pillow: str
    jpeg_library: str | None
    identity: str  # digest of everything that decides pixels and split
    source: SourceInfo
    inventory: Inventory
    resolution_px: int
    jpeg_quality: int
    num_images: int
    split: Split
    images_per_s: float
    index: Entry
    masks: list[Entry]
    formats: dict[str, Format]

    def settings(self) -> dict[str, float]:
        """Return the keys of `data` that must have these values if the dataset is read."""
        split = {"seed": self.split.seed, "block_m": self.split.block_m, "validation_share": self.split.share}
        return {"resolution_px": self.resolution_px, **split}


def decode_jpeg(content: bytes) -> Pixels:
    """Decode a file of images/ to [R, R, 3]. The only decoder, so that all formats hold the same pixels."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def read_manifest(root: Path) -> DatasetManifest | None:
    """Return the manifest, or None if there is none. Raises UserError if it is damaged or of another version."""
    path = root / MANIFEST
    try:
        manifest = read_record(path, DatasetManifest)
    # data.root names a file.
    except NotADirectoryError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{error}; prepare the dataset again") from None
    if manifest and manifest.schema_version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema version {manifest.schema_version}; this code reads {SCHEMA_VERSION}")
    return manifest


def list_entries(manifest: DatasetManifest, *formats: str) -> list[Entry]:
    """Return the index, the masks and the files of `formats` (default: of all formats), in this order."""
    names = formats or manifest.formats
    return [manifest.index, *manifest.masks, *(entry for name in names for entry in manifest.formats[name].files)]


def usage_overrides(root: Path, kind: str = "prepared") -> str:
    """Return the overrides that read the dataset, as they are typed in a shell."""
    text = str(root)
    # Hydra's own quotes: without them a comma makes a sweep.
    value = text if re.fullmatch(r"[\w./+@%-]+", text) else f"'{text.replace(chr(39), chr(92) + chr(39))}'"
    return shlex.join([f"data={kind}", f"data.root={value}"])


def find_damaged(root: Path, expected: Sequence[Entry]) -> list[str]:
    """Return a message for each file that is missing or of another size."""
    # Sizes only: to hash all files at every start would mean to read all data once more. `prepare --verify` does that.
    damaged = []
    for entry in expected:
        try:
            size = (root / entry.path).stat().st_size
        except OSError:
            damaged.append(f"{entry.path} is missing")
            continue
        if size != entry.bytes:
            damaged.append(f"{entry.path} has {size:,} bytes, {entry.bytes:,} were written")
    return damaged


def check_sizes(root: Path, expected: Sequence[Entry]) -> None:
    """Raise UserError naming the first files that are missing or of another size."""
    if damaged := find_damaged(root, expected):
        raise UserError(f"{root}: {len(damaged)} damaged files ({'; '.join(damaged[:3])}); prepare the dataset again")


# --- the formats made from images/ ---------------------------------------------------------------

# A writer takes the folder that holds images/ and the folder to write into, and returns the paths that it wrote. Every
# image is compared with its hash in the index on the way.
CHUNK = 64  # images decoded ahead

ReportProgress = Callable[[str, int, int], None]  # activity, done, total
Writer = Callable[[Path, Path, list[str], ReportProgress], list[str]]


def write_memmap(root: Path, target: Path, hashes: list[str], report: ReportProgress) -> list[str]:
    """Write pixels.npy."""
    with replacing(target / PIXELS_NPY) as out:
        # Written, not memory-mapped: a full disk is then an error, not a SIGBUS.
        for index, (_, pixels) in enumerate(_read_images(root, hashes, report, "memmap")):
            if index == 0:
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(hashes), *pixels.shape)}
                np.lib.format.write_array_header_1_0(out, header)
            out.write(pixels.tobytes())
    return [PIXELS_NPY]


def write_hdf5(root: Path, target: Path, hashes: list[str], report: ReportProgress) -> list[str]:
    """Write pixels.h5."""
    import h5py

    # HDF5 writes into a file object of ours: its own driver loses the reason when the disk is full.
    with replacing(target / PIXELS_H5) as out, h5py.File(out, "w", track_order=False) as file:
        for index, (_, pixels) in enumerate(_read_images(root, hashes, report, "hdf5")):
            if index == 0:
                shape = (len(hashes), *pixels.shape)
                data = file.create_dataset(H5_DATASET, shape, "u1", chunks=(1, *pixels.shape))
            # An image is one chunk, so it bypasses HDF5's chunk cache and filters.
            data.id.write_direct_chunk((index, 0, 0, 0), pixels.tobytes())
    return [PIXELS_H5]


def write_shards(root: Path, target: Path, hashes: list[str], report: ReportProgress, shard_images: int) -> list[str]:
    """Write shards/*.tar."""
    (target / "shards").mkdir()
    paths = []
    images = enumerate(_read_images(root, hashes, report, "webdataset"))
    for number in range(math.ceil(len(hashes) / shard_images)):
        paths.append(SHARD_PATTERN.format(number))
        with (
            replacing(target / paths[-1]) as out,
            tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as shard,
        ):
            for index, (jpeg, _) in islice(images, shard_images):
                # TarInfo's defaults have neither time nor owner, so that equal images give equal tars.
                member = tarfile.TarInfo(Path(IMAGE_PATTERN.format(index)).name)
                member.size, member.mode = len(jpeg), 0o444
                shard.addfile(member, io.BytesIO(jpeg))
    return paths


def _read_images(
    root: Path, hashes: list[str], report: ReportProgress, activity: str
) -> Iterator[tuple[bytes, Pixels]]:
    """Yield the files of images/ and their pixels. Raises UserError naming a file that has changed."""

    def read(index: int) -> tuple[bytes, Pixels]:
        path = root / IMAGE_PATTERN.format(index)
        try:
            jpeg = path.read_bytes()
            pixels = decode_jpeg(jpeg)
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
            if self.path.name == PIXELS_NPY:
                array: Any = np.load(self.path, mmap_mode="r")
            else:
                import h5py

                # No file locking: it fails on many read-only and parallel file systems.
                array = h5py.File(self.path, "r", locking=False)[H5_DATASET]
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(f"{self.path}: cannot be opened: {error}") from error
        if array.shape != self.shape or array.dtype != np.uint8:
            raise RuntimeError(f"{self.path}: holds {array.dtype} {array.shape}, not uint8 {self.shape}")
        return array


# --- caches of the frozen networks, as their cache.json has them; models/latent_cache.py has the arrays

CACHES = "cache"
DESCRIPTION = "cache.json"
VERSION = 2  # version of how the arrays are computed and named; part of the key


class CacheDescription(msgspec.Struct, kw_only=True):
    """What a cache was computed from, and how long that took."""

    producer: str
    key: str
    inputs: dict[str, Any]
    images: int
    encoding_s: float  # time for all images, without compilation
    device: str
    bytes: dict[str, int]  # by array
    networks: list[dict[str, Any]] = []  # settings that it was prepared with; earlier versions did not record them


def frozen_settings(model: ModelConfig) -> dict[str, Any] | None:
    """Return the settings of frozen networks with random weights; None if a folder, not loaded yet, has the weights."""
    names = ("dtype", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    return {name: getattr(model, name) for name in names} if model.weights is None else None


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


def check_caches(root: Path, inputs: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise UserError if no cache of the dataset at `root` has these inputs and frozen networks like the model's."""
    folder, settings = root / CACHES, frozen_settings(model)
    fitting = [cache for cache in _read_all(folder) if not _differences(cache, inputs)]
    if not fitting:
        raise UserError(describe_mismatch(folder, inputs))
    if settings and all(cache.networks and settings not in cache.networks for cache in fitting):
        known = [own for cache in fitting for own in cache.networks]
        others = ([name for name, value in settings.items() if own.get(name) != value] for own in known)
        nearest = ", ".join(f"model.{name}" for name in min(others, key=len))
        raise UserError(
            f"{folder}: no cache fits model={model.name}; the nearest was made with another {nearest}. "
            "`prepare ... prepare.caches=true` with these settings creates one"
        )


def describe_mismatch(folder: Path, inputs: Mapping[str, Any]) -> str:
    """Say that there is no cache for these inputs, and what differs from the most similar one."""
    caches = _read_all(folder)
    if not caches:
        return (
            f"{folder}: no cache of the frozen networks; `prepare ... prepare.caches=true` with this model creates one"
        )
    nearest = min(caches, key=lambda cache: len(_differences(cache, inputs)))
    parts = [f"{name} {nearest.inputs.get(name)}, here {inputs[name]}" for name in _differences(nearest, inputs)]
    made = f"with {'; '.join(parts)}" if nearest.inputs.get("version") == inputs["version"] else "by an earlier version"
    return (
        f"{folder}: no cache fits; the nearest, {nearest.key}, was made {made}. "
        "`prepare ... prepare.caches=true` with these settings creates one"
    )


def _read_all(folder: Path) -> list[CacheDescription]:
    descriptions = [read_description(path.parent) for path in sorted(folder.glob(f"*/{DESCRIPTION}"))]
    return [cache for cache in descriptions if cache]


def _differences(cache: CacheDescription, inputs: Mapping[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if cache.inputs.get(name) != value]
