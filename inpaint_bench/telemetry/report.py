"""Typed records of telemetry.json, the sidecar's own account of a run, of a capture, and between client and sidecar."""

from pathlib import Path

import msgspec

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.records import Device, TableCounts
from inpaint_bench.core.schema import PRODUCER, SCHEMA_VERSION


class GpuHealth(msgspec.Struct, kw_only=True):
    """Error counters of a GPU. volatile: since the driver was loaded; aggregate: over the card's life."""

    ecc_corrected_volatile: int | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_corrected_aggregate: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    remapped_rows_corrected: int | None = None  # rows remapped because of correctable errors
    remapped_rows_uncorrected: int | None = None
    remapped_rows_pending: int | None = None  # 1: takes effect at the next reset
    remapped_rows_failed: int | None = None  # 1: no spare row was left
    pcie_replays: int | None = None
    recovery_action: str | None = None  # the driver's hint: none, gpu_reset, node_reboot, ...
    nulls: dict[str, str] = {}  # field: why it is null


class CoTenant(msgspec.Struct):
    """A process of another job or user on one of the run's GPUs."""

    pid: int
    name: str | None = None  # null: /proc hides it


class ProcessReport(msgspec.Struct, kw_only=True):
    """Processes on one GPU over a run. A process that came and went between two checks is not seen."""

    verdict: str | None = None  # alone | co_tenant | unknown; null: NVML gave no list
    reason: str | None = None  # why there is no verdict
    checks: int = 0  # lists that NVML gave
    failed: int = 0
    num_co_tenants: int = 0
    co_tenants: list[CoTenant] = []  # the first 100
    num_unknown: int = 0  # ids of another pid namespace
    unknown_pids: list[int] = []  # the lowest 100


class XidReport(msgspec.Struct, kw_only=True):
    """Xids (errors that the driver reports) of one GPU."""

    count: int | None = None  # null: they were never watched for
    reason: str | None = None  # why they are not watched for
    numbers: dict[str, int] = {}  # Xid: how often


class DeviceReport(Device, kw_only=True):
    """A GPU and what happened to it during the run."""

    power_limit_last_w: float | None = None  # enforced, at the last check
    lost: bool = False
    absent: list[str] = []  # columns whose sensor the card does not have
    errors: dict[str, dict[str, int]] = {}  # column: {NVML code: how often}, without absent sensors
    health_start: GpuHealth | None = None
    health_end: GpuHealth | None = None
    processes: ProcessReport
    xids: XidReport


class StreamReport(msgspec.Struct, kw_only=True):
    """Ticks of one sample stream. ticks_due = ticks_done + ticks_skipped."""

    hz: float
    ticks_due: int
    ticks_done: int
    ticks_skipped: int  # more than a period late


class StorageReport(msgspec.Struct, kw_only=True):
    """Failed saves, and the failure that lasts."""

    errors: int = 0
    error: str | None = None


class JournalRecovery(msgspec.Struct, kw_only=True):
    """What became of a journal that a killed process left behind."""

    table: str
    outcome: str  # recovered | empty | already_closed | in_use
    part: str | None = None
    rows: int = 0
    truncated: bool = False  # its last message was incomplete and is left out


class CaptureMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where a capture comes from, and how it is replayed."""

    name: str = ""  # that of its file, without suffix
    duration_ms: float
    loop_from_ms: float = 0.0  # replay restarts here after the end; what lies before is played once
    gpu: str | None = None
    driver: str | None = None
    recorded_on: str | None = None
    tool: str | None = None
    synthetic: bool | None = None
    note: str | None = None


class TelemetryReport(msgspec.Struct, kw_only=True):
    """Settings of the sidecar, what it did and what that cost.

    status: none (no sidecar), running, complete, incomplete (rows could not be saved), failed (sampling had to end);
    from the client: killed (it did not stop in time), died (it had ended before).
    """

    status: str
    reason: str | None = None  # why it ended: a signal, parent_gone, an error
    schema_version: int = SCHEMA_VERSION
    producer: str = PRODUCER
    run_id: str | None = None
    source: str  # none | nvml | replay:<capture>
    driver: str | None = None
    nvml: str | None = None  # version
    capture: CaptureMeta | None = None  # the capture of a replay
    boot_id: str | None = None
    host: str | None = None
    pid: int | None = None
    cpus: list[int] = []  # its affinity mask
    started_unix_ns: int | None = None
    started_mono_ns: int | None = None
    updated_unix_ns: int | None = None
    ended_unix_ns: int | None = None
    ended_mono_ns: int | None = None
    energy_hz: float | None = None  # rate of the energy counter; null: read with every fast sample
    part_s: float | None = None
    journal_s: float | None = None
    devices: list[DeviceReport] = []
    streams: dict[str, StreamReport] = {}
    tables: dict[str, TableCounts] = {}
    storage: StorageReport = msgspec.field(default_factory=StorageReport)
    problems: list[str] = []  # "kind: detail" of the first 200 problems
    problems_omitted: int = 0  # the others, which are only in `events`
    cpu_s: float | None = None  # its own
    max_rss_mib: float | None = None
    exit_code: int | None = None  # killed, died
    recovered: list[JournalRecovery] = []
    recovery_error: str | None = None


# --- what crosses the process boundary: the sidecar's instructions, and lines of JSON in return --


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
