"""What may change around a run and costs too much to sample: who else computes on our GPUs, and the power limit.

A thread looks at the start, every 30 s, and once more at the end. A process list takes milliseconds under the
driver's lock, so it is never asked for in a sampling lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from inpaint_bench.telemetry.nvml.api import Nvml, NvmlError
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate
from inpaint_bench.telemetry.sampling.streams import null_reason

from .co_tenants import MOST_NAMED, tell_apart
from .thread import Helper

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import Device

EVERY_S: Final = 30.0
_JOIN_S: Final = 0.2


class Rounds(Helper):
    """`report(kind, detail, gpu_uuid)` hears `co_tenant` for each of the first 100 processes of a GPU, once;
    `power_limit` at each change; `rounds` where a look failed in a way that is no answer of NVML's.
    """

    def __init__(
        self,
        nvml: Nvml,
        devices: Sequence[Device],
        worker: int,
        gate: Gate,
        report: Callable[[str, str, str | None], None],
        every_s: float = EVERY_S,
    ) -> None:
        super().__init__("rounds", _JOIN_S)
        self._nvml = nvml
        self._devices = devices
        self._worker = worker
        self._gate = gate
        self._report = report
        self._every_s = every_s

    def stop(self) -> bool:
        """End the thread and look a last time; False where NVML still holds the thread."""
        ended = super().stop()
        if ended:
            self.check()
        return ended

    def check(self) -> None:
        """One look at every GPU that is left. Never raises."""
        for device in self._devices:
            if device.lost:
                continue
            try:
                self._look_at_processes(device)
                self._look_at_power_limit(device)
            except Exception as error:  # a mistake of ours, or a /proc unlike any known: said, and the run goes on
                if device.processes.failed == 0:
                    self._report("rounds", f"internal error: {error!r}", device.uuid)
                device.processes.failed += 1
                device.processes.reason = f"internal error: {error!r}"

    def _look_at_processes(self, device: Device) -> None:
        known = device.processes
        try:
            with self._gate.calling():
                pids = self._nvml.compute_processes(device.handle)
        except NvmlError as error:
            known.failed += 1
            known.reason = null_reason(error.code).value
            return
        found = tell_apart(pids, self._worker)
        known.checks += 1
        known.trusted |= found.trusted
        known.unknown |= found.unknown
        for pid, name in found.strangers.items():
            if pid not in known.strangers:
                known.strangers[pid] = name
                if len(known.strangers) <= MOST_NAMED:
                    self._report("co_tenant", f"pid {pid} {name or 'of unknown name'}", device.uuid)

    def _look_at_power_limit(self, device: Device) -> None:
        """A limit that is not given now says nothing of a change."""
        try:
            with self._gate.calling():
                now_w = self._nvml.power_limit_mw(device.handle) / 1000
        except NvmlError:
            return
        before_w, device.power_limit_w = device.power_limit_w, now_w
        if before_w is not None and before_w != now_w:
            self._report("power_limit", f"{before_w:g} W to {now_w:g} W", device.uuid)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
            self.check()
            due_s = max(due_s + self._every_s, time.monotonic())
