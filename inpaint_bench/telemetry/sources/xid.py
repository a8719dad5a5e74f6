"""Xids, the driver's reports of serious errors.

Only Xids that come while they are watched for are received. If the GPU or the driver does not offer them, the count is
null with the reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pynvml

from inpaint_bench.core.records import XidReport
from inpaint_bench.telemetry.nvml.api import NEVER_SUPPORTED, Nvml, NvmlError, Xid, null_reason

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import DeviceState

_NO_RETRY: Final = NEVER_SUPPORTED | {pynvml.NVML_ERROR_NO_PERMISSION}
POLL_INTERVAL_S: Final = 1.0
_MAX_EVENTS: Final = 100  # per GPU; a failing card can send thousands


@dataclass
class XidCounts:
    """Xids of one GPU over the run."""

    numbers: Counter[int] = field(default_factory=Counter)
    watched: bool = False  # at some time
    retry: bool = True
    reason: str | None = "not_started"  # why they are not watched for

    def report(self) -> XidReport:
        """Return the record for telemetry.json."""
        return XidReport(
            count=self.numbers.total() if self.watched else None,
            reason=self.reason,
            numbers={str(number): count for number, count in sorted(self.numbers.items())},
        )


class XidMonitor:
    """Counts Xids. `report(kind, detail, gpu_uuid)` is called with `xid` and its number, up to 100 times per GPU."""

    def __init__(
        self, nvml: Nvml, devices: Sequence[DeviceState], report: Callable[[str, str, str | None], None]
    ) -> None:
        self._nvml = nvml
        self._devices = devices
        self._report = report
        self._due_s = time.monotonic()
        self._unattributed = 0  # Xids of a GPU that no longer gave its UUID

    def reopened(self) -> None:
        """Watch anew after NVML was reopened, which ended all watching. Never raises."""
        for device in self._devices:
            device.xids.reason = device.xids.reason or "nvml_reopened"
        self.watch()

    def watch(self) -> None:
        """Watch every GPU that is not watched yet and may offer Xids. Never raises."""
        for device in self._devices:
            if device.lost:
                device.xids.reason = null_reason(pynvml.NVML_ERROR_GPU_IS_LOST).value
            elif device.xids.reason is not None and device.xids.retry:
                try:
                    self._nvml.watch_xids(device.handle)
                except NvmlError as error:
                    device.xids.reason = null_reason(error.code).value
                    device.xids.retry = error.code not in _NO_RETRY
                else:
                    device.xids.watched, device.xids.reason = True, None

    def poll_if_due(self) -> None:
        """Poll every second: a poll takes 0.08 ms (H100), at worst 4 ms. Never raises."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + POLL_INTERVAL_S
            self.poll()

    def poll(self) -> None:
        """Count the Xids that have come since the last call. Never raises."""
        if all(device.xids.reason for device in self._devices):
            return
        try:
            while (xid := self._nvml.next_xid()) is not None:
                self._count(xid)
        except NvmlError as error:
            for device in self._devices:
                device.xids.reason = null_reason(error.code).value

    def _count(self, xid: Xid) -> None:
        for device in self._devices:
            if device.uuid == xid.uuid or (xid.uuid is None and len(self._devices) == 1):
                device.xids.numbers[xid.number] += 1
                if device.xids.numbers.total() <= _MAX_EVENTS:
                    self._report("xid", str(xid.number), device.uuid)
                return
        self._unattributed += 1
        if self._unattributed <= _MAX_EVENTS:
            self._report("xid", str(xid.number), None)
