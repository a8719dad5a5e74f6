"""Procedural facades: sky, wall, roof, windows, door, pavement, on plausible addresses of one city.

An image is a function of (seed, index) alone, so every worker, machine and attempt sees the same one. It is
made of rectangles: cheap enough that a loader of a few processes keeps a GPU busy, structured enough that a
loss falls.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config import DataConfig
from .source import Account, Pixels
from .split import METRES_PER_DEGREE

VERSION = 1  # part of the identity: raise it when another picture, address or text comes out

# A grid of streets of 100 m blocks, houses 12 m apart on both sides, around this corner.
ORIGIN = (30.6280, -96.3344)  # degrees: latitude, longitude
BLOCK_M = 100.0
HOUSE_M = 12.0
SETBACK_M = 9.0
HOUSES_PER_SIDE = 8

WALLS = {
    "brick": (150, 75, 60),
    "plaster": (214, 202, 178),
    "timber": (120, 96, 72),
    "concrete": (150, 150, 148),
    "yellow": (212, 176, 96),
    "blue": (110, 136, 164),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one house looks like; lengths are shares of the picture's side."""

    wall: str
    storeys: int
    bays: int
    left: float
    right: float
    eaves: float  # height of the wall's upper edge, from the top
    gable: bool

    @property
    def text(self) -> str:
        roof = "gabled" if self.gable else "flat"
        return f"a street view of a {self.wall} building with {self.storeys} storeys and a {roof} roof"


class SyntheticSource:
    """As many facades as `config.num_images` says (default 6500)."""

    def __init__(self, config: DataConfig) -> None:
        self.resolution_px = config.resolution_px
        self.seed = config.seed
        self.count = config.num_images or 6500
        self.account = Account(kind="synthetic", found=self.count, used=self.count)
        self.positions = _addresses(self.count)
        self.texts = [_plan(self._random(index)).text for index in range(self.count)]
        self.names = [f"synthetic-{index:06d}" for index in range(self.count)]
        self.identity = hashlib.sha256(f"synthetic/{VERSION}/{self.seed}/{self.count}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.count

    def pixels(self, index: int) -> Pixels:
        random = self._random(index)
        return _draw(_plan(random), random, self.resolution_px)

    def own_mask(self, index: int) -> None:
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _random(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index))))


def _addresses(count: int) -> npt.NDArray[np.float64]:
    """[count, 2] latitude and longitude, filling block after block of a square grid."""
    index = np.arange(count)
    house, index = index % HOUSES_PER_SIDE, index // HOUSES_PER_SIDE
    side, block = index % 2, index // 2
    width = max(1, int(np.ceil(np.sqrt(block.max() + 1))))
    east_m = (block % width) * BLOCK_M + (house + 0.5) * HOUSE_M
    north_m = (block // width) * BLOCK_M + np.where(side == 1, SETBACK_M, -SETBACK_M)
    latitude = ORIGIN[0] + north_m / METRES_PER_DEGREE
    longitude = ORIGIN[1] + east_m / (METRES_PER_DEGREE * np.cos(np.radians(ORIGIN[0])))
    return np.stack([latitude, longitude], axis=1)


def _plan(random: np.random.Generator) -> Plan:
    return Plan(
        wall=list(WALLS)[random.integers(len(WALLS))],
        storeys=int(random.integers(1, 6)),
        bays=int(random.integers(2, 7)),
        left=float(random.uniform(0.0, 0.2)),
        right=float(random.uniform(0.8, 1.0)),
        eaves=float(random.uniform(0.12, 0.4)),
        gable=bool(random.random() < 0.5),
    )


def _draw(plan: Plan, random: np.random.Generator, side: int) -> Pixels:
    image = np.empty((side, side, 3), np.uint8)
    ground = int(side * random.uniform(0.82, 0.92))
    top, left, right = int(plan.eaves * side), int(plan.left * side), int(plan.right * side)

    sky = np.linspace(0, 1, ground, dtype=np.float32)[:, None]
    zenith, horizon = random.uniform((70, 110, 160), (150, 180, 230)), random.uniform(190, 245, 3)
    image[:ground] = (zenith * (1 - sky) + horizon * sky).astype(np.uint8)[:, None]
    image[ground:] = random.integers(70, 150, 3, dtype=np.uint8)

    wall = np.clip(np.array(WALLS[plan.wall]) + random.integers(-25, 26, 3), 0, 255).astype(np.uint8)
    image[top:ground, left:right] = wall
    if plan.wall == "brick":
        image[top : ground : max(2, side // 64), left:right] = (wall * 0.85).astype(np.uint8)
    _roof(image, plan, random, top, left, right)
    _openings(image, plan, random, top, ground, left, right)

    # Sensor-like grain in bands: one small random field, repeated, is enough and costs little.
    grain = random.integers(0, 12, (side, min(side, 64)), dtype=np.uint8)
    np.minimum(image, 243, out=image)
    image += np.tile(grain, (1, -(-side // grain.shape[1])))[:, :side, None]
    return image


def _roof(image: Pixels, plan: Plan, random: np.random.Generator, top: int, left: int, right: int) -> None:
    colour = random.integers(40, 130, 3, dtype=np.uint8)
    rise = int(top * random.uniform(0.3, 0.9))
    if not plan.gable:
        image[max(0, top - rise // 4) : top, left:right] = colour
        return
    middle, half = (left + right) / 2, (right - left) / 2
    for row in range(top - rise, top):
        reach = half * (row - top + rise + 1) / max(1, rise)
        image[row, max(0, int(middle - reach)) : int(middle + reach)] = colour


def _openings(
    image: Pixels, plan: Plan, random: np.random.Generator, top: int, ground: int, left: int, right: int
) -> None:
    """A grid of framed windows, and a door in one bay of the ground floor."""
    storey, bay = (ground - top) / plan.storeys, (right - left) / plan.bays
    wide, high = bay * random.uniform(0.4, 0.7), storey * random.uniform(0.45, 0.65)
    frame = max(1, int(bay * 0.05))
    glass = random.integers(20, 120, 3, dtype=np.uint8)
    trim, panel = random.integers(170, 245, 3, dtype=np.uint8), random.integers(30, 140, 3, dtype=np.uint8)
    door = int(random.integers(plan.bays))
    for floor in range(plan.storeys):
        for column in range(plan.bays):
            x = int(left + bay * column + (bay - wide) / 2)
            y = int(top + storey * floor + (storey - high) / 2)
            x_end, y_end, fill = int(x + wide), int(y + high), glass
            if floor == plan.storeys - 1 and column == door:
                y_end, fill = ground, panel
            image[y:y_end, x:x_end] = trim
            image[y + frame : max(y_end - frame, 0), x + frame : max(x_end - frame, 0)] = fill
            if fill is glass:  # glazing bar
                bar = (x + x_end) // 2
                image[y:y_end, bar : bar + max(1, frame // 2)] = trim
