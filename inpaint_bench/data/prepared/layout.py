"""Layout of a prepared dataset on disk; `prepare` writes it, `PreparedSource` reads it.

prepared.json        the manifest: identity, source, inventory, split, files with size and SHA-256
index.parquet        one row per image, in the order of `id`
images/000000.jpg    JPEG 4:4:4; every other format holds the same images decoded (format `files`)
masks/000000.png     0 or 255; only of images whose metadata names a mask
pixels.npy           uint8 [N, R, R, 3], C order (format `memmap`)
pixels.h5            dataset `pixels`, the same, one image per chunk, uncompressed (format `hdf5`)
shards/000000.tar    members `<id>.jpg`, the bytes of images/ (format `webdataset`)
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import PREPARED
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
        pa.field("block", pa.string(), nullable=False),  # geographic block, see split.py
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
