"""Lines about the progress of a run, for its terminal or its Slurm log."""

import logging
import time

from inpaint_bench.core.records import ManifestHead

INTERVAL_S = 10.0  # rarer than progress is noted: a log of days stays short

log = logging.getLogger(__name__)


class ProgressLog:
    """Logs step, pace and the time that is left, at most every INTERVAL_S."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # when, and at which step
        self._logged_s = 0.0

    def add(self, manifest: ManifestHead) -> None:
        """Log the progress if the last line is old enough. The first is not logged: nothing has been timed yet."""
        progress, now = manifest.progress, time.monotonic()
        if progress is None:
            return
        if self._first is None:
            self._first, self._logged_s = (now, progress.step), now
        if now - self._logged_s < INTERVAL_S:
            return
        self._logged_s = now
        log.info(describe(manifest, now - self._first[0], progress.step - self._first[1]))


def describe(manifest: ManifestHead | None, elapsed_s: float = 0.0, steps: int = 0) -> str:
    """Return `step 40 of 60, 35.7 images/s, about 12 s left`; without the time left if no `steps` were timed."""
    if manifest is None or (progress := manifest.progress) is None:
        began_ns = manifest and manifest.started_unix_ns
        after = f" after {(time.time_ns() - began_ns) / 1e9:.0f} s" if began_ns else ""
        return f"no step yet{after}: loads packages, data and model, compiles or profiles"
    line = f"step {progress.step}{f' of {progress.steps_total}' if progress.steps_total else ''}{manifest.pace}"
    if progress.steps_total and steps > 0:
        left_s = (progress.steps_total - progress.step) * elapsed_s / steps
        line += f", about {left_s:.0f} s left" if left_s < 120 else f", about {left_s / 60:.0f} min left"
    return line
