"""How the worker starts and stops its sidecar."""

import logging
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from inpaint_bench.core.child import Child
from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.records import Device, TelemetryState, decode_record, read_record, write_record
from inpaint_bench.core.schema import TELEMETRY
from inpaint_bench.telemetry.report import TelemetryReport

from .report import FinalReport, Message, NotReady, Ready, SidecarSpec

LOG: Final = "sidecar.log"
_STOP_TIMEOUT_S: Final = 5.0

log = logging.getLogger(__name__)


class SidecarError(Exception):
    """The sidecar could not be started."""


class SidecarClient:
    """A running sidecar, which ends by itself if the caller dies; with source "none", no process at all."""

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        uuids: Sequence[str],
        settings: TelemetryConfig,
        first: int = 0,
        worker: int | None = None,
    ) -> None:
        """Start sampling `uuids` (with or without "GPU-") into `run_dir`; returns after the first sample.

        `first` is the number of the first of these GPUs in a run on several nodes. `worker` is the process that
        computes on them, by default this one. Raises SidecarError.
        """
        self.devices: list[Device] = []
        self.driver: str | None = None
        self.source = "none"
        self.state = TelemetryState(source="none", status="running")  # for the manifest
        self._run_dir = run_dir
        self._child: Child | None = None
        if settings.source == "none":
            return
        spec = SidecarSpec(
            run_id=run_id,
            run_dir=str(run_dir.absolute()),
            settings=settings,
            uuids=list(uuids),
            first=first,
            parent=os.getpid(),
            worker=worker,
        )
        run_dir.mkdir(parents=True, exist_ok=True)
        self._child = Child(str(__package__), msgspec.json.encode(spec).decode(), log=run_dir / LOG, read_output=True)
        ready = self._await_ready(self._child, settings.ready_timeout_s)
        self.devices, self.driver, self.source = ready.devices, ready.driver, ready.source
        self.state.source, self.state.hz, self.state.energy_hz = ready.source, settings.fast_hz, spec.counter_hz

    def stop(self) -> TelemetryReport:
        """Stop it within 5 s and return its report. The journals of one that died become parts. May be called again."""
        child = self._child
        if child is None:
            return TelemetryReport(status="none", source="none")
        output, ended = child.end(_STOP_TIMEOUT_S, signum=signal.SIGTERM)
        if isinstance(message := _decode(output), FinalReport):
            return message.report  # equal to telemetry.json, unless the disk was full
        # No final line: it died or was killed. The telemetry.json that it refreshed once per part says the most.
        path = self._run_dir / TELEMETRY
        try:
            report = read_record(path, TelemetryReport)
        except ValueError:
            report = None
        report = report or TelemetryReport(status="died", source=self.source)
        report.status, report.source = "died" if ended else "killed", self.source
        report.exit_code = child.process.returncode
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

    def _await_ready(self, child: Child, timeout_s: float) -> Ready:
        output = child.process.stdout
        assert output is not None
        log = self._run_dir / LOG
        if not select.select([output], [], [], timeout_s)[0]:
            child.end(0.0)
            raise SidecarError(f"the telemetry sidecar was not ready within {timeout_s:g} s; see {log}")
        message = _decode(output.readline())
        if isinstance(message, Ready):
            return message
        # Until it has ended: its log is complete only then.
        child.end(timeout_s)
        if isinstance(message, NotReady):
            raise SidecarError(f"telemetry: {message.error}")
        lines = log.read_text(errors="replace").strip().splitlines() or ["its log is empty"]
        raise SidecarError(f"the telemetry sidecar ended before it was ready: {lines[-1]}")


def _decode(line: bytes) -> Message | None:
    """Return the message in a line, None if it is empty or incomplete: the process was killed."""
    try:
        return decode_record(line, Message)
    except msgspec.DecodeError:
        return None
