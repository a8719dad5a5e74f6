"""Checks beside the samples: co-tenants and power limits every 30 s, Xids every second, error counters at both ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import NEVER_SUPPORTED, RECOVERY_ACTIONS, Driver, DriverError, Handle, Value, Xid
from inpaint_bench.telemetry.report import GpuHealth, XidReport

from .devices import MAX_LISTED, DeviceState, classify

INTERVAL_S: Final = 30.0  # a process list may take milliseconds
XID_INTERVAL_S: Final = 1.0  # a poll takes 0.08 ms (H100), at worst 4 ms
_MAX_XID_EVENTS: Final = 100  # per GPU; a failing card can send thousands
_NO_RETRY: Final = NEVER_SUPPORTED | {Null.NO_PERMISSION}

# Query -> the fields of GpuHealth that it feeds, in its order.
_QUERIES: Final = {
    "ecc_volatile": ("ecc_corrected_volatile", "ecc_uncorrected_volatile"),
    "ecc_aggregate": ("ecc_corrected_aggregate", "ecc_uncorrected_aggregate"),
    "remapped_rows": tuple(f"remapped_rows_{kind}" for kind in ("corrected", "uncorrected", "pending", "failed")),
}
_FIELDS: Final = ("pcie_replays", "recovery_action")
_UNCORRECTED: Final = {
    "ecc_uncorrected_volatile": "uncorrectable memory errors since the driver was loaded",
    "ecc_uncorrected_aggregate": "uncorrectable memory errors over the card's life",
    "remapped_rows_uncorrected": "rows remapped after uncorrectable errors",
}


@dataclass
class GpuChecks:
    """The checks of every GPU that is not lost. No method raises DriverError.

    `report(kind, detail, gpu_uuid)` is called with `co_tenant` once per process and GPU and with `xid` for each Xid,
    for the first 100 of a GPU; with `power_limit` at each change; with `ecc` for new errors at the end; with
    `check_failed` if a check failed for another reason than the driver's. `worker` and its descendants are no
    co-tenants.
    """

    driver: Driver
    devices: Sequence[DeviceState]
    worker: int
    report: Callable[[str, str, str | None], None]
    _due_s: float = 0.0  # on time.monotonic(), as the next
    _xids_due_s: float = 0.0
    _unattributed: XidReport = field(default_factory=XidReport)  # XIDs of a GPU that no longer gave its UUID

    def start(self) -> None:
        """Read the error counters."""
        for device in self.devices:
            device.health_start = read_health(self.driver, device.handle)

    def run_if_due(self) -> None:
        """Poll for Xids every second, and check the rest every 30 s."""
        now_s = time.monotonic()
        if now_s >= self._xids_due_s:
            self._xids_due_s = now_s + XID_INTERVAL_S
            self.poll_xids()
        if now_s >= self._due_s:
            self._due_s = now_s + INTERVAL_S
            self.run()

    def finish(self) -> None:
        """Check everything a last time, and report what became worse."""
        self.poll_xids()
        self.run()
        for device in self.devices:
            device.health_end = read_health(self.driver, device.handle)
            if device.health_start is not None:
                for phrase in worsened(device.health_start, device.health_end):
                    self.report("ecc", phrase, device.uuid)

    def run(self) -> None:
        """Check processes and power limits, and watch the GPUs whose Xids are not watched for."""
        self.watch_xids()
        for device in self.devices:
            if device.lost:
                continue
            try:
                self._check_processes(device)
                self._check_power_limit(device)
            except Exception as error:  # our own bug, or an unusual /proc: reported, and the run continues
                if device.processes.failed == 0:
                    self.report("check_failed", f"internal error: {error!r}", device.uuid)
                device.processes.failed += 1
                device.processes.reason = f"internal error: {error!r}"

    def _check_processes(self, device: DeviceState) -> None:
        known = device.processes
        try:
            # The driver lists ids only: whose processes they are is read from /proc.
            pids = self.driver.compute_processes(device.handle)
        except DriverError as error:
            known.failed += 1
            known.reason = error.reason.value
            return
        classes = classify(pids, self.worker)
        known.checks += 1
        known.complete |= classes.complete
        known.unknown |= classes.unknown
        for pid, name in classes.co_tenants.items():
            if pid not in known.co_tenants:
                known.co_tenants[pid] = name
                if len(known.co_tenants) <= MAX_LISTED:
                    self.report("co_tenant", f"pid {pid} {name or 'of unknown name'}", device.uuid)

    def _check_power_limit(self, device: DeviceState) -> None:
        try:
            limit_w = self.driver.query(device.handle, "power_limit_mw") / 1000
        except DriverError:  # a limit that is not given now is no change
            return
        previous_w, device.power_limit_w = device.power_limit_w, limit_w
        if previous_w is not None and previous_w != limit_w:
            self.report("power_limit", f"{previous_w:g} W to {limit_w:g} W", device.uuid)

    def watch_xids(self) -> None:
        """Watch every GPU that is not watched yet and may offer Xids; a failure may have been transient."""
        for device in self.devices:
            if device.lost:
                device.xids.reason = Null.GPU_LOST.value
            elif device.xids.reason is not None and device.retry_xids:
                try:
                    self.driver.watch_xids(device.handle)
                except DriverError as error:
                    device.xids.reason = error.reason.value
                    device.retry_xids = error.reason not in _NO_RETRY
                else:
                    device.xids.count, device.xids.reason = device.xids.count or 0, None

    def poll_xids(self) -> None:
        """Count the Xids that have come since the last call."""
        if all(device.xids.reason for device in self.devices):
            return
        try:
            while (xid := self.driver.next_xid()) is not None:
                self._count(xid)
        except DriverError as error:
            # A device with a reason is watched again by the next `run`, unless it cannot offer Xids.
            for device in self.devices:
                device.xids.reason = error.reason.value

    def _count(self, xid: Xid) -> None:
        devices = {device.uuid: device for device in self.devices}
        # After its Xid a card may not even give its UUID: with a single card it is still clear which one it was.
        device = self.devices[0] if xid.uuid is None and len(devices) == 1 else devices.get(xid.uuid or "")
        xids, number = device.xids if device else self._unattributed, str(xid.number)
        xids.count = (xids.count or 0) + 1
        xids.numbers[number] = xids.numbers.get(number, 0) + 1
        if xids.count <= _MAX_XID_EVENTS:
            self.report("xid", number, device.uuid if device else None)


def read_health(driver: Driver, handle: Handle) -> GpuHealth:
    """Read the error counters; one that is not given is None, with the reason in `nulls`. Never raises DriverError."""
    health = GpuHealth(nulls={})
    for query, names in _QUERIES.items():
        try:
            for name, value in zip(names, driver.query(handle, query), strict=True):
                setattr(health, name, int(value))
        except DriverError as error:
            health.nulls |= dict.fromkeys(names, error.reason.value)
    try:
        results = driver.fields(handle, _FIELDS)
    except DriverError as error:
        results = [Value(None, error)] * len(_FIELDS)
    for name, result in zip(_FIELDS, results, strict=True):
        if result.error or result.value is None:
            health.nulls[name] = result.error.reason.value if result.error else Null.ERROR.value
        elif name == "pcie_replays":
            health.pcie_replays = int(result.value)
        else:
            # The driver may know more actions than we do.
            action = int(result.value)
            health.recovery_action = RECOVERY_ACTIONS[action] if action in range(len(RECOVERY_ACTIONS)) else str(action)
    return health


def worsened(start: GpuHealth, end: GpuHealth) -> list[str]:
    """Return what makes a run on this GPU doubtful, as phrases. A counter that is None on either side says nothing."""
    phrases = []
    # Corrected errors are left out: they cost nothing.
    for name, meaning in _UNCORRECTED.items():
        before, after = getattr(start, name), getattr(end, name)
        if before is not None and after is not None and after > before:
            phrases.append(f"{after - before} new {meaning} ({before} to {after})")
    # Also if it failed before the run: the card still has that row.
    if end.remapped_rows_failed:
        when = {0: "during the run", None: "at an unknown time"}.get(start.remapped_rows_failed, "before the run")
        phrases.append(f"a row could not be remapped, {when}")
    return phrases
