"""What crosses the process boundary: the sidecar's instructions, and the lines of JSON that it prints in return."""

from __future__ import annotations

from pathlib import Path

import msgspec

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.report import TelemetryReport


class SidecarSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The instructions of one sidecar; rates and intervals are those of TelemetryConfig, which checks them."""

    run_id: str
    run_dir: str
    uuids: list[str] = []  # replay: only their number counts
    source: str = "nvml"  # nvml | replay
    capture: str | None = None  # replay: name of a packaged capture, or a file
    first: int = 0  # replay: number of the first copy; other nodes play those before it
    fast_hz: float = 10.0
    energy_hz: float = 1.0
    slow_hz: float = 1.0
    part_s: float = 60.0
    journal_s: float = 5.0
    parent: int | None = None  # the sidecar ends when its parent has another pid; None: than at its start

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)

    @property
    def counter_hz(self) -> float:
        """Return the readings of the energy counter per second: each is in a row of the fast stream."""
        return min(self.energy_hz, self.fast_hz)


class Ready(msgspec.Struct, tag="ready"):
    """The first line: the first sample is taken."""

    source: str
    driver: str
    devices: list[Device]


class NotReady(msgspec.Struct, tag="not_ready"):
    """The only line of a sidecar that cannot start."""

    error: str


class FinalReport(msgspec.Struct, tag="final"):
    """The last line: telemetry.json once more, in case that the disk was full."""

    report: TelemetryReport


Message = Ready | NotReady | FinalReport
