"""Xids: the driver's reports of serious errors, heard by a thread of its own.

Only what happens while it listens is heard. Where the GPU or the driver does not offer it, the count is null
with the reason; the sampling never waits for this thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from inpaint_bench.telemetry.devices import Device
from inpaint_bench.telemetry.log import log
from inpaint_bench.telemetry.nvml.api import NOT_IN_CAPTURE, Nvml, NvmlError
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate
from inpaint_bench.telemetry.sampling.streams import null_reason

from .thread import Helper

WAIT_MS: Final = 250  # not the usual 1000: SIGTERM leaves the sidecar less than a second in all
_JOIN_S: Final = 0.5
_BACKOFF_S: Final = (1.0, 30.0)
_NEVER: Final = frozenset({3, 4, 13, 26, NOT_IN_CAPTURE})  # asking again would not help
_MAX_ROWS: Final = 100  # per GPU; a failing card can send thousands


class XidWatch(Helper):
    """`report(kind, detail, gpu_uuid)` hears `xid` with the number, for each up to 100 per GPU."""

    def __init__(
        self, nvml: Nvml, devices: Sequence[Device], gate: Gate, report: Callable[[str, str, str | None], None]
    ) -> None:
        super().__init__("xids", _JOIN_S)
        self._nvml = nvml
        self._devices = devices
        self._gate = gate
        self._report = report
        self._backoff_s = _BACKOFF_S[0]
        self._nameless = 0  # Xids of a GPU that no longer gave its name

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._listen():
                    return
            except NvmlError as error:
                for device in self._devices:
                    device.xids.reason = null_reason(error.code).value
                if error.code in _NEVER:
                    return
                log(f"xids: {error}")
                self._stopping.wait(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
            except Exception as error:  # a mistake of ours must be seen in the account, and end nothing else
                for device in self._devices:
                    device.xids.reason = f"internal error: {error!r}"
                return

    def _listen(self) -> bool:
        """Until told to stop or NVML was opened anew; False where no GPU offers it. Raises NvmlError."""
        with self._gate.calling():
            generation = self._gate.generation
            events = self._nvml.event_set()
            try:
                worth = self._register(events)
            except BaseException:
                self._free(events)
                raise
        try:
            while worth and not self._stopping.is_set():
                with self._gate.calling():
                    if self._gate.generation != generation:
                        return True
                    xid = self._nvml.next_xid(events, WAIT_MS)
                self._backoff_s = _BACKOFF_S[0]
                if xid is not None:
                    self._tell(xid.uuid, xid.number)
        finally:
            with self._gate.calling():
                if self._gate.generation == generation:
                    self._free(events)
        return worth

    def _register(self, events: Any) -> bool:
        """Whether any GPU is listened to. Raises the error of the last one where asking again may help."""
        again: NvmlError | None = None
        listening = False
        for device in self._devices:
            if device.lost:
                device.xids.reason = null_reason(15).value
                continue
            try:
                self._nvml.watch_xids(events, device.handle)
            except NvmlError as error:
                device.xids.reason = null_reason(error.code).value
                again = again if error.code in _NEVER else error
            else:
                device.xids.listened, device.xids.reason = True, None
                listening = True
        if again is not None and not listening:
            raise again
        return listening

    def _free(self, events: Any) -> None:
        with contextlib.suppress(NvmlError):
            self._nvml.free_events(events)

    def _tell(self, uuid: str | None, number: int) -> None:
        for device in self._devices:
            if device.uuid == uuid or (uuid is None and len(self._devices) == 1):
                device.xids.numbers[number] += 1
                if device.xids.numbers.total() <= _MAX_ROWS:
                    self._report("xid", str(number), device.uuid)
                return
        self._nameless += 1
        if self._nameless <= _MAX_ROWS:
            self._report("xid", str(number), None)
