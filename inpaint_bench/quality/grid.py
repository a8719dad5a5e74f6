"""Images side by side: original, masked, restored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from inpaint_bench.core.files import replacing

COLUMNS = ("original", "masked", "restored")
CELL_PX, GAP_PX, TEXT_PX = 256, 6, 16
MASK_GREY = 127  # what the network sees under the mask


def to_pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """[3, R, R] in -1..1 -> [R, R, 3]."""
    array: npt.NDArray[np.uint8] = ((image.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).byte().numpy()
    return array.transpose(1, 2, 0)


def write(
    path: Path, originals: Tensor, masks: Tensor, restored: Tensor, names: Sequence[str] = (), rows: int = 8
) -> None:
    """Write a PNG of the first `rows` of [N, 3, R, R] (-1..1) and [N, 1, R, R] (1 = repainted), `names` below each.

    A cell is as large as its image, 256 px at most. Raises ValueError where there is no image.
    """
    count = min(rows, len(originals))
    if not count:
        raise ValueError("a grid needs an image")
    side = min(CELL_PX, originals.shape[-1])
    column_px, row_px = side + GAP_PX, side + GAP_PX + (TEXT_PX + 4 if names else 0)
    header_px = TEXT_PX + 8
    sheet = Image.new("RGB", (len(COLUMNS) * column_px + GAP_PX, header_px + count * row_px), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT_PX if side > 100 else 10)
    for column, title in enumerate(COLUMNS):
        draw.text((GAP_PX + column * column_px, 3), title, fill="black", font=font)
    for row in range(count):
        top = header_px + row * row_px
        masked = to_pixels(originals[row])
        masked[masks[row, 0].cpu().numpy() > 0.5] = MASK_GREY
        for column, pixels in enumerate((to_pixels(originals[row]), masked, to_pixels(restored[row]))):
            cell = Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(cell, (GAP_PX + column * column_px, top))
        if names:
            draw.text((GAP_PX, top + side + 2), names[row], fill="black", font=font)
    with replacing(path) as out:
        sheet.save(out, format="PNG", optimize=True)
