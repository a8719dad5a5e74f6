"""What crosses the process boundary: the sidecar's instructions, and the lines of JSON that it prints in return."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.driver import Driver
from inpaint_bench.telemetry.report import CaptureMeta, TelemetryReport


class SidecarSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The instructions of one sidecar."""

    run_id: str
    run_dir: str
    settings: TelemetryConfig
    uuids: list[str] = []  # replay: only their number counts
    first: int = 0  # replay: number of the first copy; other nodes play those before it
    parent: int  # the sidecar ends when its parent has another pid: the worker may have died before it looks
    worker: int | None = None  # whose processes are no co-tenants; None: the parent's

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)

    @property
    def counter_hz(self) -> float:
        """Return the readings of the energy counter per second: each is in a row of the fast stream."""
        return min(self.settings.energy_hz, self.settings.fast_hz)


class Source(NamedTuple):
    """What a vendor's `open_source` returns: the value of the `source` column, and the GPUs to sample."""

    name: str
    driver: Driver
    uuids: list[str]
    capture: CaptureMeta | None = None  # what is replayed


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
