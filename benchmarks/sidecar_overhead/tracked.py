"""The files of a run, in the directory of a block, and a tracker that follows them as it follows a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Manifest, TrackingReport, read_record
from inpaint_bench.core.schema import MANIFEST, PRODUCER, SCHEMA_VERSION, TRACKING, WINDOWS, Status, file_metadata
from inpaint_bench.core.tables import STEPS
from inpaint_bench.run.manifest import ManifestFile
from inpaint_bench.run.tracked import RunTracker
from inpaint_bench.telemetry.storage.background import saving_in_background
from inpaint_bench.telemetry.storage.parts import PartWriter


class BlockFiles:
    """Manifest, windows and steps of a block, which a run writes with and without a tracker; and the tracker."""

    def __init__(self, bench: BenchConfig, run_dir: Path, windows: Path, run_id: str, *, tracked: bool) -> None:
        """Write what a run has before its first window. Raises UserError if the tracker does not start."""
        record = Manifest(
            schema_version=SCHEMA_VERSION,
            producer=PRODUCER,
            run_id=run_id,
            status=Status.RUNNING,
            gpu=bench.gpu.name,
            batch=0 if bench.searches_batch else bench.batch_size,
            seed=bench.seed,
        )
        self._manifest = ManifestFile(run_dir / MANIFEST, record)
        self._manifest.update()
        (run_dir / WINDOWS).symlink_to(windows)
        self._rows = PartWriter(run_dir / "steps", STEPS, file_metadata(run_id), bench.telemetry.part_s)
        self._saving = ExitStack()
        self._saving.enter_context(saving_in_background(self._rows, bench.telemetry.journal_s))
        self._tracker = ExitStack()
        self.tracker_cpu_s: float | None = None  # known when it has ended
        if tracked:
            tracker = self._tracker.enter_context(RunTracker(bench.track, self._manifest))
            tracker.start()
            tracker.note_link()
            if not (record.tracking and record.tracking.link):
                raise UserError(f"track={bench.track.name}: {self.close() or 'it gave no link'}")

    @property
    def append(self) -> Callable[..., None]:
        """Return the function that adds a row of a step."""
        return self._rows.append

    @property
    def progress(self) -> Callable[[int, int | None, float | None], None]:
        """Return the function that notes the progress."""
        return self._manifest.progress

    def close(self) -> str | None:
        """End the tracker. Returns why it failed, or None."""
        self._saving.close()
        self._rows.close()
        self._manifest.finish(Status.COMPLETED)
        self._tracker.close()
        report = read_record(self._manifest.path.with_name(TRACKING), TrackingReport)
        self.tracker_cpu_s = report.cpu_s if report else None
        return self._manifest.record.tracking.problem if self._manifest.record.tracking else None
