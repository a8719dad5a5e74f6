"""Xids, the driver's reports of serious errors, received by a thread of its own.

Only Xids that come while the thread listens are received. If the GPU or the driver does not offer them, the count is
null with the reason; the sampling never waits for this thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pynvml

from inpaint_bench.core.records import XidReport
from inpaint_bench.telemetry.nvml.api import NEVER_SUPPORTED, Nvml, NvmlError, null_reason
from inpaint_bench.telemetry.nvml.reinit_barrier import NvmlReinitBarrier
from inpaint_bench.telemetry.runtime import BackgroundThread, log

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import DeviceState

WAIT_MS: Final = 250  # not the usual 1000: after SIGTERM, the sidecar has less than a second in all
_JOIN_S: Final = 0.5
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 30.0
_NO_RETRY: Final = NEVER_SUPPORTED | {pynvml.NVML_ERROR_NO_PERMISSION}
_MAX_EVENTS: Final = 100  # per GPU; a failing card can send thousands


@dataclass
class XidCounts:
    """Xids of one GPU over the run."""

    numbers: Counter[int] = field(default_factory=Counter)
    listened: bool = False
    reason: str | None = "not_started"  # why nothing is listened for

    def report(self) -> XidReport:
        """Return the record for telemetry.json."""
        return XidReport(
            count=self.numbers.total() if self.listened else None,
            reason=self.reason,
            numbers={str(number): count for number, count in sorted(self.numbers.items())},
        )


class XidMonitor(BackgroundThread):
    """Counts Xids. `report(kind, detail, gpu_uuid)` is called with `xid` and its number, up to 100 times per GPU."""

    def __init__(
        self,
        nvml: Nvml,
        devices: Sequence[DeviceState],
        barrier: NvmlReinitBarrier,
        report: Callable[[str, str, str | None], None],
    ) -> None:
        super().__init__("xids", _JOIN_S)
        self._nvml = nvml
        self._devices = devices
        self._barrier = barrier
        self._report = report
        self._backoff_s = _BACKOFF_S
        self._unattributed = 0  # Xids of a GPU that no longer gave its UUID

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._listen():
                    return
            except NvmlError as error:
                self._set_reason(null_reason(error.code).value)
                if error.code in _NO_RETRY:
                    return
                log(f"xids: {error}")
                self._stopping.wait(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
            except Exception as error:  # our own bug must show in the report, and end nothing else
                self._set_reason(f"internal error: {error!r}")
                return

    def _set_reason(self, reason: str) -> None:
        for device in self._devices:
            device.xids.reason = reason

    def _listen(self) -> bool:
        """Listen until stopped or until NVML is reopened; return False if no GPU offers it. Raises NvmlError."""
        with self._barrier.calling():
            generation = self._barrier.generation
            events = self._nvml.event_set()
            try:
                listening = self._register(events)
            except BaseException:
                self._free(events)
                raise
        try:
            while listening and not self._stopping.is_set():
                with self._barrier.calling():
                    if self._barrier.generation != generation:
                        return True
                    xid = self._nvml.next_xid(events, WAIT_MS)
                self._backoff_s = _BACKOFF_S
                if xid is not None:
                    self._count(xid.uuid, xid.number)
        finally:
            with self._barrier.calling():
                if self._barrier.generation == generation:
                    self._free(events)
        return listening

    def _register(self, events: Any) -> bool:
        """Register every GPU; return whether any offers Xids. Raises the last error if only a retry may help."""
        retry: NvmlError | None = None
        listening = False
        for device in self._devices:
            if device.lost:
                device.xids.reason = null_reason(pynvml.NVML_ERROR_GPU_IS_LOST).value
                continue
            try:
                self._nvml.watch_xids(events, device.handle)
            except NvmlError as error:
                device.xids.reason = null_reason(error.code).value
                retry = retry if error.code in _NO_RETRY else error
            else:
                device.xids.listened, device.xids.reason = True, None
                listening = True
        if retry is not None and not listening:
            raise retry
        return listening

    def _free(self, events: Any) -> None:
        with contextlib.suppress(NvmlError):
            self._nvml.free_events(events)

    def _count(self, uuid: str | None, number: int) -> None:
        for device in self._devices:
            if device.uuid == uuid or (uuid is None and len(self._devices) == 1):
                device.xids.numbers[number] += 1
                if device.xids.numbers.total() <= _MAX_EVENTS:
                    self._report("xid", str(number), device.uuid)
                return
        self._unattributed += 1
        if self._unattributed <= _MAX_EVENTS:
            self._report("xid", str(number), None)
