"""Procedural facades (sky, wall, roof, windows, door, pavement) at plausible addresses of one invented city.

The attributes of a house vary with its district (kilometres), its neighbourhood (hundreds of metres) and the house
itself. So a position carries information about the image, which is what a location-aware model has to learn. An image
is a function of (seed, index) alone, so every worker, machine and attempt gets the same one. It is made of rectangles:
cheap enough that a few loader processes keep a GPU busy, structured enough that a loss falls.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config.bench import DataConfig

from .source import METRES_PER_DEGREE, Inventory, Pixels, Source

VERSION = 2  # part of the identity: increase it when another image, address or text comes out

# A grid of streets from this corner: streets 200 m apart, houses 24 m apart on both sides.
ORIGIN = (30.6280, -96.3344)  # degrees: latitude, longitude
BLOCK_M = 200.0
HOUSE_M = 24.0
SETBACK_M = 9.0
HOUSES_PER_SIDE = 8

# Wavelengths of the variation over the city, and the share of an attribute's variance of each. Chosen, not fitted.
SCALES_M_AND_SHARES = ((4000.0, 0.5), (800.0, 0.3))  # district, neighbourhood
WAVES = 16  # sines per attribute and scale; their directions and phases depend on the seed

WALLS = {
    "brick": (150, 75, 60),
    "timber": (120, 96, 72),
    "yellow": (212, 176, 96),
    "plaster": (214, 202, 178),
    "concrete": (150, 150, 148),
    "blue": (110, 136, 164),
}  # similar ones are neighbours, because the attribute varies continuously between districts

Range = tuple[float, float] | tuple[tuple[float, float, float], tuple[float, float, float]]
House = Mapping[str, Any]  # value of each attribute, [3] for a colour; lengths are shares of the image's side


def _grey(low: float, high: float) -> Range:
    return (low, low, low), (high, high, high)


# Attributes with their ranges. Light and pavement depend on the place too: a street is photographed in one drive.
PLACE_ATTRIBUTES: dict[str, Range] = {
    "wall": (0, len(WALLS)),
    "tint": _grey(-25, 25),
    "storeys": (1, 6),
    "eaves": (0.12, 0.4),  # the wall's upper edge, from the top
    "gable": (0, 2),
    "rise": (0.3, 0.9),
    "roof": _grey(40, 130),
    "ground": (0.82, 0.92),
    "pavement": _grey(70, 150),
    "zenith": ((70, 110, 160), (150, 180, 230)),
    "horizon": _grey(190, 245),
    "window_width": (0.4, 0.7),  # in bays
    "window_height": (0.45, 0.65),  # in storeys
    "glass": _grey(20, 120),
    "trim": _grey(170, 245),
}
HOUSE_ATTRIBUTES: dict[str, Range] = {
    "bays": (2, 7),
    "left": (0.0, 0.2),
    "right": (0.8, 1.0),
    "panel": _grey(30, 140),
    "door": (0, 1),
}


class SyntheticSource(Source):
    """`config.num_images` facades (default 6500)."""

    def __init__(self, config: DataConfig) -> None:
        self.resolution_px = config.resolution_px
        self.seed, count = config.seed, config.num_images or 6500
        self.inventory = Inventory(kind="synthetic", found=count, used=count)
        metres = _addresses(count)
        self.positions = _degrees(metres)
        self._attributes = _draw_attributes(metres, self.seed)
        self.texts = [_text(self.house(index)) for index in range(count)]
        self.names = [f"synthetic-{index:06d}" for index in range(count)]
        self.identity = hashlib.sha256(f"synthetic/{VERSION}/{self.seed}/{count}".encode()).hexdigest()

    def house(self, index: int) -> House:
        """Return the attributes of a house."""
        return {name: values[index] for name, values in self._attributes.items()}

    def pixels(self, index: int) -> Pixels:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index))))
        return _draw(self.house(index), random, self.resolution_px)


def _addresses(count: int) -> npt.NDArray[np.float64]:
    """Return [count, 2] metres east and north, in a growing square of blocks: a house keeps its place for any count."""
    index = np.arange(count)
    # The index counts the houses on one side of a street, then the two sides, then the blocks.
    house, index = index % HOUSES_PER_SIDE, index // HOUSES_PER_SIDE
    side, block = index % 2, index // 2
    edge = np.sqrt(block).astype(int)  # blocks 0 .. edge**2 - 1 are a full square, the others an L around it
    along = block - edge**2
    # The L runs from (0, edge) through its corner (edge, edge) to (edge, 0).
    column, row = np.minimum(edge, along), np.minimum(edge, 2 * edge - along)
    east = column * BLOCK_M + (house + 0.5) * HOUSE_M
    north = row * BLOCK_M + np.where(side == 1, SETBACK_M, -SETBACK_M)
    return np.stack([east, north], axis=1)


def _degrees(metres: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    latitude = ORIGIN[0] + metres[:, 1] / METRES_PER_DEGREE
    longitude = ORIGIN[1] + metres[:, 0] / (METRES_PER_DEGREE * np.cos(np.radians(ORIGIN[0])))
    return np.stack([latitude, longitude], axis=1)


def _draw_attributes(metres: npt.NDArray[np.float64], seed: int) -> dict[str, npt.NDArray[np.float64]]:
    """Return every attribute of N houses: [N], or [N, 3] for a colour, spread over its whole range.

    Each is a normal variable, of which district and neighbourhood give their shares of the variance and the house the
    rest; its quantile is the position in the range.
    """
    attributes = PLACE_ATTRIBUTES | HOUSE_ATTRIBUTES
    ranges = {name: np.array(limits, np.float64) for name, limits in attributes.items()}
    widths = [limits[0].size for limits in ranges.values()]
    placed = sum(widths[: len(PLACE_ATTRIBUTES)])
    # Two generators: the waves of the city must not depend on how many houses are drawn.
    city, own = (np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(part,))) for part in (0, 1))
    normal = own.standard_normal((len(metres), sum(widths)))  # row by row: independent of the count
    normal[:, :placed] *= np.sqrt(1 - sum(share for _, share in SCALES_M_AND_SHARES))
    for scale_m, share in SCALES_M_AND_SHARES:
        normal[:, :placed] += np.sqrt(share) * _field(metres / scale_m, placed, city)
    quantile = 1 / (1 + np.exp(-1.702 * normal))  # logistic approximation, within 0.01 of the normal's
    parts = np.split(quantile, np.cumsum(widths)[:-1], axis=1)
    return {
        name: low + (high - low) * (part if low.size > 1 else part[:, 0])
        for (name, (low, high)), part in zip(ranges.items(), parts, strict=True)
    }


def _field(places: npt.NDArray[np.float64], count: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return `count` smooth random functions of N places, [N, count], about normal: sums of waves 0.7 to 1.4 long."""
    direction, phase = random.uniform(0, 2 * np.pi, (2, count, WAVES))
    wave = 2 * np.pi / random.uniform(0.7, 1.4, (count, WAVES)) * np.stack([np.cos(direction), np.sin(direction)])
    height = np.zeros((len(places), count))
    for number in range(WAVES):
        height += np.cos(places @ wave[:, :, number] + phase[:, number])
    # A cosine of random phase has the variance 1/2; the sum is scaled to the variance 1.
    return height * np.sqrt(2 / WAVES)


