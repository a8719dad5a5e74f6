"""Hydra's and OmegaConf's errors as one sentence: the key, the value, and what is allowed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

_OF_A_RESOLVER = "UserError raised while resolving interpolation: "


def explain(error: Exception, prefix: str = "") -> str:
    """`prefix` is put before a key, where only a part of the configuration was looked at."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _unknown_key(cause, cause.parent_node, prefix)
    if isinstance(cause, ValidationError):
        return f"{prefix}{cause.full_key}: {str(cause).splitlines()[0]}{_allowed(cause)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name}: no such choice; have: {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        said = str(error).splitlines()[0].removeprefix("LexerNoViableAltException: ")
        return f"{error.override}: not KEY=VALUE as Hydra reads it ({said})"
    said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return said.removeprefix(_OF_A_RESOLVER)


def _unknown_key(error: OmegaConfBaseException, parent: DictConfig, prefix: str) -> str:
    valid = sorted(str(key) for key in parent if key != "hydra")
    path = f"{prefix}{error.full_key or error.key}"
    where = f"in {path.rpartition('.')[0]}" if "." in path else "at the top"
    close = get_close_matches(path.rpartition(".")[2], valid, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    return f"{path}: no such key {where}.{guess} Valid: {', '.join(valid)}"


def _allowed(error: ValidationError) -> str:
    """The range or the choices that the field's dataclass names, if any."""
    owner: Any = OmegaConf.get_type(error.parent_node) if isinstance(error.parent_node, DictConfig) else None
    if not is_dataclass(owner):
        return ""
    for spec in fields(owner):
        if spec.name == error.key and (bounds := spec.metadata.get("range")):
            if "str" in str(spec.type):
                return f"; allowed: an integer between {bounds[0]:,} and {bounds[1]:,}, or auto"
            return f"; allowed: {bounds[0]:,} to {bounds[1]:,}"
    return ""
