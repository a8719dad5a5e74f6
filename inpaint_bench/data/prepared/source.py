"""A dataset that `prepare` wrote, read in one of its formats; see layout.py for its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.data import transform
from inpaint_bench.data.source import Mask, Pixels, Source

from . import layout
from .formats import ArrayReader
from .layout import DatasetManifest, Entry
from .staging import stage

_ARRAYS = {"memmap": layout.PIXELS_NPY, "hdf5": layout.PIXELS_H5}


class PreparedSource(Source):
    """Images, positions, texts, masks and split of a prepared dataset."""

    def __init__(self, config: DataConfig, format: str = "files", stage_to: str = "none") -> None:
        """Check the manifest, the index and the sizes of the files of `format`, and stage them.

        Raises UserError for a folder that `prepare` did not write, a format that is missing, damage that sizes and
        the index's hash show, and settings that are not the dataset's.
        """
        root, manifest = check_prepared(config, format)
        # `images` are the masks and the files of the format: what is read again and again, and therefore staged.
        _, *images = layout.list_entries(manifest, format)
        staged = stage(root, images, stage_to) if stage_to != "none" else None  # the index is read only once
        self.root, self.manifest, self.format = root, manifest, format
        self.identity = manifest.identity
        self.resolution_px = manifest.resolution_px
        self.inventory = manifest.inventory
        index = read_index(root, manifest)
        self.names: list[str] = index["file_name"].to_pylist()
        self.texts: list[str] = index["text"].to_pylist()
        self.positions = np.stack([index["latitude"].to_numpy(), index["longitude"].to_numpy()], axis=1)
        self.validation = np.array(index["split"].to_pylist()) == "validation"
        self._masks: list[str | None] = index["mask"].to_pylist()
        self._staged = staged
        self.staging: dict[str, Any] = staged.facts if staged else {"effective": "none"}  # for the run's manifest
        self._read_root = staged.root if staged else root  # root of the masks and of the files of `format`
        shape = (len(self.names), self.resolution_px, self.resolution_px, 3)
        array = ArrayReader(self._read_root / _ARRAYS[format], shape) if format in _ARRAYS else None
        self._pixels: Callable[[int], Pixels] = array.__getitem__ if array else self._decode

    def pixels(self, index: int) -> Pixels:
        """Return an image, the same in every format. Format `webdataset` reads images/: tars have no random access."""
        return self._pixels(index)

    def jpeg(self, index: int) -> bytes:
        """Return the encoded image."""
        return self.path(index).read_bytes()

    def path(self, index: int) -> Path:
        """Return the file in images/ that `jpeg` reads; staged with format `files`."""
        return (self._read_root if self.format == "files" else self.root) / layout.IMAGE_PATTERN.format(index)

    def own_mask(self, index: int) -> Mask | None:
        name = self._masks[index]
        if name is None:
            return None
        path = self._read_root / name
        with transform.naming(path), Image.open(path) as mask:
            return (np.asarray(mask) > 127).astype(np.uint8)

    def shards(self, indices: npt.NDArray[np.int64]) -> list[Path]:
        """Return the tar files of format `webdataset` that hold at least one image of `indices`."""
        written = self.manifest.formats["webdataset"]
        numbers = np.unique(indices // (written.shard_images or len(self)))
        return [self._read_root / written.files[number].path for number in numbers]

    def close(self) -> None:
        if self._staged:
            self._staged.close()

    def _decode(self, index: int) -> Pixels:
        with transform.naming(self.path(index)):
            return layout.decode_jpeg(self.jpeg(index))


def check_prepared(config: DataConfig, format: str) -> tuple[Path, DatasetManifest]:
    """Return `data.root` and its manifest. Raises UserError as `PreparedSource` does."""
    root = expand_path(config.root or "")
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "no such folder"
        raise UserError(f"data.root={root}: {what}")
    manifest = layout.read_manifest(root)
    if manifest is None:
        raise UserError(
            f"data.root={root}: has no {layout.MANIFEST}, so `prepare` did not write it; "
            "photographs are read with data=folder"
        )
    _check_settings(config, manifest)
    if format not in manifest.formats:
        raise UserError(
            f"recipe.format={format}: {root} was prepared as {', '.join(manifest.formats)}; this adds it: "
            f"inpaint-bench prepare {layout.usage_overrides(root)} prepare.formats=[{format}]"
        )
    layout.check_sizes(root, layout.list_entries(manifest, format))
    return root, manifest


def _check_settings(config: DataConfig, manifest: DatasetManifest) -> None:
    """Raise UserError if the configuration differs from the dataset: results are filed under the configuration."""
    # data.num_images=null accepts as many images as were prepared.
    prepared = manifest.settings() | ({"num_images": manifest.num_images} if config.num_images else {})
    wrong = {name: value for name, value in prepared.items() if getattr(config, name) != value}
    if wrong:
        differences = ", ".join(f"data.{n}={getattr(config, n):g} (prepared: {wrong[n]:g})" for n in wrong)
        keys = " and ".join(f"data.{name}" for name in wrong)
        raise UserError(
            f"data.root={config.root}: not what was prepared: {differences}; leave out {keys}, which data=prepared "
            "takes from the dataset, or prepare another one"
        )


def read_index(root: Path, manifest: DatasetManifest) -> pa.Table:
    """Return the index. Raises UserError if it is not, to the bit, the one that was written."""
    path = root / layout.INDEX
    if Entry.of(root, layout.INDEX) != manifest.index:
        raise UserError(f"{path}: not as it was written (other content); prepare the dataset again")
    if (index := pq.read_table(path)).num_rows != manifest.num_images:
        problem = f"says {manifest.num_images} images, {layout.INDEX} has {index.num_rows}"
        raise UserError(f"{root / layout.MANIFEST}: {problem}; prepare the dataset again")
    return index
