"""How the worker starts and stops its sidecar."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from inpaint_bench.core.paths import import_path
from inpaint_bench.core.records import Device, TelemetryState, decode_record, read_record, write_record
from inpaint_bench.core.schema import TELEMETRY
from inpaint_bench.core.telemetry_records import TelemetryReport

from .spec import FinalReport, Message, NotReady, Ready, SidecarSpec

if TYPE_CHECKING:
    from inpaint_bench.core.config.bench import TelemetryConfig

LOG: Final = "sidecar.log"
_FROM_SETTINGS: Final = ("source", "fast_hz", "energy_hz", "slow_hz", "part_s", "journal_s", "dcgm_url", "dcgm_every_s")
_STOP_TIMEOUT_S: Final = 5.0

log = logging.getLogger(__name__)


class SidecarError(Exception):
    """The sidecar could not be started."""


class SidecarClient:
    """A running sidecar; with source "none", no process at all.

    The process gets the caller's import path, and ends by itself if the caller dies.
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes] | None) -> None:
        self.devices: list[Device] = []
        self.driver: str | None = None
        self.source = "none"
        self.state = TelemetryState(source="none", status="running")  # for the manifest
        self._run_dir = run_dir
        self._process = process

    @classmethod
    def start(
        cls,
        run_dir: Path,
        run_id: str,
        uuids: Sequence[str],
        settings: TelemetryConfig,
        capture: str | None = None,
        first: int = 0,
    ) -> SidecarClient:
        """Start sampling `uuids` (with or without "GPU-") into `run_dir`; returns after the first sample.

        `capture` is the default of the GPU model, if settings.capture names none; `first` is the number of the first
        of these GPUs in a run on several nodes. Raises SidecarError.
        """
        if settings.source == "none":
            return cls(run_dir, None)
        spec = SidecarSpec(
            run_id=run_id,
            run_dir=str(run_dir.absolute()),
            uuids=list(uuids),
            capture=settings.capture or capture,
            first=first,
            parent=os.getpid(),
            **{name: getattr(settings, name) for name in _FROM_SETTINGS},
        )
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / LOG).open("ab") as log:
            process = subprocess.Popen(
                # -P: the working directory must not shadow the code of this process
                [sys.executable, "-P", "-m", str(__package__), msgspec.json.encode(spec).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,  # so that what follows the first line is left for `stop`
                stderr=log,
                env={**os.environ, "PYTHONPATH": import_path()},
                start_new_session=True,  # Ctrl-C goes to the worker alone, which stops the sidecar last
            )
        sidecar = cls(run_dir, process)
        sidecar._await_ready(process, settings.ready_timeout_s)
        sidecar.state = TelemetryState(
            source=sidecar.source,
            hz=settings.fast_hz,
            energy_hz=spec.counter_hz,
            status="running",
        )
        return sidecar

    def stop(self) -> TelemetryReport:
        """Stop it and return its report. Takes less than a second, at most about 5 s; may be called again.

        If it had to be killed, or had died, its journals are turned into parts.
        """
        process = self._process
        if process is None:
            return TelemetryReport(status="none", source="none")
        status = "died"
        process.terminate()
        try:
            # Reads on while it waits: the final line may be longer than the pipe's buffer.
            output, _ = process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = "killed"
            process.kill()
            output, _ = process.communicate()
        if isinstance(message := _decode(output), FinalReport):
            return message.report  # equal to telemetry.json, unless the disk was full
        # No final line: it died or was killed. The telemetry.json that it refreshed once per part says the most.
        path = self._run_dir / TELEMETRY
        try:
            report = read_record(path, TelemetryReport)
        except ValueError:
            report = None
        report = report or TelemetryReport(status=status, source=self.source)
        report.status, report.source, report.exit_code = status, self.source, process.returncode
        from inpaint_bench.telemetry.storage.parts import recover_run  # loads pyarrow

        try:
            # The rows since its last closed part are in the journals, whose locks ended with the process.
            report.recovered = recover_run(self._run_dir)
            write_record(path, report)
        except OSError as error:
            report.recovery_error = str(error)
        return report

    def end(self) -> TelemetryState:
        """Stop it and return how it ended, for the manifest. Never raises: that would hide what ended the run."""
        try:
            report = self.stop()
        except Exception as error:
            log.exception("the telemetry sidecar could not be stopped")
            return msgspec.structs.replace(self.state, status="failed", message=str(error))
        if report.status not in ("complete", "none"):
            log.warning("the telemetry sidecar ended as %s: %s", report.status, "; ".join(report.problems) or "?")
        return msgspec.structs.replace(self.state, status=report.status, problems=report.problems)

    def _await_ready(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        assert process.stdout is not None
        log = self._run_dir / LOG
        if not select.select([process.stdout], [], [], timeout_s)[0]:
            process.kill()
            process.communicate()
            raise SidecarError(f"the telemetry sidecar was not ready within {timeout_s:g} s; see {log}")
        message = _decode(process.stdout.readline())
        if isinstance(message, Ready):
            self.devices, self.driver, self.source = message.devices, message.driver, message.source
            return
        # Until it has ended: its log is complete only then.
        process.communicate()
        if isinstance(message, NotReady):
            raise SidecarError(f"telemetry: {message.error}")
        raise SidecarError(f"the telemetry sidecar ended before it was ready: {_last_line(log)}")


def _decode(line: bytes) -> Message | None:
    """Return the message in a line, None if it is empty or incomplete: the process was killed."""
    try:
        return decode_record(line, Message)
    except msgspec.DecodeError:
        return None


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
