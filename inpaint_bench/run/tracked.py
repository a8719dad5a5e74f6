"""The process of the tracker beside a run, as the manifest and the log tell of it."""

import logging
import time
from contextlib import suppress
from typing import Self

import msgspec

from inpaint_bench import tracking
from inpaint_bench.core.child import Child
from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.config.parse import require_tracker
from inpaint_bench.core.records import Tracking, TrackingReport, read_record
from inpaint_bench.core.schema import TRACKING

from .manifest import ManifestFile

LINK_S = 20.0  # to wait for the link before the first window: a library may take seconds to import
FINISH_S = 60.0  # for the last values and pictures to be sent
FINISH_INTERRUPTED_S = 5.0  # Slurm kills a job 30 s after its signal
LOG = "tracking.log"

log = logging.getLogger(__name__)


class RunTracker:
    """The tracker of a run, which ends after the manifest is final. One that fails costs its curves, never the run."""

    def __init__(self, settings: TrackConfig, manifest: ManifestFile) -> None:
        self._settings, self._manifest = settings, manifest
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start it, if one is asked for. Raises UserError if its library is not installed."""
        if not self._settings.module:
            return
        require_tracker(self._settings)
        try:
            # A process of its own: in the worker it would share the interpreter's lock with the training loop.
            self._child = Child(
                tracking.__name__,
                str(self._manifest.run_dir.absolute()),
                msgspec.json.encode(self._settings).decode(),
                log=self._manifest.run_dir / LOG,
                # It has no business on a GPU, and one core is enough.
                environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._note_problem(str(error))

    def note_link(self) -> None:
        """Write the link into the manifest. Called outside of windows: it may wait for the tracker."""
        if not self._child:
            return
        until_s = time.monotonic() + LINK_S
        while not (report := self._report()) or not report.link:
            if self._child.process.poll() is not None or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        self._note(link=report.link if report else None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._child:
            return
        interrupted = kind is not None and not issubclass(kind, Exception)
        timeout_s = FINISH_INTERRUPTED_S if interrupted else FINISH_S
        # A line and not only the end of the file: loader processes forked from this one hold the pipe open too.
        ended = self._child.end(timeout_s, last=b"end\n")[1]
        report, code = self._report(), self._child.process.returncode
        if not ended:
            self._note_problem(f"it did not end within {timeout_s:g} s and was killed; see {LOG}")
        elif report and report.problem:
            self._note_problem(report.problem)
        elif code:
            self._note_problem(f"its process ended with exit code {code}; see {LOG}")

    def _report(self) -> TrackingReport | None:
        """Return tracking.json as the process wrote it, None before that."""
        with suppress(OSError, ValueError):
            report = read_record(self._manifest.run_dir / TRACKING, TrackingReport)
            return report if report and self._child and report.pid == self._child.process.pid else None
        return None

    def _note_problem(self, problem: str) -> None:
        log.warning("track=%s: curves of this run are missing: %s", self._settings.name, problem)
        with suppress(OSError):  # the disk may be full; the log has it
            self._note(problem=problem)

    def _note(self, **fields: str | None) -> None:
        known = self._manifest.record.tracking or Tracking(name=self._settings.name)
        self._manifest.update(tracking=msgspec.structs.replace(known, **fields))
