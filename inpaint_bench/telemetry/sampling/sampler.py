"""Samples the streams of every GPU and the energy of processors, and decides what a failure means for the rest.

A lost GPU is an event and one row of nulls; the others continue. Any other failure costs the values of its tick, and
the next tick tries again. Only a driver that was replaced under the running process ends the sampling. Ticks have
absolute deadlines on CLOCK_MONOTONIC, so that a slow read does not shift the later ones.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import Driver, DriverError, Fault
from inpaint_bench.telemetry.report import StreamReport
from inpaint_bench.telemetry.runtime import log
from inpaint_bench.telemetry.sampling.devices import DeviceState

from .streams import ENERGY, ENERGY_READS, FAST, GPM, SLOW, STREAMS, Reading, SampleStream

# --- energy of the node's processor packages, by RAPL --------------------------------------------

# The counters that Linux offers below /sys/class/powercap; AMD's processors appear in the same tree. Since Linux 5.10
# only root may read the counters, unless the site allows it. A package is the whole socket without its memory, and all
# jobs of the node share it.
COLUMN: Final = "energy_uj"
POWERCAP: Final = Path("/sys/class/powercap")
CPUINFO: Final = Path("/proc/cpuinfo")


class CpuPackages:
    """Reads the energy of all packages, as a sum that grows from 0: a counter that wraps around is continued."""

    def __init__(self, root: Path = POWERCAP, cpuinfo: Path = CPUINFO, *, replayed: bool = False) -> None:
        # Other zones (core, psys) are a part of a package or contain it, and intel-rapl-mmio:0 is the same one again.
        names = [] if replayed else sorted(root.glob("intel-rapl:*/name"))
        self._zones = [name.parent for name in names if name.read_text().startswith("package")]
        virtual = " hypervisor" in cpuinfo.read_text()
        self._missing = Null.NOT_IN_CAPTURE if replayed else Null.VIRTUAL_MACHINE if virtual else Null.NO_RAPL
        self._whole_node = holds_node()
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0

    def row(self, source: str, seq: int) -> dict[str, Any]:
        """Return a row of samples_cpu without run_id; the energy is null with a reason if a package gives none."""
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        energy_uj, reason = self._read()
        duration_ns = time.monotonic_ns() - start_ns
        return {
            "source": source,
            "tick_seq": seq,
            "t_mono_ns": start_ns + duration_ns // 2,
            "t_unix_ns": unix_ns + duration_ns // 2,
            "read_us": duration_ns / 1000,
            COLUMN: energy_uj,
            "whole_node": self._whole_node,
            "nulls": reason and f"{COLUMN}={reason}",
        }

    def _read(self) -> tuple[int | None, Null | None]:
        if not self._zones:
            return None, self._missing
        try:
            # All before any is counted: what one package fails to give is in the next sum.
            now_uj = {zone: int((zone / COLUMN).read_text()) for zone in self._zones}
            range_uj = {zone: int((zone / "max_energy_range_uj").read_text()) for zone in self._zones}
        except PermissionError:
            return None, Null.NO_PERMISSION
        except (OSError, ValueError):
            return None, Null.ERROR
        for zone, last_uj in self._last_uj.items():
            grown_uj = now_uj[zone] - last_uj
            self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + range_uj[zone]
        self._last_uj = now_uj
        return self._total_uj, None


def holds_node() -> bool:
    """Return whether the job may use every CPU of its nodes: by Slurm's allocation, else by the affinity mask."""
    allocated = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))  # "72(x2),36"
    return min(map(int, allocated or [len(os.sched_getaffinity(0))])) >= (os.cpu_count() or 1)


# --- GPUs ----------------------------------------------------------------------------------------

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
