"""Masks are drawn at no more than 256 px and enlarged: that bounds their cost, and latents are coarser anyway."""

from __future__ import annotations

import numpy as np

from inpaint_bench.data.source import Mask

WORK_PX = 256


def resized(mask: Mask, side: int) -> Mask:
    """Return a square mask resized to another side by nearest neighbour."""
    if mask.shape[0] == side:
        return mask
    index = np.arange(side) * mask.shape[0] // side
    return mask[index].take(index, axis=1)
