"""Inpainting masks, 1 = repaint: strokes and boxes as in the training of SD 1.5 inpainting, or traces of a disaster.

Every kind is drawn in shares of the image's side, so that its coverage does not depend on the resolution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from inpaint_bench.data.source import Mask

from . import disaster, sd

FULL_MASK_SHARE = 0.25  # model card of stable-diffusion-inpainting: in 25 % of the steps everything is masked
# A mask of the given side, or one of WORK_PX: that bounds the cost, and latents are coarser anyway.
KINDS: dict[str, Callable[[int, np.random.Generator], Mask]] = {"sd": sd.draw, "disaster": disaster.draw}


def make_mask(side: int, seed: tuple[int, ...], kind: str = "sd", full_mask_share: float = FULL_MASK_SHARE) -> Mask:
    """Return a mask [side, side] uint8, the same for the same `seed` (non-negative integers).

    It is all ones with probability `full_mask_share`, and otherwise has both ones and zeros.
    """
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    if random.random() < full_mask_share:
        return np.ones((side, side), np.uint8)
    while True:  # a mask of only zeros or ones is rare, and is drawn again
        mask = resized(KINDS[kind](side, random), side)
        if mask.any() and not mask.all():
            return mask


def resized(mask: Mask, side: int) -> Mask:
    """Return a square mask resized to another side by nearest neighbour."""
    if len(mask) == side:
        return mask
    index = np.arange(side) * len(mask) // side
    return mask[index].take(index, axis=1)
