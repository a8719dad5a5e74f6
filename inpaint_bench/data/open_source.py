"""From a configuration to its images, and to those of them that are held out."""

from __future__ import annotations

import shlex

import numpy as np
import numpy.typing as npt

from inpaint_bench.core.config import DataConfig, RecipeConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.prepared.source import PreparedSource

from .folder import FolderSource
from .source import Source
from .split import split
from .synthetic import SyntheticSource

Indices = npt.NDArray[np.int64]


def open_source(config: DataConfig, recipe: RecipeConfig | None = None) -> Source:
    """The images that `config` names, read as `recipe` says (None: plain files, not staged).

    Raises UserError where there is no usable image, or where the recipe asks for what only prepared data has.
    """
    recipe = recipe or RecipeConfig()
    if config.kind == "prepared":
        return PreparedSource.open(config, recipe.format, recipe.stage_to)
    asked = [f"recipe.{name}={value}" for name, value in (("format", recipe.format), ("stage_to", recipe.stage_to))]
    needs = [
        word
        for word, plain in zip(asked, ("recipe.format=files", "recipe.stage_to=none"), strict=True)
        if word != plain
    ]
    if needs:
        again = shlex.join([f"data={config.kind}", *([f"data.root={config.root}"] if config.root else [])])
        raise UserError(
            f"{' and '.join(needs)} needs prepared data: inpaint-bench prepare {again} prepare.out=DIR "
            f"prepare.formats=[{recipe.format}], then data=prepared data.root=DIR"
        )
    return FolderSource.open(config) if config.kind == "folder" else SyntheticSource(config)


def open_split(source: Source, config: DataConfig) -> tuple[Indices, Indices]:
    """Indices for training and for validation, ascending, by whole blocks of ground: see split.py.

    A prepared dataset's own split. Raises UserError where blocks cannot be told apart.
    """
    if isinstance(source, PreparedSource):
        held_out = source.validation
    else:
        held_out = split(source.positions, config.validation_share, config.block_m, config.seed)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
