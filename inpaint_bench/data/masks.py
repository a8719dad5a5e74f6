"""Inpainting masks, 1 = repaint: strokes and boxes as in the training of SD 1.5 inpainting, or traces of a disaster.

Every kind is drawn in shares of the image's side, so that its coverage does not depend on the resolution.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .source import Mask

FULL_MASK_SHARE = 0.25  # model card of stable-diffusion-inpainting: in 25 % of the steps everything is masked


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


# --- strokes or rectangles -----------------------------------------------------------------------

# With equal probability: the masks that the SD 1.5 inpainting checkpoint was trained on. They follow LaMa: strokes of
# up to 200 px by 100 px, rectangles of 30 to 150 px, at 256 px; sizes scale with the resolution.
REFERENCE_PX = 256  # the side for which the sizes below are given
STROKES = (1, 5)  # number, inclusive
STROKE_LENGTH_PX = 200
STROKE_WIDTH_PX = (10, 100)
SEGMENTS = (2, 5)  # segments of one stroke
RECTANGLES = (1, 4)
RECTANGLE_PX = (30, 150)


def _draw_sd(side: int, random: np.random.Generator) -> Mask:
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


# --- traces of a disaster ------------------------------------------------------------------------

# Debris, water, smoke or missing parts of a facade, with equal probability. We found no public generator of such masks
# for street views, so these are ours: simple shapes at plausible places, not a simulation. The numbers below are judged
# by eye (docs/masks.png), not fitted to photographs of damage.
Floats = npt.NDArray[np.float32]

WORK_PX = 256  # side of every mask drawn here

HEAPS = (1, 3)  # number, inclusive
PIECES = (18, 36)  # polygons in one heap
PIECE_RADIUS = (0.03, 0.095)  # share of the side, as all sizes below
HEAP_HEIGHT, HEAP_HALF_WIDTH = (0.2, 0.6), (0.15, 0.4)
CORNERS = 5  # corners of a piece
WATER_LINE = (0.4, 0.9)  # share of the height, from the top
WAVES = 4
SMOKE_SHARE = (0.15, 0.65)  # share of the pixels
SMOKE_LATTICE, SMOKE_OCTAVES = 4, 5  # cells of the coarsest octave; each octave halves them
HOLES = (1, 3)
HOLE_WIDTH, HOLE_HEIGHT = (0.15, 0.5), (0.15, 0.45)
JAGGED = 0.02  # depth of broken masonry
CORNER_PROBABILITY = 0.6
CORNER_WIDTH, CORNER_DEPTH = (0.25, 0.7), (0.2, 0.6)

_ROWS = np.arange(WORK_PX, dtype=np.float32)[:, None]
_COLUMNS = np.arange(WORK_PX, dtype=np.float32)
_SHARE = _COLUMNS / WORK_PX


def _draw_disaster(_: int, random: np.random.Generator) -> Mask:
    """Return a mask [WORK_PX, WORK_PX]; `random` also decides which of the four kinds it is."""
    return DRAWINGS[random.integers(len(DRAWINGS))](random)


def debris(random: np.random.Generator) -> Mask:
    """Draw heaps of broken pieces: random polygons, dense at the foot, near the lower edge."""
    canvas = Image.new("L", (WORK_PX, WORK_PX))
    draw = ImageDraw.Draw(canvas)
    for _ in range(random.integers(HEAPS[0], HEAPS[1] + 1)):
        count = int(random.integers(PIECES[0], PIECES[1] + 1))
        foot, middle = random.uniform(0.88, 1.0), random.uniform(0.1, 0.9)
        height, half = random.uniform(*HEAP_HEIGHT), random.uniform(*HEAP_HALF_WIDTH)
        # Pieces lie below the two slopes of a heap, which is `height` high in its middle.
        across = random.triangular(-1, 0, 1, (count, 1))
        rise = height * (1 - np.abs(across)) * random.random((count, 1))
        # Corners in turned, roughly even directions, some closer to the centre than others: [count, CORNERS].
        angle = (np.arange(CORNERS) + random.random((count, CORNERS)) * 0.8) * (2 * np.pi / CORNERS)
        angle += random.uniform(0, 6, (count, 1))
        radius = random.uniform(*PIECE_RADIUS, (count, 1)) * random.uniform(0.7, 1.0, (count, CORNERS))
        corners = np.stack([middle + half * across, foot - rise], axis=-1) + radius[:, :, None] * np.stack(
            [np.cos(angle), np.sin(angle)], axis=-1
        )
        for piece in (corners * WORK_PX).reshape(count, -1).tolist():
            draw.polygon(piece, fill=1)
    return np.array(canvas)


def water(random: np.random.Generator) -> Mask:
    """Mask everything below a wavy line, tilted a little as cameras are."""
    line = random.uniform(*WATER_LINE) + random.uniform(-0.03, 0.03) * (_SHARE - 0.5)
    cycles, phase = random.uniform(1, 14, WAVES), random.uniform(0, 2 * np.pi, WAVES)
    height = random.uniform(0.003, 0.02, WAVES) / np.sqrt(cycles)  # short waves have small amplitudes
    waves = (height[:, None] * np.sin(2 * np.pi * cycles[:, None] * _SHARE + phase[:, None])).sum(axis=0)
    return _fill_between((line + waves).astype(np.float32) * WORK_PX, np.float32(WORK_PX)).view(np.uint8)


def smoke(random: np.random.Generator) -> Mask:
    """Draw fractal clouds (value noise, each octave of half the width and height), thresholded to a random share."""
    field = np.zeros((1, 1), np.float32)
    for octave in range(SMOKE_OCTAVES):
        side = SMOKE_LATTICE << octave
        field = _upsample(field, side) + random.random((side, side), np.float32) * np.float32(0.5**octave)
    field = _upsample(field, WORK_PX)
    sample = np.sort(field[::4, ::4], axis=None)  # a sixteenth of the pixels gives the quantile well enough
    level = sample[int((1 - random.uniform(*SMOKE_SHARE)) * (len(sample) - 1))]
    return (field > level).view(np.uint8)


def _upsample(field: Floats, side: int) -> Floats:
    """Resize a square field to [side, side], linear between pixel centres."""
    return np.asarray(Image.fromarray(field).resize((side, side), Image.Resampling.BILINEAR))


def facade(random: np.random.Generator) -> Mask:
    """Draw holes in a wall, in perspective (upright sides, a vanishing point), and perhaps a collapsed corner."""
    mask = np.zeros((WORK_PX, WORK_PX), bool)
    horizon = random.uniform(0.45, 0.75)  # from the top
    slope = random.uniform(-0.7, 0.7)  # growth of the wall's apparent height across the image
    for _ in range(random.integers(HOLES[0], HOLES[1] + 1)):
        width, height = random.uniform(*HOLE_WIDTH), random.uniform(*HOLE_HEIGHT)
        x, y = random.uniform(0, 1 - width), random.uniform(0, 0.95 - height)
        # Upper and lower edges of a hole approach the horizon as the wall recedes.
        scale = 1 + slope * (_SHARE - x - width / 2)
        columns = slice(int(x * WORK_PX), int((x + width) * WORK_PX))
        top = (horizon + (y - horizon) * scale + _jagged_line(random)) * WORK_PX
        bottom = (horizon + (y + height - horizon) * scale + _jagged_line(random)) * WORK_PX
        mask[:, columns] |= _fill_between(top[columns], bottom[columns])
    if random.random() < CORNER_PROBABILITY:
        width, depth = random.uniform(*CORNER_WIDTH), random.uniform(*CORNER_DEPTH)
        # The corner breaks away from the left or the right edge of the image, where the break is deepest.
        from_edge = _SHARE if random.random() < 0.5 else 1 - _SHARE
        exponent = random.uniform(0.6, 1.6)  # a convex or a concave break
        fall = depth * np.clip(1 - from_edge / width, 0, 1) ** exponent
        edge = (fall + np.where(fall > 0, _jagged_line(random), 0)) * WORK_PX
        mask |= _fill_between(np.float32(0), edge.astype(np.float32))
    return mask.view(np.uint8)


def _jagged_line(random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return a jagged line [WORK_PX] around zero, straight between random corners, as bricks and slabs break."""
    corners = int(random.integers(10, 30))
    return np.interp(_SHARE, np.linspace(0, 1, corners), random.uniform(-JAGGED, JAGGED, corners))


def _fill_between(top: npt.ArrayLike, bottom: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a mask that is True in each column from row `top` (inclusive) to row `bottom`."""
    return (np.asarray(top, np.float32) <= _ROWS) & (np.asarray(bottom, np.float32) > _ROWS)


DRAWINGS = (debris, water, smoke, facade)
# A mask of the given side, or one of WORK_PX: that bounds the cost, and latents are coarser anyway.
KINDS: dict[str, Callable[[int, np.random.Generator], Mask]] = {"sd": _draw_sd, "disaster": _draw_disaster}
