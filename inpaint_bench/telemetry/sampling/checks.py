"""Checks beside the samples: co-tenants and power limits every 30 s, Xids every second, error counters at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import pynvml

from inpaint_bench.telemetry.nvml import Nvml
from inpaint_bench.telemetry.nvml.api import NEVER_SUPPORTED, FieldValue, Handle, NvmlError, Xid, null_reason
from inpaint_bench.telemetry.report import GpuHealth, XidReport

from .co_tenants import MAX_LISTED, classify
from .devices import DeviceState

INTERVAL_S: Final = 30.0  # a process list may take milliseconds
XID_INTERVAL_S: Final = 1.0  # a poll takes 0.08 ms (H100), at worst 4 ms
_MAX_XID_EVENTS: Final = 100  # per GPU; a failing card can send thousands
_NO_RETRY: Final = NEVER_SUPPORTED | {pynvml.NVML_ERROR_NO_PERMISSION}

# Query -> the fields of GpuHealth that it feeds, in its order.
_QUERIES: Final = {
    "ecc_volatile": ("ecc_corrected_volatile", "ecc_uncorrected_volatile"),
    "ecc_aggregate": ("ecc_corrected_aggregate", "ecc_uncorrected_aggregate"),
    "remapped_rows": tuple(f"remapped_rows_{kind}" for kind in ("corrected", "uncorrected", "pending", "failed")),
}
_FIELDS: Final = {
    "pcie_replays": (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0),
    "recovery_action": (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
}
_ACTION: Final = "NVML_GPU_RECOVERY_ACTION_"
RECOVERY_ACTIONS: Final = {v: k.removeprefix(_ACTION).lower() for k, v in vars(pynvml).items() if k.startswith(_ACTION)}
_UNCORRECTED: Final = {
    "ecc_uncorrected_volatile": "uncorrectable memory errors since the driver was loaded",
    "ecc_uncorrected_aggregate": "uncorrectable memory errors over the card's life",
    "remapped_rows_uncorrected": "rows remapped after uncorrectable errors",
}


@dataclass
class GpuChecks:
    """The checks of every GPU that is not lost. No method raises NvmlError.

    `report(kind, detail, gpu_uuid)` is called with `co_tenant` once per process and GPU and with `xid` for each Xid,
    for the first 100 of a GPU; with `power_limit` at each change; with `ecc` for new errors at the end; with
    `check_failed` if a check failed for a reason that is not NVML's. `worker` and its descendants are no co-tenants.
    """

    nvml: Nvml
    devices: Sequence[DeviceState]
    worker: int
    report: Callable[[str, str, str | None], None]
    _due_s: float = 0.0  # on time.monotonic(), as the next
    _xids_due_s: float = 0.0
    _unattributed: XidReport = field(default_factory=XidReport)  # XIDs of a GPU that no longer gave its UUID

    def start(self) -> None:
        """Read the error counters."""
        for device in self.devices:
            device.health_start = read_health(self.nvml, device.handle)

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
            device.health_end = read_health(self.nvml, device.handle)
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
            # NVML lists ids only: whose processes they are is read from /proc.
            pids = self.nvml.compute_processes(device.handle)
        except NvmlError as error:
            known.failed += 1
            known.reason = null_reason(error.code).value
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
            limit_w = self.nvml.query(device.handle, "power_limit_mw") / 1000
        except NvmlError:  # a limit that is not given now is no change
            return
        previous_w, device.power_limit_w = device.power_limit_w, limit_w
        if previous_w is not None and previous_w != limit_w:
            self.report("power_limit", f"{previous_w:g} W to {limit_w:g} W", device.uuid)

    def watch_xids(self) -> None:
        """Watch every GPU that is not watched yet and may offer Xids; a failure may have been transient."""
        for device in self.devices:
            if device.lost:
                device.xids.reason = null_reason(pynvml.NVML_ERROR_GPU_IS_LOST).value
            elif device.xids.reason is not None and device.retry_xids:
                try:
                    self.nvml.watch_xids(device.handle)
                except NvmlError as error:
                    device.xids.reason = null_reason(error.code).value
                    device.retry_xids = error.code not in _NO_RETRY
                else:
                    device.xids.count, device.xids.reason = device.xids.count or 0, None

    def poll_xids(self) -> None:
        """Count the Xids that have come since the last call."""
        if all(device.xids.reason for device in self.devices):
            return
        try:
            while (xid := self.nvml.next_xid()) is not None:
                self._count(xid)
        except NvmlError as error:
            # A device with a reason is watched again by the next `run`, unless it cannot offer Xids.
            for device in self.devices:
                device.xids.reason = null_reason(error.code).value

    def _count(self, xid: Xid) -> None:
        devices = {device.uuid: device for device in self.devices}
        # After its Xid a card may not even give its UUID: with a single card it is still clear which one it was.
        device = self.devices[0] if xid.uuid is None and len(devices) == 1 else devices.get(xid.uuid or "")
        xids, number = device.xids if device else self._unattributed, str(xid.number)
        xids.count = (xids.count or 0) + 1
        xids.numbers[number] = xids.numbers.get(number, 0) + 1
        if xids.count <= _MAX_XID_EVENTS:
            self.report("xid", number, device.uuid if device else None)


def read_health(nvml: Nvml, handle: Handle) -> GpuHealth:
    """Read the error counters; one that is not given is None, with the reason in `nulls`. Never raises NvmlError."""
    health = GpuHealth(nulls={})
    for query, names in _QUERIES.items():
        try:
            for name, value in zip(names, nvml.query(handle, query), strict=True):
                setattr(health, name, int(value))
        except NvmlError as error:
            health.nulls |= dict.fromkeys(names, null_reason(error.code).value)
    try:
        results = nvml.fields(handle, list(_FIELDS.values()))
    except NvmlError as error:
        results = [FieldValue(error.code, None)] * len(_FIELDS)
    for name, result in zip(_FIELDS, results, strict=True):
        if result.code != 0 or result.value is None:
            health.nulls[name] = null_reason(result.code).value
        elif name == "pcie_replays":
            health.pcie_replays = int(result.value)
        else:
            # The driver may know more actions than the binding.
            health.recovery_action = RECOVERY_ACTIONS.get(int(result.value), str(int(result.value)))
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
