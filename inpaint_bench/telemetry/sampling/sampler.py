"""Reads the lanes of every GPU, and decides what a failure means for the rest.

A lost GPU is an event and one row of nulls; the others go on. When NVML as a whole stops answering it is
opened anew, at growing intervals. Only a driver replaced under a running process ends the sampling.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from inpaint_bench.telemetry.devices import Device, open_device
from inpaint_bench.telemetry.log import log
from inpaint_bench.telemetry.nvml.api import CODES, Nvml, NvmlError
from inpaint_bench.telemetry.nvml.reinit_barrier import Gate

from .streams import BROKEN, FATAL, GPM, LANES, LOST, Lane, Reading
from .ticker import Durations

_BACKOFF_MAX_S = 30.0


class Sampler:
    """`append(table, row)` takes every row and event; it must not block."""

    def __init__(
        self,
        nvml: Nvml,
        devices: list[Device],
        source: str,
        append: Callable[[str, dict[str, Any]], None],
        gate: Gate | None = None,
    ) -> None:
        self.devices = devices
        self.fatal: str | None = None  # why sampling ended, where it had to
        self.durations = {lane.name: Durations() for lane in LANES}
        self._nvml = nvml
        self._source = source
        self._append = append
        self._gate = gate or Gate()
        self._backoff_s = 1.0
        self._reopen_at_s: float | None = None
        self._logged: set[tuple[str, str, int]] = set()

    def sample(self, lane: Lane, seq: int) -> None:
        """One tick of a lane on every GPU that is left. Never raises NvmlError."""
        if self._reopen_at_s is not None and time.monotonic() >= self._reopen_at_s:
            self._reopen()
        answered: list[bool] = []
        for device in self.devices:
            if device.lost or self.fatal:
                continue
            reading = device.readers[lane.name].read(self._nvml, device.handle)
            self.durations[lane.name].add(reading.read_us)
            if reading.empty:
                continue
            self._append(lane.table, reading.row(device.uuid, self._source, seq))
            answered.append(bool(reading.values))
            if reading.codes:
                self._judge(device, lane, reading)
        if answered and all(answered):  # one GPU that is well says nothing of another for whose sake NVML was reopened
            self._backoff_s = 1.0

    def event(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        """A row in `events` and a line in the log."""
        now = {"t_mono_ns": time.monotonic_ns(), "t_unix_ns": time.time_ns()}
        self._append("events", {**now, "kind": kind, "gpu_uuid": gpu_uuid, "detail": detail})
        log(f"{kind} {gpu_uuid or ''} {detail}")

    def _judge(self, device: Device, lane: Lane, reading: Reading) -> None:
        codes = set(reading.codes.values())
        for column, code in reading.codes.items():
            if (device.uuid, column, code) not in self._logged:
                self._logged.add((device.uuid, column, code))
                log(f"{device.uuid} {column}: {_words(code)}")
        if FATAL in codes:
            self.fatal = "the NVIDIA driver was replaced while the sidecar ran"
            self.event("nvml_fatal", self.fatal)
        elif codes & LOST:
            self._lose(device, _words(min(codes & LOST)))
        elif lane is not GPM and not reading.values and codes & BROKEN and self._reopen_at_s is None:
            self.event("nvml_broken", _words(min(codes & BROKEN)), device.uuid)
            self._reopen_at_s = time.monotonic() + self._backoff_s

    def _lose(self, device: Device, why: str) -> None:
        device.lost = True
        self.event("gpu_lost", why, device.uuid)

    def _reopen(self) -> None:
        """Open NVML anew; where it fails, again after twice the time. Helper threads stay outside meanwhile."""
        with self._gate.closed():
            self._open_anew()

    def _open_anew(self) -> None:
        with contextlib.suppress(NvmlError):  # it may not be open any more
            self._nvml.close()
        try:
            self._nvml.open()
            for device in self.devices:
                if not device.lost:
                    self._find_again(device)
        except NvmlError as error:
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
            self._reopen_at_s = time.monotonic() + self._backoff_s
            self.event("nvml_reopen_failed", str(error))
        else:
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
            self._reopen_at_s = None
            self.event("nvml_reopened", "")

    def _find_again(self, device: Device) -> None:
        try:
            device.handle = open_device(self._nvml, device.uuid)
        except ValueError as error:  # gone, or another card answers to the name
            self._lose(device, str(error))
        except NvmlError as error:
            if error.code not in LOST:
                raise
            self._lose(device, str(error))


def _words(code: int) -> str:
    return f"{CODES.get(code, 'NVML error')} (NVML code {code})"
