"""Co-tenants, power limits and the watch for Xids, checked every 30 s: a process list may take milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError, null_reason

from .co_tenants import MAX_LISTED, classify
from .xid import XidMonitor

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import DeviceState

INTERVAL_S: Final = 30.0


class PeriodicChecks:
    """Checks every GPU at the start, every 30 s and at the end.

    `report(kind, detail, gpu_uuid)` is called with `co_tenant` once per process and GPU, for the first 100; with
    `power_limit` at each change; with `check_failed` if a check failed for a reason that is not NVML's.
    """

    def __init__(
        self,
        nvml: Nvml,
        devices: Sequence[DeviceState],
        worker: int,
        xids: XidMonitor,
        report: Callable[[str, str, str | None], None],
    ) -> None:
        self._nvml = nvml
        self._devices = devices
        self._worker = worker
        self._xids = xids
        self._report = report
        self._due_s = time.monotonic()

    def run_if_due(self) -> None:
        """Check at the start and then every 30 s. Never raises."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + INTERVAL_S
            self.run()

    def run(self) -> None:
        """Check every remaining GPU. Never raises."""
        # Watching may have failed for a transient reason.
        self._xids.watch()
        for device in self._devices:
            if device.lost:
                continue
            try:
                self._check_processes(device)
                self._check_power_limit(device)
            except Exception as error:  # our own bug, or an unusual /proc: reported, and the run continues
                if device.processes.failed == 0:
                    self._report("check_failed", f"internal error: {error!r}", device.uuid)
                device.processes.failed += 1
                device.processes.reason = f"internal error: {error!r}"

    def _check_processes(self, device: DeviceState) -> None:
        known = device.processes
        try:
            pids = self._nvml.compute_processes(device.handle)
        except NvmlError as error:
            known.failed += 1
            known.reason = null_reason(error.code).value
            return
        classes = classify(pids, self._worker)
        known.checks += 1
        known.complete |= classes.complete
        known.unknown |= classes.unknown
        for pid, name in classes.co_tenants.items():
            if pid not in known.co_tenants:
                known.co_tenants[pid] = name
                if len(known.co_tenants) <= MAX_LISTED:
                    self._report("co_tenant", f"pid {pid} {name or 'of unknown name'}", device.uuid)

    def _check_power_limit(self, device: DeviceState) -> None:
        try:
            limit_w = self._nvml.query(device.handle, "power_limit_mw") / 1000
        except NvmlError:  # a limit that is not given now is no change
            return
        previous_w, device.power_limit_w = device.power_limit_w, limit_w
        if previous_w is not None and previous_w != limit_w:
            self._report("power_limit", f"{previous_w:g} W to {limit_w:g} W", device.uuid)
