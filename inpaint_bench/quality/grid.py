"""Pictures of results: images side by side (original, masked, restored), and slices of volumes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from inpaint_bench.core.files import replacing

from .metrics import to_bytes

COLUMNS = ("original", "masked", "restored")
ROWS = 8
CELL_PX, GAP_PX, TEXT_PX = 256, 6, 16
MASK_GREY = 127  # what the network sees under the mask
SLICE_ROWS, SLICE_PX, SLICE_HEADER_PX = 4, 160, 20  # layout of volumes


def to_pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """[3, R, R] in -1..1 -> [R, R, 3]."""
    return to_bytes(image.detach().float().cpu()).numpy().transpose(1, 2, 0)


def write(path: Path, rows: Sequence[tuple[Tensor, Tensor, Tensor]], names: Sequence[str]) -> None:
    """Write a PNG of the first ROWS: original [3, R, R] (-1..1), mask [1, R, R] (1 = repainted), restored, its name.

    A cell is as large as its image, 256 px at most.
    """
    rows = rows[:ROWS]
    side = min(CELL_PX, rows[0][0].shape[-1])
    column_px, row_px = side + GAP_PX, side + GAP_PX + TEXT_PX + 4
    header_px = TEXT_PX + 8
    sheet = Image.new("RGB", (len(COLUMNS) * column_px + GAP_PX, header_px + len(rows) * row_px), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT_PX if side > 100 else 10)
    for column, title in enumerate(COLUMNS):
        draw.text((GAP_PX + column * column_px, 3), title, fill="black", font=font)
    for row, (original, mask, restored) in enumerate(rows):
        top = header_px + row * row_px
        masked = to_pixels(original)
        masked[mask[0].cpu().numpy() > 0.5] = MASK_GREY
        for column, pixels in enumerate((to_pixels(original), masked, to_pixels(restored))):
            cell = Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(cell, (GAP_PX + column * column_px, top))
        draw.text((GAP_PX, top + side + 2), names[row], fill="black", font=font)
    _save(sheet, path)


def write_slices(path: Path, columns: Mapping[str, Tensor]) -> None:
    """Write a PNG: a row per volume, a column per name, each the middle slice of [N, Z, Y, X] in -1..1.

    Axes go from bottom to top, back to front and left to right: slices are axial, their front at the top.
    """
    count = min(SLICE_ROWS, len(next(iter(columns.values()))))
    side = SLICE_PX + GAP_PX
    sheet = Image.new("L", (len(columns) * side + GAP_PX, SLICE_HEADER_PX + count * side), 255)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for column, (title, volumes) in enumerate(columns.items()):
        draw.text((GAP_PX + column * side, 3), title, fill=0, font=font)
        for row in range(count):
            middle = volumes[row, volumes.shape[1] // 2].flip(0).detach().float().cpu()
            cell = Image.fromarray(to_bytes(middle.nan_to_num(-1)).numpy())
            cell.thumbnail((SLICE_PX, SLICE_PX))
            scale = SLICE_PX / max(cell.size)
            cell = cell.resize((round(cell.width * scale), round(cell.height * scale)), Image.Resampling.NEAREST)
            sheet.paste(cell, (GAP_PX + column * side, SLICE_HEADER_PX + row * side))
    _save(sheet, path)


def _save(sheet: Image.Image, path: Path) -> None:
    with replacing(path) as out:
        sheet.save(out, format="PNG", optimize=True)
