"""All use of submitit's private API: jobs as its entry point loads them, and its local executor with our command line.

submitit pickles a job and loads it again on the node; the rest of a submission is ours. A test of this module names the
versions and the signatures that it was tested with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission
from submitit.local.local import LocalExecutor

from launchers import entry

MAX_TIMEOUTS = 3  # submitit's default; our jobs requeue themselves


def write_pickle(job: Callable[[], Any], file: Path, time_min: int) -> None:
    """Pickle a job before sbatch is called.

    submitit's executor gives the pickles their names only when sbatch has answered, so the jobs of a launcher that dies
    in that moment find none. It also limits an array to 256 running tasks.
    """
    submission = DelayedSubmission(job)
    # submitit's signal handler in the job reads both values from the pickle.
    submission.set_timeout(time_min, MAX_TIMEOUTS)
    submission.dump(file)


class LocalJobExecutor(LocalExecutor):
    """Runs a job on this machine through our entry point."""

    @property
    def _submitit_command_str(self) -> str:
        return entry.command(sys.executable, self.folder)
