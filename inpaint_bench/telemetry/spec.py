"""What crosses the process boundary: the sidecar's instructions, and the lines of JSON that it prints in return."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from inpaint_bench.core.records import CaptureSource, Device, TelemetryReport
from inpaint_bench.core.validation import Endpoint
from inpaint_bench.telemetry.nvml.api import MIN_INTERVAL_NS, gpu_uuid

MAX_HZ: Final = 1e9 / MIN_INTERVAL_NS


class SidecarSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The instructions of one sidecar. Raises ValueError if they make no sense."""

    run_id: str
    run_dir: str
    uuids: list[str] = []  # replay: only their number counts
    source: str = "nvml"
    capture: str | None = None  # replay: name of a packaged capture, or a file
    fast_hz: float = 10.0
    slow_hz: float = 1.0
    part_s: float = 60.0
    journal_s: float = 5.0
    dcgm_url: str | None = None  # a dcgm-exporter, for GPUs without GPM
    dcgm_every_s: float = 5.0
    parent: int | None = None  # the sidecar ends when its parent has another pid; None: than at its start

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
                raise ValueError("no GPU to sample: source=nvml needs the UUID of every GPU")
            self.uuids = [gpu_uuid(text) for text in self.uuids]
            if len(set(self.uuids)) != len(self.uuids):
                raise ValueError(f"duplicate GPU: {', '.join(self.uuids)}")

    @property
    def folder(self) -> Path:
        """Return the run directory."""
        return Path(self.run_dir)


class Ready(msgspec.Struct, tag="ready"):
    """The first line: the first sample is taken."""

    source: str
    driver: str
    capture: CaptureSource | None
    devices: list[Device]


class NotReady(msgspec.Struct, tag="not_ready"):
    """The first line of a sidecar that cannot start."""

    error: str


class Problem(msgspec.Struct, tag="problem"):
    """Something went wrong, and the sampling continues."""

    kind: str
    detail: str


class FinalReport(msgspec.Struct, tag="final"):
    """The last line: telemetry.json once more, in case that the disk was full."""

    report: TelemetryReport


Message = Ready | NotReady | Problem | FinalReport
