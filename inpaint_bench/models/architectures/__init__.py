"""Networks of our own, and parts that join those of diffusers.

The module of a model's architecture has the name that `ModelConfig.architecture` gives, and an ARCHITECTURE (base.py).
For a transformer it is the beginning of the name of diffusers' class: `flux` for FluxTransformer2DModel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:
    from .base import Architecture


def of_model(config: ModelConfig) -> Architecture:
    """Return the architecture of a model. Raises UserError if no module has it."""
    name = config.architecture
    try:
        architecture: Architecture = importlib.import_module(f".{name}", __name__).ARCHITECTURE
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != f"{__name__}.{name}":
            raise
        raise UserError(f"model {config.name}: transformer.architecture is {name}, which is no model's") from None
    return architecture
