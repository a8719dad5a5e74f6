"""How the worker starts, watches and ends its sidecar."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.schema import TELEMETRY
from inpaint_bench.telemetry.storage.recover import recover

from .spec import Spec

if TYPE_CHECKING:
    from inpaint_bench.core.config import TelemetryConfig

LOG: Final = "sidecar.log"
_STOP_S: Final = 5.0


class SidecarError(Exception):
    """Telemetry did not start; one sentence."""


class Sidecar:
    """A running sidecar, or nothing at all where source is "none".

    The process sees the caller's import path and no more. It ends by itself when the caller dies.
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[str] | None) -> None:
        self.devices: list[dict[str, Any]] = []
        self.driver: str | None = None
        self.source = "none"
        self.capture: dict[str, Any] | None = None  # replay: where its numbers come from
        self._run_dir = run_dir
        self._process = process
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._problems: list[str] = []
        self._final: dict[str, Any] | None = None
        self._result: dict[str, Any] | None = None
        if process is not None:
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    @classmethod
    def start(
        cls,
        run_dir: Path,
        run_id: str,
        uuids: Sequence[str],
        settings: TelemetryConfig,
        capture: str | None = None,
    ) -> Sidecar:
        """Start sampling `uuids` (with or without "GPU-") into `run_dir`; returns after the first sample.

        `capture` is the GPU's own one; settings.capture goes before it. Raises SidecarError.
        """
        if settings.source == "none":
            return cls(run_dir, None)
        try:
            spec = Spec(
                run_id=run_id,
                run_dir=str(run_dir.absolute()),
                uuids=list(uuids),
                source=settings.source,
                capture=settings.capture or capture,
                fast_hz=settings.fast_hz,
                slow_hz=settings.slow_hz,
                part_s=settings.part_s,
                journal_s=settings.journal_s,
                dcgm_url=settings.dcgm_url,
                dcgm_every_s=settings.dcgm_every_s,
                parent=os.getpid(),
            )
        except ValueError as error:
            raise SidecarError(f"telemetry: {error}") from None
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / LOG).open("ab") as log:
            process = subprocess.Popen(
                # -P: the working directory must not shadow the code of this very process
                [sys.executable, "-P", "-m", f"{__package__}.process", json.dumps(vars(spec))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": _import_path()},
                start_new_session=True,  # Ctrl-C is the worker's: it stops the sidecar last
            )
        sidecar = cls(run_dir, process)
        sidecar._await_ready(settings.ready_timeout_s)
        return sidecar

    def alive(self) -> bool:
        """Whether it is still sampling; always True where source is "none"."""
        return self._process is None or self._process.poll() is None

    def problems(self) -> list[str]:
        """What it has reported since the start, such as "storage_failed: ..."."""
        self._drain()
        return list(self._problems)

    def stop(self) -> dict[str, Any]:
        """End it and return its account of itself (telemetry.json). Takes under a second, at most about 5 s.

        Status is "killed" where it had to be, "died" where it had ended before without closing; its
        journals are then turned into parts. Calling it again returns the same.
        """
        if self._process is None:
            return {"status": "none", "source": "none"}
        if self._result is None:
            self._result = self._end(self._process)
        return self._result

    def _end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        killed = False
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            killed = True
            process.kill()
            process.wait()
        self._drain(until_end=True)
        path = self._run_dir / TELEMETRY
        try:
            state = read_json(path) or {}
        except ValueError:
            state = {}
        if self._final is not None:
            return self._final  # what telemetry.json says, or would say if the disk had room
        state.update(
            status="killed" if killed else "died",
            source=self.source,
            exit_code=process.returncode,
            problems=self._problems,
        )
        try:
            state["recovered"] = recover(self._run_dir)
            replace_json(path, state)
        except OSError as error:
            state["recovered_error"] = str(error)
        return state

    def _await_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        try:
            hello = self._lines.get(timeout=timeout_s)  # always the first line
        except queue.Empty:
            self._abandon()
            raise SidecarError(
                f"the telemetry sidecar was not ready within {timeout_s:g} s; see {self._run_dir / LOG}"
            ) from None
        if hello is None:
            self._process.wait()
            raise SidecarError(f"the telemetry sidecar ended before it was ready: {_last_line(self._run_dir / LOG)}")
        if not hello["ready"]:
            self._process.wait()
            raise SidecarError(f"telemetry: {hello['error']}")
        self.devices, self.driver = hello["devices"], hello["driver"]
        self.source, self.capture = hello["source"], hello["capture"]

    def _abandon(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self._lines.put(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a killed process
        self._lines.put(None)

    def _drain(self, until_end: bool = False) -> None:
        """Take the lines that have come; `until_end`: all of an ended process."""
        give_up_s = time.monotonic() + 1.0
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, give_up_s - time.monotonic()) if until_end else 0)
            except queue.Empty:
                return
            if line is None:
                return
            if "problem" in line:
                self._problems.append(f"{line['problem']}: {line['detail']}")
            self._final = line.get("final", self._final)


def _import_path() -> str:
    """The folder that this package was imported from, then the rest of the caller's path, all absolute."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *(os.path.abspath(entry) for entry in sys.path)]  # noqa: PTH100 - "" means the cwd
    return os.pathsep.join(dict.fromkeys(paths))


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
