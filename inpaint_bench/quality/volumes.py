"""MS-SSIM of volumes, and pictures of their middle slices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

from inpaint_bench.core.files import replacing

WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of the scales, Wang et al. 2003
WINDOW = 11  # voxels
GAP_PX, HEADER_PX, CELL_PX = 6, 20, 160


def scales(sides: tuple[int, int, int]) -> int:
    """Return how many of the five scales fit: the smallest must hold the window."""
    side = min(sides)
    return max(
        (n for n in range(1, 6) if side >= WINDOW << (n - 1) and side // max(1, n - 1) ** 2 >= WINDOW), default=0
    )


@torch.no_grad()
def ms_ssim(volumes: Tensor, reference: Tensor) -> float:
    """Return MS-SSIM of [B, C, D, H, W] in -1..1, mean over the volumes; NaN where the window does not fit.

    Sides below 176 voxels have fewer than five scales, whose weights are scaled to one.
    """
    depth, height, width = volumes.shape[2:]
    count = scales((depth, height, width))
    if not count:
        return float("nan")
    total = sum(WEIGHTS[:count])
    weights = tuple(weight / total for weight in WEIGHTS[:count])
    values = [
        float(
            multiscale_structural_similarity_index_measure(
                volume[None].float(), other[None].float(), data_range=2.0, betas=weights
            )
        )
        for volume, other in zip(volumes, reference, strict=True)
    ]
    return sum(values) / len(values)


def write_slices(path: Path, columns: Mapping[str, Tensor], rows: int = 4) -> None:
    """Write a PNG: a row per volume, a column per name, each the middle slice of [N, Z, Y, X] in -1..1.

    Axes go from bottom to top, back to front and left to right: slices are axial, their front at the top.
    """
    first = next(iter(columns.values()))
    count = min(rows, len(first))
    side = CELL_PX + GAP_PX
    sheet = Image.new("L", (len(columns) * side + GAP_PX, HEADER_PX + count * side), 255)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for column, (title, volumes) in enumerate(columns.items()):
        draw.text((GAP_PX + column * side, 3), title, fill=0, font=font)
        for row in range(count):
            middle = volumes[row, volumes.shape[1] // 2].flip(0).detach().float().cpu()
            pixels = ((middle + 1) * 127.5).nan_to_num().round().clamp(0, 255).byte().numpy()
            cell = Image.fromarray(pixels)
            cell.thumbnail((CELL_PX, CELL_PX))
            scale = CELL_PX / max(cell.size)
            cell = cell.resize((round(cell.width * scale), round(cell.height * scale)), Image.Resampling.NEAREST)
            sheet.paste(cell, (GAP_PX + column * side, HEADER_PX + row * side))
    with replacing(path) as out:
        sheet.save(out, format="PNG", optimize=True)
