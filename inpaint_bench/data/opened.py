"""From a configuration to its images."""

from __future__ import annotations

from ..config import DataConfig
from .folder import FolderSource
from .source import Source
from .synthetic import SyntheticSource


def open_source(config: DataConfig) -> Source:
    """The images that `config` names. Raises UserError where there is no usable one."""
    return FolderSource.open(config) if config.kind == "folder" else SyntheticSource(config)
