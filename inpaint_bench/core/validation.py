"""Limits on configuration values beyond their type, declared with the field, and the check of a whole tree of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from .errors import UserError

REGULAR_EXPRESSIONS: Final = {"regular_expressions": True}
_PORTS: Final = {"http": 80, "https": 443}


def within(low: float, high: float, default: Any = MISSING) -> Any:
    """Declare a number in the closed range [low, high]; a field of type `int | str` also takes `auto`."""
    return field(default=default, metadata=bounds(low, high))


def bounds(low: float, high: float) -> dict[str, Any]:
    """Return the metadata of a field with a range; of a dict field, every value must lie in it."""
    return {"range": (low, high)}


def one_of(*allowed: str, default: Any = MISSING) -> Any:
    """Declare a string out of a fixed list."""
    return field(default=default, metadata={"choices": allowed})


def regular_expression() -> Any:
    """Declare a regular expression, or null."""
    return field(default=None, metadata=REGULAR_EXPRESSIONS)


def http_address() -> Any:
    """Declare an http:// or https:// address, or null."""
    return field(default=None, metadata={"http_address": True})


def check(value: Any, path: str = "") -> None:
    """Raise UserError for the first value out of its limits, with its key and what is allowed."""
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        for key, item in value.items():
            check(item, f"{prefix}{key}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            check(item, f"{path}[{index}]")
    # YAML has .nan and .inf, and floats of the free-form groups (model.unet, ...) have no range to refuse them.
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{path}={value}: must be a finite number")
    if not is_dataclass(value):
        return
    for spec in fields(value):
        item = getattr(value, spec.name)
        if item is not None:
            _check_field(f"{prefix}{spec.name}", item, spec.metadata)
            check(item, f"{prefix}{spec.name}")


def _check_field(key: str, item: Any, limits: Mapping[str, Any]) -> None:
    if "choices" in limits and item not in limits["choices"]:
        raise UserError(f"{key}={item}: not one of {', '.join(limits['choices'])}")
    if "range" in limits:
        low, high = limits["range"]
        for name, value in item.items() if isinstance(item, dict) else [(None, item)]:
            shown = f"{key}.{name}={value}" if name else f"{key}={value}"
            # Of a field of type `int | str`, for which OmegaConf accepts any text.
            if isinstance(value, str) and value != "auto":
                raise UserError(f"{shown}: must be an integer between {low:,} and {high:,}, or auto")
            if not isinstance(value, str) and not low <= value <= high:
                raise UserError(f"{shown}: must lie between {low:,} and {high:,}")
    if "regular_expressions" in limits:
        for pattern in item if isinstance(item, list) else [item]:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"{key}={pattern}: not a regular expression ({error})") from None
    if "http_address" in limits:
        try:
            Endpoint.parse(item)
        except ValueError as error:
            raise UserError(f"{key}={item}: {error}") from None


@dataclass(frozen=True)
class Endpoint:
    """An HTTP address without credentials, so that it may be written into any file."""

    scheme: str  # http | https
    host: str  # IPv6 without its brackets
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse `http://host:port/path`; the default path is Prometheus's /metrics. Raises ValueError."""
        # urlsplit removes tabs and line breaks without a word, so they are looked for before.
        if not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
            raise ValueError("must be printable ASCII without spaces")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"is not a URL ({error})") from None
        if parts.scheme not in _PORTS:
            raise ValueError("must begin with http:// or https://, such as http://localhost:9400/metrics")
        if not parts.hostname:
            raise ValueError("has no host, such as http://localhost:9400/metrics")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must not hold user, password, query or fragment: it is written into every run's files")
        path = "/metrics" if parts.path in ("", "/") else parts.path
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)

    @property
    def name(self) -> str:
        """Return host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return the whole address."""
        return f"{self.scheme}://{self.name}{self.path}"
