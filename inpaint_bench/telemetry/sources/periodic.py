"""Co-tenants and power limits, checked every 30 s: a process list takes milliseconds under the driver's lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError, null_reason
from inpaint_bench.telemetry.nvml.reinit_barrier import NvmlReinitBarrier
from inpaint_bench.telemetry.runtime import BackgroundThread

from .co_tenants import MAX_LISTED, classify

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import DeviceState

INTERVAL_S: Final = 30.0
_JOIN_S: Final = 0.2


class PeriodicChecks(BackgroundThread):
    """Checks every GPU at the start, every `interval_s` and at the end.

    `report(kind, detail, gpu_uuid)` is called with `co_tenant` once per process and GPU, for the first 100; with
    `power_limit` at each change; with `check_failed` if a check failed for a reason that is not NVML's.
    """

    def __init__(
        self,
        nvml: Nvml,
        devices: Sequence[DeviceState],
        worker: int,
        barrier: NvmlReinitBarrier,
        report: Callable[[str, str, str | None], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__("periodic checks", _JOIN_S)
        self._nvml = nvml
        self._devices = devices
        self._worker = worker
        self._barrier = barrier
        self._report = report
        self._interval_s = interval_s

    def stop(self) -> bool:
        """End the thread and check a last time; return False if NVML still holds the thread."""
        ended = super().stop()
        if ended:
            self.check()
        return ended

    def check(self) -> None:
        """Check every remaining GPU. Never raises."""
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
            with self._barrier.calling():
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
            with self._barrier.calling():
                limit_w = self._nvml.query(device.handle, "power_limit_mw") / 1000
        except NvmlError:  # a limit that is not given now is no change
            return
        previous_w, device.power_limit_w = device.power_limit_w, limit_w
        if previous_w is not None and previous_w != limit_w:
            self._report("power_limit", f"{previous_w:g} W to {limit_w:g} W", device.uuid)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
            self.check()
            due_s = max(due_s + self._interval_s, time.monotonic())