def _text(house: House) -> str:
    roof = "gabled" if house["gable"] >= 1 else "flat"
    return f"a street view of a {_wall(house)} building with {int(house['storeys'])} storeys and a {roof} roof"


def _wall(house: House) -> str:
    return list(WALLS)[int(house["wall"])]


def _draw(house: House, random: np.random.Generator, side: int) -> Pixels:
    image = np.empty((side, side, 3), np.uint8)
    top, ground, left, right = (int(house[name] * side) for name in ("eaves", "ground", "left", "right"))

    # Sky: a gradient from the zenith down to the ground; pavement below.
    sky = np.linspace(0, 1, ground, dtype=np.float32)[:, None]
    image[:ground] = (house["zenith"] * (1 - sky) + house["horizon"] * sky).astype(np.uint8)[:, None]
    image[ground:] = house["pavement"].astype(np.uint8)

    wall = np.clip(np.array(WALLS[_wall(house)]) + house["tint"], 0, 255).astype(np.uint8)
    image[top:ground, left:right] = wall
    # Darker lines of mortar.
    if _wall(house) == "brick":
        image[top : ground : max(2, side // 64), left:right] = (wall * 0.85).astype(np.uint8)
    _roof(image, house, top, left, right)
    _openings(image, house, top, ground, left, right)

    # Grain: one small random field, repeated, is enough and costs little.
    grain = random.integers(0, 12, (side, min(side, 64)), dtype=np.uint8)
    # 243 and the largest grain, 11, still fit into uint8: a larger sum would wrap round to black.
    np.minimum(image, 243, out=image)
    image += np.tile(grain, (1, -(-side // grain.shape[1])))[:, :side, None]
    return image


def _roof(image: Pixels, house: House, top: int, left: int, right: int) -> None:
    colour, rise = house["roof"].astype(np.uint8), int(top * house["rise"])
    if house["gable"] < 1:
        image[max(0, top - rise // 4) : top, left:right] = colour
        return
    # A gable is a triangle, drawn row by row from the ridge down to the eaves.
    middle, half = (left + right) / 2, (right - left) / 2
    for row in range(top - rise, top):
        half_row = half * (row - top + rise + 1) / max(1, rise)
        image[row, max(0, int(middle - half_row)) : int(middle + half_row)] = colour


def _openings(image: Pixels, house: House, top: int, ground: int, left: int, right: int) -> None:
    """Draw a grid of framed windows, and a door in one bay of the ground floor."""
    storeys, bays = int(house["storeys"]), int(house["bays"])
    storey, bay = (ground - top) / storeys, (right - left) / bays
    width, height = bay * house["window_width"], storey * house["window_height"]
    frame = max(1, int(bay * 0.05))
    glass, trim, panel = (house[name].astype(np.uint8) for name in ("glass", "trim", "panel"))
    door = int(house["door"] * bays)
    for floor in range(storeys):
        for column in range(bays):
            x = int(left + bay * column + (bay - width) / 2)
            y = int(top + storey * floor + (storey - height) / 2)
            x_end, y_end, fill = int(x + width), int(y + height), glass
            # Floors are counted from the top, so the last one is the ground floor.
            if floor == storeys - 1 and column == door:
                y_end, fill = ground, panel
            image[y:y_end, x:x_end] = trim
            image[y + frame : max(y_end - frame, 0), x + frame : max(x_end - frame, 0)] = fill
            if fill is glass:
                glazing_bar = (x + x_end) // 2
                image[y:y_end, glazing_bar : glazing_bar + max(1, frame // 2)] = trim
