"""Where a metrics exporter answers: read from a URL when a configuration is, long before it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """An HTTP address without secrets: what it says may stand in any file."""

    scheme: str  # http | https
    host: str  # IPv6 without its brackets
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Of `http://host:port/path`; without a path it is /metrics, as for Prometheus. Raises ValueError."""
        if not url.isascii() or any(letter <= " " or letter == "\x7f" for letter in url):
            raise ValueError("must be printable ASCII without spaces")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"is no URL ({error})") from None
        if parts.scheme not in _PORTS:
            raise ValueError("must begin with http:// or https://, such as http://localhost:9400/metrics")
        if not parts.hostname:
            raise ValueError("names no host, such as http://localhost:9400/metrics")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must hold no user, password, query or fragment: it is written into every run's files")
        path = "/metrics" if parts.path in ("", "/") else parts.path
        return cls(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)

    @property
    def name(self) -> str:
        """host:port"""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}{self.path}"
