"""The protocol of an image source, and its split into training and validation by whole geographic blocks."""

import hashlib
import logging
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import DataFacts, SkippedImage, to_record

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]
Mask = npt.NDArray[np.uint8]  # [H, W], 0 keep, 1 repaint


def unwrap(longitude: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return longitudes within 180 degrees of their circular mean: both sides of the 180th meridian are one area."""
    mean = np.degrees(np.angle(np.exp(1j * np.radians(longitude)).mean()))
    return longitude + 360 * np.rint((mean - longitude) / 360)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Images found, used and skipped; `found == used + len(skipped) + beyond_limit`."""

    kind: str
    found: int
    used: int
    beyond_limit: int = 0  # not read: data.num_images was reached before
    skipped: list[SkippedImage] = []


class Source:
    """Images by index, all checked when the source was opened."""

    inventory: Inventory
    identity: str  # hex digest of everything that decides images, positions, texts and masks, except the resolution
    resolution_px: int
    positions: npt.NDArray[np.float64]  # [N, 2]: latitude, longitude in degrees
    texts: list[str]  # [N], "" if there is none
    names: list[str]  # [N], file names for messages
    validation: npt.NDArray[np.bool_] | None = None  # [N], True where held out; None: not split yet

    @property
    def centre(self) -> tuple[float, float]:
        """Return latitude and longitude in the middle: medians, because a few wrong positions would move means far."""
        latitude, longitude = np.median(self.positions[:, 0]), np.median(unwrap(self.positions[:, 1]))
        return float(latitude), float(longitude - 360 * np.rint(longitude / 360))

    def facts(self, root: str | None, **more: Any) -> DataFacts:
        """Return what the manifest says of the images."""
        inventory = msgspec.to_builtins(self.inventory)
        return to_record({**inventory, "root": root, "identity": self.identity, **more}, DataFacts)

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int) -> Pixels:
        """Return [resolution, resolution, 3]. Raises RuntimeError naming a file that became unreadable."""
        raise NotImplementedError

    def own_mask(self, index: int) -> Mask | None:
        """Return the mask [resolution, resolution] that the data itself gives this image, or None."""
        return None

    def close(self) -> None:
        """Release what was opened or staged. May be called again."""


# --- split ---------------------------------------------------------------------------------------

# By whole blocks, so that no house is seen from both sides of the split. Two images at either side of a block's edge
# may still show the same house; a larger block makes that rarer.
METRES_PER_DEGREE = 111_320.0  # metres per degree of latitude, within 0.6 % everywhere

Indices = npt.NDArray[np.int64]

log = logging.getLogger(__name__)


def open_split(source: Source, config: DataConfig, *, required: bool = False) -> tuple[Indices, Indices]:
    """Return the indices for training and for validation, ascending; of prepared data, its stored split.

    Raises UserError if a split is `required` and there is none, because all images lie in one block.
    """
    held_out = source.validation
    if held_out is None:
        held_out = split(source.positions, config.validation_share, config.block_m, config.seed)
    if required and not held_out.any():
        refuse_unsplit(len(held_out), config)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def refuse_unsplit(count: int, config: DataConfig) -> None:
    """Raise UserError because none of `count` images is held out, unless the configuration holds out none."""
    if config.validation_share:
        where = " in `prepare`" if config.kind == "prepared" else ""
        raise UserError(
            "workload.validate_every and workload.sample_images need images that are held out, and none is: "
            f"{_one_block(count, config.block_m)}{where}. Or leave out both keys"
        )


def _one_block(count: int, block_m: float) -> str:
    images = "the only image lies" if count == 1 else f"all {count:,} images lie"
    return f"{images} in one geographic block of data.block_m={block_m:g}; a smaller one may split them"


def split(positions: npt.NDArray[np.float64], share: float, block_m: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return [N], True where held out: whole blocks in seeded order, until `share` of the images is reached.

    One block always stays for training, so few blocks may give less than `share`, and large ones more. A block's place
    in the order depends on its name and the seed alone. Where all images lie in one block, none is held out, with a
    warning.
    """
    held_out = np.zeros(len(positions), np.bool_)
    if share == 0:
        return held_out
    names, block_of_image = np.unique(blocks(positions, block_m), return_inverse=True)
    if len(names) == 1:
        log.warning("no validation split: %s", _one_block(len(positions), block_m))
        return held_out
    # By hash and not by a shuffle: images in new blocks leave the order of the other blocks as it was.
    order = sorted(range(len(names)), key=lambda block: hashlib.sha256(f"{seed}/{names[block]}".encode()).digest())
    for block in order[:-1]:
        held_out |= block_of_image == block
        if held_out.sum() >= share * len(positions):
            break
    return held_out


def blocks(positions: npt.NDArray[np.float64], block_m: float) -> list[str]:
    """Return the square of `block_m` metres of each position [N, 2] (degrees), as `row:column`.

    Rows count from the equator, columns from the zero meridian along the row's middle: a position's block does not
    depend on the other positions. The last columns to the east and to the west are one, over the 180th meridian.
    """
    rows = np.floor(positions[:, 0] * METRES_PER_DEGREE / block_m)
    # The cosine of the row's middle, not of the position itself: all columns of a row are equally wide.
    middle = np.clip((rows + 0.5) * block_m / METRES_PER_DEGREE, -90, 90)
    columns_per_degree = METRES_PER_DEGREE * np.cos(np.radians(middle)) / block_m
    columns = np.floor(positions[:, 1] * columns_per_degree)
    last = np.floor(180 * columns_per_degree - 1)  # it reaches a block's width or more to either side
    columns = np.where((columns < -last) | (columns > last), last, columns)
    return [f"{int(row)}:{int(column)}" for row, column in zip(rows, columns, strict=True)]
