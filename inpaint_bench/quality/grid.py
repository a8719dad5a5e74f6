"""Pictures side by side: original, masked, restored."""

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
HIDDEN = 127  # the grey that the network sees under the mask


def pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """[3, R, R] in -1..1 -> [R, R, 3]."""
    array: npt.NDArray[np.uint8] = ((image.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).byte().numpy()
    return array.transpose(1, 2, 0)


def write(
    path: Path, originals: Tensor, masks: Tensor, restored: Tensor, names: Sequence[str] = (), rows: int = 8
) -> None:
    """A PNG of the first `rows` of [N, 3, R, R] (-1..1) and [N, 1, R, R] (1 = repainted), with `names` below each.

    A cell is as large as its picture, 256 px at most. Raises ValueError where there is no picture.
    """
    count = min(rows, len(originals))
    if not count:
        raise ValueError("a grid needs a picture")
    side = min(CELL_PX, originals.shape[-1])
    below = TEXT_PX + 4 if names else 0
    head, step = TEXT_PX + 8, side + below + GAP_PX
    sheet = Image.new("RGB", (len(COLUMNS) * (side + GAP_PX) + GAP_PX, head + count * step), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT_PX if side > 100 else 10)
    for column, title in enumerate(COLUMNS):
        draw.text((GAP_PX + column * (side + GAP_PX), 3), title, fill="black", font=font)
    for row in range(count):
        top = head + row * step
        masked = pixels(originals[row])
        masked[masks[row, 0].cpu().numpy() > 0.5] = HIDDEN
        for column, picture in enumerate((pixels(originals[row]), masked, pixels(restored[row]))):
            cell = Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(cell, (GAP_PX + column * (side + GAP_PX), top))
        if names:
            draw.text((GAP_PX, top + side + 2), names[row], fill="black", font=font)
    with replacing(path) as out:
        sheet.save(out, format="PNG", optimize=True)
