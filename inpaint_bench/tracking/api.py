"""What a tracker is: a module with `start(run)`, named by track.module, and what it is told of the run.

A module of one's own needs a YAML in a folder `track` beside conf/track's, and `--config-dir`:

    name: mine
    module: my_package.my_tracker
    package: my_library
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from inpaint_bench.core.config.bench import TrackConfig
from inpaint_bench.core.schema import Status


class Value(NamedTuple):
    """A point of a curve."""

    name: str  # such as loss, power_w or validation/loss
    step: int
    value: float  # may be NaN or infinite
    unix_s: float  # when it was so


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told when a run starts."""

    run_id: str  # unique, and the same if a requeued job continues the run
    name: str  # made of GPU, batch, recipe and seed
    tags: dict[str, str]  # gpu, site, batch, recipe, seed, sweep and others
    settings: TrackConfig
    files: Path  # folder for what the tracker keeps in the run directory; not made yet
    sweep_dir: Path  # folder that all runs of the sweep share; for a single run its own
    tracked_run: str | None  # what `Tracker.tracked_run` was in an earlier start of the same run

    def project(self, variable: str) -> str:
        """Return the name of the project: track.project, else that of the environment, else ours."""
        return self.settings.project or os.environ.get(variable) or "inpaint_bench"


class Tracker(Protocol):
    """An open run. All calls come from one thread; whatever one raises ends the tracking, and never the run."""

    link: str  # address or folder, for people
    tracked_run: str | None  # the tracker's own id of the run, to continue it after a requeue

    def log(self, values: Sequence[Value]) -> None:
        """Write points of curves. Their steps need not be in order."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """Write a PNG file."""

    def finish(self, status: Status) -> None:
        """Write what is left: the run has ended with this status."""
