"""What a field of a configuration may hold beyond its type, and the check of a whole tree of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any

from .endpoint import Endpoint
from .errors import UserError


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """A number in the closed range [low, high]."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(*allowed: str, default: Any = MISSING) -> Any:
    """A word out of a fixed list."""
    return field(default=default, metadata={"choices": allowed})


def http_address() -> Any:
    """An http:// or https:// address, or null."""
    return field(default=None, metadata={"http_address": True})


def check(value: Any, path: str = "") -> None:
    """Refuse impossible values, naming the key, the value and what is allowed. Raises UserError."""
    for message in _problems(value, path):
        raise UserError(message)


def _problems(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _problems(item, f"{path}.{key}" if path else str(key))
    if not is_dataclass(value):
        return
    for spec in fields(value):
        key = f"{path}.{spec.name}" if path else spec.name
        item = getattr(value, spec.name)
        if item is None:
            continue
        if (choices := spec.metadata.get("choices")) and item not in choices:
            yield f"{key}={item}: not one of {', '.join(choices)}"
        if bounds := spec.metadata.get("range"):
            low, high = bounds
            if isinstance(item, str):
                if item != "auto":
                    yield f"{key}={item}: must be an integer between {low:,} and {high:,}, or auto"
            elif not low <= item <= high:
                yield f"{key}={item}: must lie between {low:,} and {high:,}"
        if spec.metadata.get("http_address"):
            try:
                Endpoint.parse(item)
            except ValueError as error:
                yield f"{key}={item}: {error}"
        yield from _problems(item, key)
