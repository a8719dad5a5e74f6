"""Draw docs/masks.png: `python docs/make_masks.py`. One row per kind of mask, on a synthetic facade."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.data.masks import DRAWINGS, make_mask, resized
from inpaint_bench.data.source import Mask
from inpaint_bench.data.synthetic import SyntheticSource

SIDE, COLUMNS, GAP, TITLE = 112, 8, 4, 92
HIDDEN = np.array((235, 64, 52))  # a red that no facade has


def main() -> None:
    """Write docs/masks.png."""
    rows: dict[str, list[Mask]] = {
        "sd": [make_mask(SIDE, (column,), "sd", full_mask_share=0) for column in range(COLUMNS)]
    }
    for drawing in DRAWINGS:
        masks = [resized(drawing(np.random.default_rng(column)), SIDE) for column in range(COLUMNS)]
        rows[f"disaster:\n{drawing.__name__}"] = masks
    source = SyntheticSource(DataConfig(kind="synthetic", num_images=COLUMNS, resolution_px=SIDE))
    sheet = Image.new("RGB", (TITLE + COLUMNS * (SIDE + GAP), len(rows) * (SIDE + GAP) - GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for row, (title, masks) in enumerate(rows.items()):
        top = row * (SIDE + GAP)
        draw.multiline_text((4, top + SIDE // 2), title, fill="black", font=font, anchor="lm")
        for column, mask in enumerate(masks):
            pixels = source.pixels(column)
            shown = np.where(mask[:, :, None] == 1, (0.25 * pixels + 0.75 * HIDDEN).astype(np.uint8), pixels)
            sheet.paste(Image.fromarray(shown), (TITLE + column * (SIDE + GAP), top))
    sheet.quantize(128).save(Path(__file__).with_name("masks.png"), optimize=True)


if __name__ == "__main__":
    main()
