"""What a prepared dataset looks like on disk; `prepare` writes it, `PreparedSource` reads it.

prepared.json        the manifest: identity, source, account, split, files with bytes and SHA-256
index.parquet        one row per image, in the order of `id`
images/000000.jpg    JPEG 4:4:4; what every other format holds decoded (format `files`)
masks/000000.png     0 or 255; only of images whose metadata names a mask
pixels.npy           uint8 [N, R, R, 3], C order (format `memmap`)
pixels.h5            dataset `pixels`, the same, one image per chunk, uncompressed (format `hdf5`)
shards/000000.tar    members `<id>.jpg`, the bytes of images/ (format `webdataset`)
"""

from __future__ import annotations

import hashlib
import io
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from inpaint_bench.core import files
from inpaint_bench.core.config import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.source import Pixels

SCHEMA_VERSION = 1
MANIFEST = "prepared.json"
INDEX = "index.parquet"
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
        pa.field("block", pa.string(), nullable=False),  # square of ground, see split.py
        pa.field("mask", pa.string()),  # relative path of the image's own mask
        pa.field("sha256", pa.string(), nullable=False),  # of the decoded pixels, C order
    ]
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file of the dataset as it was written."""

    path: str  # relative to the dataset
    bytes: int
    sha256: str

    @classmethod
    def of(cls, root: Path, path: str) -> Entry:
        """Reads the whole file."""
        with (root / path).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
        return cls(path=path, bytes=(root / path).stat().st_size, sha256=digest.hexdigest())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def image_name(index: int) -> str:
    return f"images/{index:06d}.jpg"


def mask_name(index: int) -> str:
    return f"masks/{index:06d}.png"


def shard_name(number: int) -> str:
    return f"shards/{number:06d}.tar"


def decode(jpeg: bytes) -> Pixels:
    """The one way from a file of images/ to pixels [R, R, 3]: all formats agree because all went through it."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("RGB"))


def read_manifest(root: Path) -> dict[str, Any] | None:
    """None where there is none. Raises UserError for one that is damaged or of another version."""
    try:
        manifest = files.read_json(root / MANIFEST)
    except NotADirectoryError:
        return None
    except OSError as error:
        raise UserError(f"{root / MANIFEST}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{error}; prepare the dataset again") from None
    if manifest is None:
        return None
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{root / MANIFEST}: schema version {version}; this code reads {SCHEMA_VERSION}")
    return dict(manifest)


def entries(manifest: dict[str, Any], *formats: str) -> list[Entry]:
    """The index, the masks and the files of `formats` (all that there are where none is named)."""
    chosen = formats or tuple(manifest["formats"])
    listed = [
        manifest["index"],
        *manifest["masks"],
        *(e for name in chosen for e in manifest["formats"][name]["files"]),
    ]
    return [Entry(**one) for one in listed]


def how_to_use(root: Path, manifest: dict[str, Any]) -> str:
    """The overrides that read the dataset; settings that differ from DataConfig's must be said."""
    have = {"resolution_px": manifest["resolution_px"], **{k: manifest["split"][k] for k in ("seed", "block_m")}}
    have["validation_share"] = manifest["split"]["share"]
    defaults = {spec.name: spec.default for spec in fields(DataConfig)}
    words = [f"data.{name}={value:g}" for name, value in have.items() if value != defaults[name]]
    return shlex.join(["data=prepared", f"data.root={root}", *words])


def check_sizes(root: Path, expected: list[Entry]) -> None:
    """Raises UserError naming the first files that are missing or of another size."""
    wrong = []
    for entry in expected:
        try:
            size = (root / entry.path).stat().st_size
        except OSError:
            wrong.append(f"{entry.path} is missing")
            continue
        if size != entry.bytes:
            wrong.append(f"{entry.path} has {size:,} bytes, {entry.bytes:,} were written")
    if wrong:
        raise UserError(f"{root}: {len(wrong)} damaged files ({'; '.join(wrong[:3])}); prepare the dataset again")
