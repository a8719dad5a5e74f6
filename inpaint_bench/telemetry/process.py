"""One sidecar's run: open the GPUs, sample until told to stop, close everything."""

import contextlib
import fcntl
import gc
import os
import platform
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from inpaint_bench.core.environment import boot_id
from inpaint_bench.core.records import decode_record, write_record
from inpaint_bench.core.schema import NODE_TABLES, TELEMETRY, UNKNOWN, file_metadata
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.driver import DriverError, Fault
from inpaint_bench.telemetry.report import StorageReport, TelemetryReport
from inpaint_bench.telemetry.sampling.checks import GpuChecks
from inpaint_bench.telemetry.sampling.devices import PowerLimits
from inpaint_bench.telemetry.sampling.sampler import CpuPackages, Sampler
from inpaint_bench.telemetry.sampling.streams import stream_rates
from inpaint_bench.telemetry.storage.background import BackgroundSaver
from inpaint_bench.telemetry.storage.parts import PartWriter

from .report import FinalReport, Message, NotReady, Ready, SidecarSpec
from .runtime import log, wait_for_stop
from .sampling.devices import open_devices

_MAX_WAIT_S: Final = 0.5
_LOCK_TIMEOUT_S: Final = 1.0
MAX_PROBLEMS: Final = 200  # in telemetry.json; a disk that fails now and then causes thousands in a week


class SidecarProcess:
    """A sidecar from its instructions to its last line. Raises DriverError, ValueError or OSError."""

    def __init__(self, spec: SidecarSpec) -> None:
        self._spec = spec
        settings = spec.settings
        spec.folder.mkdir(parents=True, exist_ok=True)
        # Before the driver and the tables are opened: a second sidecar is refused before it can change anything.
        _lock(spec.folder)
        # The vendor's folder; replays are of NVML.
        vendor = import_module(f"{__package__}.{'nvml' if settings.source == 'replay' else settings.source}")
        source, self._driver, uuids, capture = vendor.open_source(spec)
        self._driver.open()
        self._limits: PowerLimits | None = None
        if settings.power_limit_w is not None:  # for replays it is refused earlier
            self._limits = PowerLimits(self._driver, uuids, settings.power_limit_w)
        devices = open_devices(self._driver, uuids)
        driver, library = self._driver.driver_version(), self._driver.library_version()
        self._ready = Ready(source, driver, [device.facts for device in devices])
        self._identity = TelemetryReport(
            status="running",
            run_id=spec.run_id,
            source=source,
            driver=driver,
            nvml=library,
            capture=capture,
            boot_id=boot_id(),
            host=platform.node(),
            pid=os.getpid(),
            cpus=sorted(os.sched_getaffinity(0)),
            started_unix_ns=time.time_ns(),
            started_mono_ns=time.monotonic_ns(),
            energy_hz=spec.counter_hz,
            part_s=settings.part_s,
            journal_s=settings.journal_s,
        )
        self._problems: list[str] = []
        self._problems_omitted = 0
        self._checks = GpuChecks(self._driver, devices, spec.worker or spec.parent, self.report_problem)
        metadata = {
            **file_metadata(spec.run_id),
            "source": source,
            "driver": driver,
            "nvml": library,
            "boot_id": self._identity.boot_id or UNKNOWN,
            "clock": "CLOCK_MONOTONIC",
        }
        # Opening a table turns the journal that a killed sidecar left into a part: a requeued job keeps its folder.
        writers = {n: PartWriter(spec.folder / n, SCHEMAS[n], metadata, settings.part_s) for n in NODE_TABLES}
        # A part is closed by a save, so saves must come at least as often as parts.
        journal_s = min(settings.part_s, settings.journal_s)
        self._tables = BackgroundSaver(writers, journal_s, self.report_problem, self._refresh_report)
        self._next_refresh_s = time.monotonic() + settings.part_s
        # Last: its first tick is due now, and opening the tables may take longer than a period.
        rates = stream_rates(settings)
        packages = CpuPackages(replayed=capture is not None)
        append, energy_hz = self._tables.append, settings.energy_hz
        self._sampler = Sampler(self._driver, devices, source, append, rates, energy_hz, packages)

    def run(self) -> int:
        """Sample until told to stop. Returns the exit code."""
        # The first sample comes before everything that can wait.
        self._sampler.sample_due()
        self._checks.start()
        write_record(self._spec.folder / TELEMETRY, self.report("running"))
        self._tables.start()
        # The worker waits for this line: its first window then opens after the first sample.
        send(self._ready)
        gc.freeze()  # what is allocated so far stays: no later collection has to walk it
        try:
            while (reason := self._wait()) is None:
                self._sampler.sample_due()
                self._checks.run_if_due()
            # A sample after the last window: its energy is interpolated to the edge, never extrapolated.
            self._sampler.sample_last()
            self._checks.finish()
        except Exception as error:  # our own bug: what was sampled is still saved
            log(traceback.format_exc())
            self._sampler.fatal = reason = f"internal error: {error!r}"
        return self._close(reason)

    def report_problem(self, kind: str, detail: str, gpu_uuid: str | None = None) -> None:
        """Write an event and a line of telemetry.json. Any thread."""
        self._sampler.write_event(kind, detail, gpu_uuid)
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(f"{kind}: {detail}")
        else:
            self._problems_omitted += 1

    def report(self, status: str, reason: str | None = None) -> TelemetryReport:
        """Return telemetry.json as of now; `reason` is why the sidecar ended."""
        ended = status != "running"
        return msgspec.structs.replace(
            self._identity,
            status=status,
            reason=reason,
            updated_unix_ns=time.time_ns(),
            ended_unix_ns=time.time_ns() if ended else None,
            ended_mono_ns=time.monotonic_ns() if ended else None,
            devices=[device.report() for device in self._sampler.devices],
            streams={name: ticker.report() for name, ticker in self._sampler.tickers.items()},
            tables=self._tables.counts(),
            storage=StorageReport(errors=self._tables.errors, error=self._tables.error),
            problems=list(self._problems),
            problems_omitted=self._problems_omitted,
            cpu_s=round(time.process_time(), 3),
            max_rss_mib=_peak_rss_mib(),
        )

    def _wait(self) -> str | None:
        """Sleep until the next tick; return the reason to stop, if there is one."""
        if self._sampler.fatal:
            return self._sampler.fatal
        # Never longer than _MAX_WAIT_S: the parent's death sends no signal and is noticed only after a wait.
        wait_s = (self._sampler.next_ns - time.monotonic_ns()) / 1e9
        return wait_for_stop(min(max(0.0, wait_s), _MAX_WAIT_S), self._spec.parent)

    def _refresh_report(self) -> None:
        """Rewrite telemetry.json once per part, so that a kill -9 leaves recent counts. Storage thread."""
        if time.monotonic() >= self._next_refresh_s:
            self._next_refresh_s = time.monotonic() + self._spec.settings.part_s
            try:
                write_record(self._spec.folder / TELEMETRY, self.report("running"))
            except Exception as error:  # the thread that saves the rows must go on
                log(f"{TELEMETRY}: {error!r}")

    def _close(self, reason: str | None) -> int:
        # Tables first: the report says whether every row is saved.
        saved = self._tables.close()
        report = self.report("failed" if self._sampler.fatal else "complete" if saved else "incomplete", reason)
        try:
            write_record(self._spec.folder / TELEMETRY, report)
        except OSError as error:
            report.status, report.storage.error = "incomplete", f"{TELEMETRY}: {error}"
        # Also on stdout: the disk may have refused the file.
        send(FinalReport(report))
        if self._limits:
            self._limits.restore()
        with contextlib.suppress(DriverError):  # a lost driver cannot be closed
            self._driver.close()
        return 0 if report.status == "complete" else 1


