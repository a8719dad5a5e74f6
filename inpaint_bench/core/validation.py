"""What a field of a configuration may hold beyond its type, and the check of a whole tree of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any

from .endpoint import Endpoint
from .errors import UserError


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """A number in the closed range [low, high]."""
    return field(default=default, metadata=bounds(low, high))


def bounds(low: float, high: float) -> dict[str, Any]:
    return {"range": (low, high)}


def one_of(*allowed: str, default: Any = MISSING) -> Any:
    """A word out of a fixed list."""
    return field(default=default, metadata={"choices": allowed})


REGULAR_EXPRESSIONS = {"regular_expressions": True}


def regular_expression() -> Any:
    """A regular expression, or null."""
    return field(default=None, metadata=REGULAR_EXPRESSIONS)


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
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _problems(item, f"{path}[{place}]")
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}={value}: must be a finite number"
    if not is_dataclass(value):
        return
    for spec in fields(value):
        key = f"{path}.{spec.name}" if path else spec.name
        item = getattr(value, spec.name)
        if item is None:
            continue
        if (choices := spec.metadata.get("choices")) and item not in choices:
            yield f"{key}={item}: not one of {', '.join(choices)}"
        if limits := spec.metadata.get("range"):
            low, high = limits
            each = {f"{key}.{name}": one for name, one in item.items()} if isinstance(item, dict) else {key: item}
            for name, one in each.items():
                if isinstance(one, str):
                    if one != "auto":
                        yield f"{name}={one}: must be an integer between {low:,} and {high:,}, or auto"
                elif not low <= one <= high:
                    yield f"{name}={one}: must lie between {low:,} and {high:,}"
        if spec.metadata.get("regular_expressions"):
            for pattern in item if isinstance(item, list) else [item]:
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f"{key}={pattern}: not a regular expression ({error})"
        if spec.metadata.get("http_address"):
            try:
                Endpoint.parse(item)
            except ValueError as error:
                yield f"{key}={item}: {error}"
        yield from _problems(item, key)
