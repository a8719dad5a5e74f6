"""Images to restore, and their masks. Unlike in training an image without a position is used too.

Images are cropped and resized as in training (data/transform.py), and read one at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import SkippedImage
from inpaint_bench.data import geotags, transform
from inpaint_bench.data.folder import SUFFIXES, check_row, list_images, rows_without_image, skipped_image
from inpaint_bench.data.geotags import MetadataRow, PositionError
from inpaint_bench.data.masks import make_mask
from inpaint_bench.data.source import Mask, Pixels
from inpaint_bench.data.transform import UnusableImageError


@dataclass(frozen=True, kw_only=True)
class RestoreInput:
    """An image to restore."""

    name: str  # relative to the folder
    pixels: Pixels  # [R, R, 3]
    mask: Mask  # [R, R], 1 = repaint
    mask_from: str  # its file, or the kind that was generated
    position: tuple[float, float] | None  # latitude, longitude in degrees
    position_from: str  # "metadata", "EXIF", or why there is none
    text: str


def image_seed(seed: int, name: str) -> int:
    """Return a seed that depends on the image's name, not on the other images of its folder."""
    return int(np.random.SeedSequence((seed, zlib.crc32(name.encode()))).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class RestoreFolder:
    """The images below `root` in alphabetical order, without hidden files and the metadata's masks.

    The mask is the file of the same name in `masks` where that is given (with any known suffix), else the one that
    the metadata names, else one of `mask_kind`, generated from `seed` and the image's name.
    """

    root: Path
    masks: Path | None
    mask_kind: str
    seed: int
    resolution_px: int
    names: list[str]
    rows: dict[str, MetadataRow]

    @classmethod
    def open(cls, root: Path, masks: Path | None, mask_kind: str, seed: int, resolution_px: int) -> RestoreFolder:
        """List the images. Raises UserError where a folder is missing or empty, or its metadata cannot be read."""
        for folder in (root, masks):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{folder}: no such folder")
        rows = geotags.read_metadata(root) or {}
        metadata_masks = {row.mask for row in rows.values()}
        names = [name for name in _image_names(root, masks) if name not in metadata_masks]
        if not names:
            raise UserError(f"{root}: no image in it ({', '.join(SUFFIXES)})")
        return cls(
            root=root, masks=masks, mask_kind=mask_kind, seed=seed, resolution_px=resolution_px, names=names, rows=rows
        )

    def __iter__(self) -> Iterator[RestoreInput | SkippedImage]:
        for name in self.names:
            try:
                yield self._read(name)
            except transform.DECODE_ERRORS as error:
                yield skipped_image(name, error)
        yield from rows_without_image(self.root, self.rows, set(self.names))

    def _read(self, name: str) -> RestoreInput:
        row = self.rows.get(name, MetadataRow())
        check_row(name, row)
        with Image.open(self.root / name) as image:
            upright = transform.upright(image)
            position, position_from = _position(row, image)
        mask, mask_from = self._mask(name, row, upright.size)
        return RestoreInput(
            name=name,
            pixels=transform.center_square(upright, self.resolution_px),
            mask=mask,
            mask_from=mask_from,
            position=position,
            position_from=position_from,
            text=row.text,
        )

    def _mask(self, name: str, row: MetadataRow, size: tuple[int, int]) -> tuple[Mask, str]:
        if self.masks is not None:
            named = self.masks / name
            candidates = (named, *(named.with_suffix(suffix) for suffix in SUFFIXES))
            path = next((path for path in candidates if path.is_file()), named)
        elif row.mask is not None:
            path = self.root / row.mask
        else:
            seed = (image_seed(self.seed, name),)
            return make_mask(
                self.resolution_px, seed, self.mask_kind, full_mask_share=0
            ), f"generated: {self.mask_kind}"
        if not path.is_file():
            raise UnusableImageError(f"no mask {path}")
        try:
            with Image.open(path) as mask:
                return transform.center_square_mask(mask, size, self.resolution_px), str(path)
        except UnusableImageError:
            raise
        except transform.DECODE_ERRORS as error:
            raise UnusableImageError(f"its mask {path} cannot be read ({error})") from None


def _position(row: MetadataRow, image: Image.Image) -> tuple[tuple[float, float] | None, str]:
    try:
        if row.has_position:
            return geotags.position_from_row(row), "metadata"
        return geotags.position_from_exif(image), "EXIF"
    except PositionError as error:
        return None, str(error)


def _image_names(root: Path, masks: Path | None) -> Iterator[str]:
    """Yield relative names, without the images in the folder of masks."""
    for path in list_images(root):
        if masks is None or masks == root or masks not in path.parents:
            yield path.relative_to(root).as_posix()
