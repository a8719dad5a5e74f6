"""What a set of images is to the loader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]
Mask = npt.NDArray[np.uint8]  # [H, W], 0 keep, 1 repaint


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """An image that is not used, and why in words."""

    file: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """What was found, used and left out; `found == used + len(skipped) + beyond_limit`."""

    kind: str
    found: int
    used: int
    beyond_limit: int = 0  # not looked at: data.num_images was reached before
    skipped: list[Skipped] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "found": self.found,
            "used": self.used,
            "beyond_limit": self.beyond_limit,
            "skipped": [{"file": one.file, "reason": one.reason} for one in self.skipped],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Account:
        return cls(**{**value, "skipped": [Skipped(**one) for one in value["skipped"]]})


class Source(Protocol):
    """Images by index, all checked when the source was opened."""

    account: Account
    identity: str  # hex digest of everything that decides the images, positions, texts and masks but the resolution
    positions: npt.NDArray[np.float64]  # [N, 2]: latitude, longitude in degrees
    texts: list[str]  # [N], "" where there is none
    names: list[str]  # [N], as the user knows them

    def __len__(self) -> int: ...

    def pixels(self, index: int) -> Pixels:
        """[resolution, resolution, 3], uint8. Raises RuntimeError naming a file that became unreadable."""
        ...

    def own_mask(self, index: int) -> Mask | None:
        """[resolution, resolution], the mask that the data itself gives this image; None where it gives none."""
        ...

    def close(self) -> None:
        """Give back what was opened or staged. May be called again."""
        ...
