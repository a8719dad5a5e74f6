"""How the worker starts and stops the process of the tracker. Nothing here raises because of the tracker."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from inpaint_bench.core.child import Child
from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.records import TrackingReport, read_record
from inpaint_bench.core.schema import TRACKING

LOG = "tracking.log"


class TrackerClient:
    """The process, which ends by itself if the caller dies."""

    def __init__(self, settings: TrackConfig, run_dir: Path) -> None:
        """Start it. Raises OSError."""
        self._run_dir = run_dir
        # A process of its own: in the worker it would share the interpreter's lock with the training loop.
        self._child = Child(
            str(__package__),
            str(run_dir.absolute()),
            msgspec.json.encode(settings).decode(),
            log=run_dir / LOG,
            # It has no business on a GPU, and one core is enough.
            environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def link(self, timeout_s: float) -> str | None:
        """Return the address or folder of the run, None where it is not known in time."""
        until_s = time.monotonic() + timeout_s
        while True:
            report = self._report()
            ended = self._child.process.poll() is not None
            if (report and report.link) or ended or time.monotonic() > until_s:
                return report.link if report else None
            time.sleep(0.05)

    def stop(self, timeout_s: float) -> str | None:
        """Let it read what is left and end, kill it after `timeout_s`. Returns why curves are missing, or None."""
        # A line and not only the end of the file: loader processes forked from this one hold the pipe open too.
        _, ended = self._child.end(timeout_s, last=b"end\n")
        if not ended:
            return f"it did not end within {timeout_s:g} s and was killed; see {LOG}"
        report = self._report()
        if report and report.status == "failed":
            return report.problem
        code = self._child.process.returncode
        return f"its process ended with exit code {code}; see {LOG}" if code else None

    def _report(self) -> TrackingReport | None:
        """Return tracking.json as this process wrote it, None before that."""
        with suppress(OSError, ValueError):
            report = read_record(self._run_dir / TRACKING, TrackingReport)
            return report if report and report.pid == self._child.process.pid else None
        return None
