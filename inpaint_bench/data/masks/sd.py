"""Strokes or rectangles with equal probability: the masks that the SD 1.5 inpainting checkpoint was trained on.

They follow LaMa: strokes of up to 200 px by 100 px, rectangles of 30 to 150 px, at 256 px; sizes scale with the
resolution.
"""

from __future__ import annotations

import numpy as np

from inpaint_bench.data.source import Mask

REFERENCE_PX = 256  # the side for which the sizes below are given
STROKES = (1, 5)  # number, inclusive
STROKE_LENGTH_PX = 200
STROKE_WIDTH_PX = (10, 100)
SEGMENTS = (2, 5)  # segments of one stroke
RECTANGLES = (1, 4)
RECTANGLE_PX = (30, 150)


def draw(side: int, random: np.random.Generator) -> Mask:
    """Return rectangles [side, side] or strokes of at most REFERENCE_PX, as `random` decides."""
    return _rectangles(side, random) if random.random() < 0.5 else _strokes(min(side, REFERENCE_PX), random)


def _rectangles(side: int, random: np.random.Generator) -> Mask:
    mask = np.zeros((side, side), np.uint8)
    scale = side / REFERENCE_PX
    for _ in range(random.integers(RECTANGLES[0], RECTANGLES[1] + 1)):
        low, high = max(1, int(RECTANGLE_PX[0] * scale)), max(2, int(RECTANGLE_PX[1] * scale))
        height, width = random.integers(low, high + 1, 2)
        y, x = random.integers(0, side - height + 1), random.integers(0, side - width + 1)
        mask[y : y + height, x : x + width] = 1
    return mask


def _strokes(side: int, random: np.random.Generator) -> Mask:
    """Draw thick polylines: a pixel belongs to one if its distance to a segment is at most half the width."""
    scale = side / REFERENCE_PX
    # Each stroke is a random walk; its segments are collected first.
    starts, ends, widths = [], [], []
    for _ in range(random.integers(STROKES[0], STROKES[1] + 1)):
        point = random.uniform(0, side, 2)
        width = random.uniform(*STROKE_WIDTH_PX) * scale
        for _ in range(random.integers(SEGMENTS[0], SEGMENTS[1] + 1)):
            angle, length = random.uniform(0, 2 * np.pi), random.uniform(10, STROKE_LENGTH_PX) * scale
            step = np.array([np.sin(angle), np.cos(angle)]) * length
            end = np.clip(point + step, 0, side - 1)
            starts.append(point)
            ends.append(end)
            widths.append(width)
            point = end

    mask = np.zeros((side, side), np.uint8)
    for start, end, width in zip(starts, ends, widths, strict=True):
        half = width / 2
        # Only the segment's bounding box: the whole image would cost ten times as much.
        y0, x0 = np.maximum(np.minimum(start, end) - half, 0).astype(int)
        y1, x1 = np.minimum(np.maximum(start, end) + half + 1, side).astype(int)
        rows = np.arange(y0, y1, dtype=np.float32)[:, None] - start[0].astype(np.float32)
        columns = np.arange(x0, x1, dtype=np.float32)[None, :] - start[1].astype(np.float32)
        dy, dx = (end - start).astype(np.float32)
        # The point of the segment that is nearest to a pixel, from 0 at its start to 1 at its end.
        along = np.clip((rows * dy + columns * dx) / max(float(dy * dy + dx * dx), 1e-6), 0, 1)
        near = (rows - along * dy) ** 2 + (columns - along * dx) ** 2 <= half * half
        mask[y0:y1, x0:x1] |= near
    return mask
