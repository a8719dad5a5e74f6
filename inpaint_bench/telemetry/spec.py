"""What a sidecar is told to do: one JSON object, checked before anything is opened."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from inpaint_bench.core.validation import Endpoint
from inpaint_bench.telemetry.nvml.api import MIN_GAP_NS, gpu_uuid

MAX_HZ = 1e9 / MIN_GAP_NS


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One sidecar's orders. Raises ValueError when they make no sense."""

    run_id: str
    run_dir: str
    uuids: list[str] = field(default_factory=list)  # replay: only their number counts
    source: str = "nvml"
    capture: str | None = None  # replay: name of a packaged capture, or a file
    fast_hz: float = 10.0
    slow_hz: float = 1.0
    part_s: float = 60.0
    journal_s: float = 5.0
    dcgm_url: str | None = None  # a dcgm-exporter to ask about GPUs without GPM
    dcgm_every_s: float = 5.0
    parent: int | None = None  # end when this process is no longer the parent; null: the one at the start

    def __post_init__(self) -> None:
        if self.source not in ("nvml", "replay"):
            raise ValueError(f"source={self.source!r}: not one of nvml, replay")
        for name in ("fast_hz", "slow_hz"):
            if not 0 < getattr(self, name) <= MAX_HZ:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0 and at most {MAX_HZ:g}")
        for name in ("part_s", "journal_s", "dcgm_every_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        if self.dcgm_url is not None:
            try:
                Endpoint.parse(self.dcgm_url)
            except ValueError as error:
                raise ValueError(f"dcgm_url={self.dcgm_url}: {error}") from None
        if self.source == "replay" and not self.capture:
            raise ValueError("source=replay needs the name or file of a capture")
        if self.source == "nvml":
            if not self.uuids:
                raise ValueError("no GPU was named: source=nvml needs the UUID of every GPU to watch")
            object.__setattr__(self, "uuids", [gpu_uuid(text) for text in self.uuids])
            if len(set(self.uuids)) != len(self.uuids):
                raise ValueError(f"a GPU was named twice: {', '.join(self.uuids)}")

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """From JSON. Raises ValueError, naming unknown or missing keys."""
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the sidecar's orders are not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError("the sidecar's orders must be one JSON object")
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := given.keys() - known:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        if missing := {"run_id", "run_dir"} - given.keys():
            raise ValueError(f"missing keys {', '.join(sorted(missing))}")
        return cls(**given)
