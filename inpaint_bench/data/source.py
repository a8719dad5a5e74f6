"""The protocol of an image source, and the source that a configuration names."""

from __future__ import annotations

import shlex

import msgspec
import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config.bench import DataConfig, RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import SkippedImage

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]
Mask = npt.NDArray[np.uint8]  # [H, W], 0 keep, 1 repaint


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
    texts: list[str]  # [N], "" where there is none
    names: list[str]  # [N], file names for messages
    validation: npt.NDArray[np.bool_] | None = None  # [N], True where held out; None: not split yet

    @property
    def centre(self) -> tuple[float, float]:
        """Return latitude and longitude in the middle: medians, because a few wrong positions would move means far."""
        latitude, longitude = np.median(self.positions, axis=0).tolist()
        return latitude, longitude

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


def open_source(config: DataConfig, recipe: RecipeConfig | None = None) -> Source:
    """Open the images that `config` names, read as `recipe` says (default: plain files, not staged).

    Raises UserError if no image is usable, or if the recipe needs prepared data and this is not.
    """
    # Imported here: each kind brings libraries that the others do without, and imports this module.
    from .folder import FolderSource
    from .prepared.source import PreparedSource
    from .synthetic import SyntheticSource

    defaults = RecipeConfig()
    recipe = recipe or defaults
    if config.kind == "prepared":
        return PreparedSource.open(config, recipe.format, recipe.stage_to)
    # Only prepared data comes in several formats and can be staged: other sources would ignore these keys silently.
    for key in ("format", "stage_to"):
        if getattr(recipe, key) != getattr(defaults, key):
            overrides = shlex.join([f"data={config.kind}", *([f"data.root={config.root}"] if config.root else [])])
            raise UserError(
                f"recipe.{key}={getattr(recipe, key)} needs prepared data: inpaint-bench prepare {overrides} "
                f"prepare.out=DIR prepare.formats=[{recipe.format}], then data=prepared data.root=DIR"
            )
    return FolderSource.open(config) if config.kind == "folder" else SyntheticSource(config)
