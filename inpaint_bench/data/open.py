"""Open the image source that a configuration names."""

from __future__ import annotations

import shlex

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.config.levers import RecipeConfig
from inpaint_bench.core.errors import UserError

from .source import Source


def open_source(config: DataConfig, recipe: RecipeConfig | None = None) -> Source:
    """Open the images that `config` names, read as `recipe` says (default: plain files, not staged).

    Raises UserError if no image is usable, or if the recipe needs prepared data and this is not.
    """
    # Imported here: each kind brings libraries that the others do without.
    from .folder import FolderSource
    from .prepared.source import PreparedSource
    from .synthetic import SyntheticSource

    defaults = RecipeConfig()
    recipe = recipe or defaults
    if config.kind == "prepared":
        return PreparedSource(config, recipe.format, recipe.stage_to)
    # Only prepared data comes in several formats and can be staged: other sources would ignore these keys silently.
    for key in ("format", "stage_to"):
        if getattr(recipe, key) != getattr(defaults, key):
            overrides = shlex.join([f"data={config.kind}", *([f"data.root={config.root}"] if config.root else [])])
            raise UserError(
                f"recipe.{key}={getattr(recipe, key)} needs prepared data: inpaint-bench prepare {overrides} "
                f"prepare.out=DIR prepare.formats=[{recipe.format}], then data=prepared data.root=DIR"
            )
    return FolderSource(config) if config.kind == "folder" else SyntheticSource(config)