def _peak_rss_mib() -> float | None:
    # Not getrusage: its maximum also holds the parent's, from before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return round(int(peak) / 1024, 1) if peak else None


def _lock(folder: Path) -> None:
    """Lock the run directory while this process lives; wait for the sidecar of a killed worker. Raises ValueError."""
    # Not closed on purpose: the lock lasts as long as the handle, that is, until the process ends.
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise ValueError(f"{folder}: another sidecar is writing to this folder") from None
            time.sleep(0.05)
        except OSError:  # a file system without locks on folders; a journal that is in use is refused all the same
            return


def send(message: Message) -> None:
    """Print a line of JSON for the client. A client that is gone is no reason to stop."""
    line = msgspec.json.encode(message) + b"\n"
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(1, line) :]


def _start_error(error: Exception) -> str:
    if isinstance(error, DriverError) and error.fault is Fault.NO_DRIVER:
        return f"this node has no working NVIDIA driver ({error}); telemetry=replay or telemetry=none run without one"
    return str(error)


def run_sidecar(spec_json: str) -> int:
    """Run a sidecar by its instructions; signals must be blocked already. Returns the exit code."""
    # Arrow's thread pools would take cores from the training.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        return SidecarProcess(decode_record(spec_json, SidecarSpec)).run()
    except (DriverError, ValueError, TypeError, OSError) as error:
        send(NotReady(_start_error(error)))
        log(repr(error))
        return 2
