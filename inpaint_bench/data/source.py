"""The protocol of an image source."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from inpaint_bench.core.records import DataFacts, SkippedImage, to_record

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]
Mask = npt.NDArray[np.uint8]  # [H, W], 0 keep, 1 repaint


def unwrap(longitude: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return longitudes within 180 degrees of their circular mean: both sides of the 180th meridian are one area."""
    mean = np.degrees(np.angle(np.exp(1j * np.radians(longitude)).mean()))
    return longitude + 360 * np.rint((mean - longitude) / 360)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Images found, used and skipped; `found == used + len(skipped) + beyond_limit`."""

    kind: str
    found: int
    used: int
    beyond_limit: int = 0  # not read: data.num_images was reached before
    skipped: list[SkippedImage] = []


class Source:
    """Images by index, all checked when the source was opened."""

    inventory: Inventory
    identity: str  # hex digest of everything that decides images, positions, texts and masks, except the resolution
    resolution_px: int
    positions: npt.NDArray[np.float64]  # [N, 2]: latitude, longitude in degrees
    texts: list[str]  # [N], "" if there is none
    names: list[str]  # [N], file names for messages
    validation: npt.NDArray[np.bool_] | None = None  # [N], True where held out; None: not split yet

    @property
    def centre(self) -> tuple[float, float]:
        """Return latitude and longitude in the middle: medians, because a few wrong positions would move means far."""
        latitude, longitude = np.median(self.positions[:, 0]), np.median(unwrap(self.positions[:, 1]))
        return float(latitude), float(longitude - 360 * np.rint(longitude / 360))

    def facts(self, root: str | None, **more: Any) -> DataFacts:
        """Return what the manifest says of the images."""
        inventory = msgspec.to_builtins(self.inventory)
        return to_record({**inventory, "root": root, "identity": self.identity, **more}, DataFacts)

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, index: int) -> Pixels:
        """Return [resolution, resolution, 3]. Raises RuntimeError naming a file that became unreadable."""
        raise NotImplementedError

    def own_mask(self, index: int) -> Mask | None:
        """Return the mask [resolution, resolution] that the data itself gives this image, or None."""
        return None

    def close(self) -> None:
        """Release what was opened or staged. May be called again."""
