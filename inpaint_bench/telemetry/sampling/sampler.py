"""Samples the streams of every GPU, and decides what a failure means for the rest of the run.

A lost GPU is an event and one row of nulls; the others continue. Any other failure costs the values of its tick, and
the next tick tries again. Only a driver that was replaced under the running process ends the sampling. Ticks have
absolute deadlines on CLOCK_MONOTONIC, so that a slow read does not shift the later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import Driver, DriverError, Fault
from inpaint_bench.telemetry.report import StreamReport
from inpaint_bench.telemetry.runtime import log
from inpaint_bench.telemetry.sampling.devices import DeviceState

from .rapl import CpuPackages
from .streams import ENERGY, ENERGY_READS, FAST, GPM, SLOW, STREAMS, Reading, SampleStream

# Reading a GPU more often than every 50 ms is known to give spurious NOT_SUPPORTED and zeros (zeus, issue 186), which
# an H200 did not in 600 polls 5 ms apart. Less than 50 ms: at 20 Hz a late tick could otherwise never be made up for,
# the delays of all ticks would add up, and one in 220 was lost.
MIN_INTERVAL_NS: Final = 40_000_000


class Ticker:
    """Tick i is due at start + i * period.

    A tick that is more than a period late is skipped and counted, never made up for in a burst. Two ticks are at least
    40 ms apart, whatever the deadlines say.
    """

    def __init__(self, period_ns: int, start_ns: int) -> None:
        self.period_ns = period_ns
        self.next_tick = 0  # its number, which is also how many ticks are over
        self.skipped = 0
        self._start_ns = start_ns
        self._last_ns: int | None = None

    def report(self) -> StreamReport:
        """Return the record for telemetry.json."""
        due, done = self.next_tick, self.next_tick - self.skipped
        return StreamReport(hz=1e9 / self.period_ns, ticks_due=due, ticks_done=done, ticks_skipped=self.skipped)

    @property
    def next_ns(self) -> int:
        return max(self._start_ns + self.next_tick * self.period_ns, self.earliest_ns)

    @property
    def earliest_ns(self) -> int:
        """Return the first moment at which a tick may be forced."""
        return self._start_ns if self._last_ns is None else self._last_ns + MIN_INTERVAL_NS

    def take(self, now_ns: int) -> int | None:
        """Return the number of the tick that is due now, None if none is due."""
        if now_ns < self.next_ns:
            return None
        late_ns = now_ns - (self._start_ns + self.next_tick * self.period_ns)
        # At 10 Hz and 250 ms late, two ticks are skipped and the third is taken now, 50 ms late.
        skipped = late_ns // self.period_ns
        self.skipped += skipped
        self.next_tick += skipped
        return self.force(now_ns)

    def force(self, now_ns: int) -> int:
        """Take the next tick ahead of its deadline and return its number."""
        self._last_ns = now_ns
        self.next_tick += 1
        return self.next_tick - 1


@dataclass
class Sampler:
    """Reads the streams at `hz` (stream name -> Hz) and passes every row and event to `append(table, row)`.

    The energy counter, whose reading takes 3 ms on an H200, is read at `energy_hz` in some rows of the fast stream; in
    all of them by default, in the first ones and in the last. `append` must not block. A device that is lost is left
    out from then on.
    """

    driver: Driver
    devices: list[DeviceState]
    source: str
    append: Callable[[str, dict[str, Any]], None]
    hz: Mapping[str, float]
    energy_hz: float | None = None
    packages: CpuPackages | None = None  # read at the ticks of the slow stream
    fatal: str | None = None  # why sampling had to end
    _energy_turn: dict[str, int] = field(default_factory=dict)  # by UUID: in which the energy counter was last read
    _failing: set[str] = field(default_factory=set)  # GPUs of which a read gave no value, each reported once

    def __post_init__(self) -> None:
        start_ns, hz = time.monotonic_ns(), self.hz
        self.tickers = {stream.name: Ticker(round(1e9 / hz[stream.name]), start_ns) for stream in STREAMS}
        self._ticks_per_energy = max(1, round(hz[FAST.name] / self.energy_hz)) if self.energy_hz else 1

    @property
    def next_ns(self) -> int:
        return min(ticker.next_ns for ticker in self.tickers.values())

    def sample_due(self) -> None:
        """Sample every stream that is due."""
        for stream in STREAMS:
            seq = self.tickers[stream.name].take(time.monotonic_ns())
            if seq is not None:
                self.sample(stream, seq)

    def sample_last(self) -> None:
        """Sample every stream once more, as soon as its minimum interval allows."""
        earliest_ns = max(ticker.earliest_ns for ticker in self.tickers.values())
        time.sleep(max(0, earliest_ns - time.monotonic_ns()) / 1e9)
        for stream in STREAMS:
            self.sample(stream, self.tickers[stream.name].force(time.monotonic_ns()), whole=True)

    def sample(self, stream: SampleStream, seq: int, *, whole: bool = False) -> None:
        """Read one stream on every remaining GPU, as tick number `seq`; `whole`: with the energy counter."""
        if stream is SLOW and self.packages:
            self.append("samples_cpu", self.packages.row(self.source, seq))
        for index, device in enumerate(self.devices):
            if device.lost or self.fatal:
                continue
            reader = device.readers[stream.name]
            # GPUs take turns: the counters of eight take half a period at 20 Hz.
            turn = (seq + index) // self._ticks_per_energy
            due = whole or reader.reads < ENERGY_READS or self._energy_turn.get(device.uuid) != turn
            reading = reader.read(self.driver, device.handle, () if due or stream is not FAST else (ENERGY,))
            if reading and ENERGY in reading.values:  # else the next tick tries again
                self._energy_turn[device.uuid] = turn
            # The first GPM sample, or one that came too early: there is no window to average over.
            if reading is None:
                continue
            # Also without a single value: the nulls say why.
            self.append(stream.table, reading.row(device.uuid, self.source, seq))
            if reading.errors:
                self._handle_errors(device, stream, reading)

    def write_event(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        """Write a row of `events` and a line of the log."""
        now = {"t_mono_ns": time.monotonic_ns(), "t_unix_ns": time.time_ns()}
        self.append("events", {**now, "kind": kind, "gpu_uuid": gpu_uuid, "detail": detail})
        log(f"{kind} {gpu_uuid or ''} {detail}")

    def _handle_errors(self, device: DeviceState, stream: SampleStream, reading: Reading) -> None:
        errors = list(reading.errors.values())
        # The library in this process no longer fits the kernel module: all later calls would fail as well.
        if any(error.fault is Fault.DRIVER_REPLACED for error in errors):
            self.fatal = "the NVIDIA driver was replaced while the sidecar ran"
            self.write_event("nvml_fatal", self.fatal)
        elif lost := [error for error in errors if error.reason is Null.GPU_LOST]:
            device.lost = True
            self.write_event("gpu_lost", _first(lost), device.uuid)
        elif stream is GPM or reading.values or device.uuid in self._failing:
            return  # counters may fail while the rest works
        elif broken := [error for error in errors if error.fault is Fault.BROKEN]:
            self._failing.add(device.uuid)
            self.write_event("nvml_broken", _first(broken), device.uuid)


def _first(errors: list[DriverError]) -> str:
    return min(errors, key=lambda error: error.code).text
