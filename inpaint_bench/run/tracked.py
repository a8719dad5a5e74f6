"""The tracker beside a run, as the manifest and the log tell of it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Self

import msgspec

from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.config.parse import require_tracker
from inpaint_bench.core.records import Tracking
from inpaint_bench.tracking.client import TrackerClient

from .manifest import ManifestFile

LINK_S = 20.0  # to wait for the link before the first window: a library may take seconds to import
FINISH_S = 60.0  # for the last values and pictures to be sent
FINISH_INTERRUPTED_S = 5.0  # Slurm kills a job 30 s after its signal

log = logging.getLogger(__name__)


class RunTracker:
    """The tracker of a run, which ends after the manifest is final. One that fails costs its curves, never the run."""

    def __init__(self, settings: TrackConfig, manifest: ManifestFile) -> None:
        self._settings, self._manifest = settings, manifest
        self._client: TrackerClient | None = None

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start it, if one is asked for. Raises UserError where its library is not installed."""
        if not self._settings.module:
            return
        require_tracker(self._settings)
        try:
            self._client = TrackerClient(self._settings, self._manifest.run_dir)
        except OSError as error:
            self._note_problem(str(error))

    def note_link(self) -> None:
        """Write the link into the manifest. Called outside of windows: it may wait for the tracker."""
        if self._client:
            self._note(link=self._client.link(LINK_S))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._client:
            return
        interrupted = kind is not None and not issubclass(kind, Exception)
        problem = self._client.stop(FINISH_INTERRUPTED_S if interrupted else FINISH_S)
        if problem:
            self._note_problem(problem)

    def _note_problem(self, problem: str) -> None:
        log.warning("track=%s: curves of this run are missing: %s", self._settings.name, problem)
        with suppress(OSError):  # the disk may be full; the log has it
            self._note(problem=problem)

    def _note(self, **fields: str | None) -> None:
        known = self._manifest.record.tracking or Tracking(name=self._settings.name)
        self._manifest.update(tracking=msgspec.structs.replace(known, **fields))
