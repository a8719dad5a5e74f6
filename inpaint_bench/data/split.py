"""Train/validation split by whole geographic blocks, so that no house is seen from both sides of the split.

Two images at either side of a block's edge may still show the same house; a larger block makes that rarer.
"""

from __future__ import annotations

import hashlib
import logging

import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.errors import UserError

from .source import Source

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
