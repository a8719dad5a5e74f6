"""What Hydra must know before it composes: the root schema and the resolvers of our configuration files."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from . import recipe
from .config import BenchConfig
from .paths import testbed_dir


def register() -> None:
    """May be called again. conf/config.yaml starts from the schema, conf/study uses `recipes`."""
    OmegaConf.register_new_resolver("testbed", lambda: str(testbed_dir()), replace=True)
    OmegaConf.register_new_resolver("recipes", recipe.sweep, replace=True)
    schema = OmegaConf.structured(BenchConfig)
    OmegaConf.set_struct(schema.sites, False)  # any key of a site file; typed where the site is known
    ConfigStore.instance().store(name="bench_schema", node=schema)
