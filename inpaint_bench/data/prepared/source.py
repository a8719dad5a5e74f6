"""A dataset that `prepare` wrote, read in one of its formats; see layout.py for what lies where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from inpaint_bench.core.config import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data import transform
from inpaint_bench.data.source import Account, Mask, Pixels

from . import layout
from .formats import ArrayReader
from .layout import Entry
from .staging import Staged, stage

_ARRAYS = {"memmap": layout.PIXELS_NPY, "hdf5": layout.PIXELS_H5}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar file with the images first <= id < end."""

    path: Path
    first: int
    end: int


class PreparedSource:
    """Images, positions, texts, masks and split of a prepared dataset; see `open`."""

    def __init__(self, root: Path, manifest: dict[str, Any], format: str, staged: Staged | None) -> None:
        self.root, self.manifest, self.format = root, manifest, format
        self.identity = str(manifest["identity"])
        self.resolution_px = int(manifest["resolution_px"])
        self.account = Account.from_dict(manifest["account"])
        index = read_index(root, manifest)
        self.names: list[str] = index["file_name"].to_pylist()
        self.texts: list[str] = index["text"].to_pylist()
        self.positions = np.stack([index["latitude"].to_numpy(), index["longitude"].to_numpy()], axis=1)
        self.validation = np.array(index["split"].to_pylist()) == "validation"  # bool [N]
        self._masks: list[str | None] = index["mask"].to_pylist()
        self._staged = staged
        self._near = staged.root if staged else root  # where the files of `format` and the masks are
        shape = (len(self.names), self.resolution_px, self.resolution_px, 3)
        array = ArrayReader(self._near / _ARRAYS[format], shape) if format in _ARRAYS else None
        self._pixels: Callable[[int], Pixels] = array.__getitem__ if array else self._decode

    @classmethod
    def open(cls, config: DataConfig, format: str = "files", stage_to: str = "none") -> PreparedSource:
        """Check the manifest, the index and the sizes of the files of `format`, and stage them.

        Raises UserError for a folder that `prepare` did not write, a format it did not write, damage that
        sizes and the index's hash show, and settings that are not those of the dataset.
        """
        root = Path(config.root or "")
        if not root.is_dir():
            raise UserError(f"data.root={root}: no such folder")
        manifest = layout.read_manifest(root)
        if manifest is None:
            raise UserError(
                f"data.root={root}: has no {layout.MANIFEST}, so `prepare` did not write it; "
                "photographs are read with data=folder"
            )
        _check_settings(config, manifest)
        if format not in manifest["formats"]:
            raise UserError(
                f"recipe.format={format}: {root} was prepared as {', '.join(manifest['formats'])}; this adds it: "
                f"inpaint-bench prepare {layout.how_to_use(root, manifest)} prepare.formats=[{format}]"
            )
        needed = layout.entries(manifest, format)
        layout.check_sizes(root, needed)
        staged = stage(root, needed[1:], stage_to) if stage_to != "none" else None  # the index is read once, here
        return cls(root, manifest, format, staged)

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int) -> Pixels:
        """The same in every format. With `webdataset`, whose tars have no order to jump in, from images/."""
        return self._pixels(index)

    def jpeg(self, index: int) -> bytes:
        """The encoded image, as in images/; staged with format `files`. Raises RuntimeError where it is gone."""
        path = self.path(index)
        try:
            return path.read_bytes()
        except OSError as error:
            raise RuntimeError(f"{path}: was there when the run began, now: {error}") from error

    def path(self, index: int) -> Path:
        """Where `jpeg` reads."""
        return (self._near if self.format == "files" else self.root) / layout.image_name(index)

    def own_mask(self, index: int) -> Mask | None:
        name = self._masks[index]
        if name is None:
            return None
        try:
            with Image.open(self._near / name) as mask:
                return (np.asarray(mask) > 127).astype(np.uint8)
        except transform.DAMAGE as error:
            raise RuntimeError(f"{self._near / name}: was readable when it was prepared, now: {error}") from error

    def shards(self) -> list[Shard]:
        """The tar files of format `webdataset`, staged where the source is."""
        written = self.manifest["formats"]["webdataset"]
        size = int(written["shard_images"])
        return [
            Shard(path=self._near / entry["path"], first=number * size, end=min((number + 1) * size, len(self)))
            for number, entry in enumerate(written["files"])
        ]

    @property
    def staging(self) -> dict[str, Any]:
        """What staging did and took, for the run's manifest; empty where nothing is staged."""
        return self._staged.facts.as_dict() if self._staged else {}

    @property
    def stage_in_effect(self) -> str:
        return self._staged.facts.where if self._staged else "none"

    def close(self) -> None:
        if self._staged:
            self._staged.close()

    def _decode(self, index: int) -> Pixels:
        jpeg = self.jpeg(index)
        try:
            return layout.decode(jpeg)
        except transform.DAMAGE as error:
            raise RuntimeError(f"{self.root / layout.image_name(index)}: cannot be decoded: {error}") from error


def _check_settings(config: DataConfig, manifest: dict[str, Any]) -> None:
    """What the configuration says of the data must be true of it: results are filed under the configuration."""
    written = manifest["split"]
    facts = {
        "resolution_px": (config.resolution_px, manifest["resolution_px"]),
        "num_images": (config.num_images or manifest["num_images"], manifest["num_images"]),
        "seed": (config.seed, written["seed"]),
        "validation_share": (config.validation_share, written["share"]),
        "block_m": (config.block_m, written["block_m"]),
    }
    wrong = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
    if wrong:
        said = ", ".join(f"data.{name}={asked:g} (prepared: {have:g})" for name, (asked, have) in wrong.items())
        right = " ".join(f"data.{name}={have:g}" for name, (_, have) in wrong.items())
        raise UserError(f"data.root={config.root}: not what was prepared: {said}; set {right}, or prepare it anew")


def read_index(root: Path, manifest: dict[str, Any]) -> pa.Table:
    """Raises UserError for an index that is not, to the bit, the one that was written."""
    path = root / layout.INDEX
    if Entry.of(root, layout.INDEX) != Entry(**manifest["index"]):
        raise UserError(f"{path}: not as it was written (other content); prepare the dataset again")
    try:
        table = pq.read_table(path)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        raise UserError(f"{path}: cannot be read ({error}); prepare the dataset again") from None
    if table.schema.names != layout.INDEX_SCHEMA.names or len(table) != manifest["num_images"]:
        raise UserError(f"{path}: does not fit {layout.MANIFEST}; prepare the dataset again")
    return table
