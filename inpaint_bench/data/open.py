"""Open the image source that a configuration names."""

from inpaint_bench.core.config.bench import DataConfig
from inpaint_bench.core.config.levers import RecipeConfig

from .source import Source


def open_source(config: DataConfig, recipe: RecipeConfig | None = None) -> Source:
    """Open the images that `config` names, read as `recipe` says (default: plain files, not staged).

    Raises UserError if no image is usable.
    """
    # Imported here: each kind brings libraries that the others do without.
    from .folder import FolderSource
    from .parquet import ParquetSource
    from .prepared_source import PreparedSource
    from .synthetic import SyntheticSource

    # Only prepared data comes in several formats and can be staged: levers.require refuses these keys for other data.
    if config.kind == "prepared":
        recipe = recipe or RecipeConfig()
        return PreparedSource(config, recipe.format, recipe.stage_to)
    sources: dict[str, type[Source]] = {"folder": FolderSource, "parquet": ParquetSource}
    return sources.get(config.kind, SyntheticSource)(config)  # type: ignore[call-arg]
