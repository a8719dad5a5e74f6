"""Networks of our own, and parts that join those of diffusers.

The module of a model's architecture has the name that `ModelConfig.architecture` gives, and an ARCHITECTURE (base.py).
For a transformer it is the beginning of the name of diffusers' class: `flux` for FluxTransformer2DModel.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from inpaint_bench.core.config.bench import ModelConfig
from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:
    from .base import Architecture


def of_model(config: ModelConfig) -> Architecture:
    """Return the architecture of a model. Raises UserError if no module has it."""
    name = config.architecture
    module = importlib.import_module(f".{name}", __name__) if find_spec(f"{__name__}.{name}") else None
    architecture: Architecture | None = getattr(module, "ARCHITECTURE", None)
    if architecture is None:
        raise UserError(f"model {config.name}: transformer.architecture is {name}, which is no model's")
    return architecture
