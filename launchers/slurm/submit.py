"""submitit's Slurm executor, told three things it does not know: our template, the site, and its SLURM_CONF."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from inpaint_bench.core.errors import UserError
from launchers import entry
from launchers.points.group import Group

from .environment import for_slurm, replaced
from .script import render

# as Slurm words them (slurm_strerror), and EAGAIN, after which sbatch itself has tried again for minutes
_UNANSWERED = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|in standby mode|"
    "Resource temporarily unavailable|Message (send|receive) failure|Communication (connection|shutdown) failure|"
    "Unexpected message received|Insane message length|Header lengths are longer|Connection (refused|reset|timed out)|"
    "Broken pipe|Transport endpoint"
)
_REFUSED = re.compile("[Bb]atch job submission failed: ")  # before it sbatch may say more, a site's own words too


class UnansweredError(UserError):
    """Slurm gave sbatch no answer: it may have taken the array, and would answer the next call no better."""


class RefusedError(UserError):
    """There is no such array: slurmctld said that it does not take it, or it was never asked."""


def job_command(group: Group, folder: Path) -> str:
    """The shell command of one task: it looks at the folder, then submitit loads the point's pickle and runs it."""
    return entry.command(group.first.site.python or sys.executable, folder)


class SiteExecutor(SlurmExecutor):
    """Submits one group as one array, whatever its size."""

    def __init__(self, group: Group, *, folder: Path, code: Path, job_name: str) -> None:
        super().__init__(folder)
        self._group = group
        self._code = code
        self._job_name = job_name

    @property
    def _submitit_command_str(self) -> str:
        return job_command(self._group, self.folder)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self._group, command=command, folder=self.folder, code=self._code, job_name=self._job_name)

    def _internal_process_submissions(self, delayed: list[utils.DelayedSubmission]) -> list[SlurmJob[Any]]:
        """As upstream's for arrays, which names its own classes, throttles to 256 tasks, and gives the pickles their
        final names when sbatch has answered: an array whose launcher dies in that moment would find none."""
        for index, submission in enumerate(delayed):
            submission.set_timeout(self._group.first.request.time_min, self.max_num_timeout)
            submission.dump(self.folder / entry.pickle_name(index))
        array = self._submit_command(self._submitit_command_str)
        return [
            SlurmJob(folder=self.folder, job_id=f"{array.job_id}_{index}", tasks=[0]) for index in range(len(delayed))
        ]


def submit(group: Group, calls: Sequence[Callable[[], Any]], *, folder: Path, code: Path, job_name: str) -> str:
    """The id of the submitted array.

    Raises UnansweredError, RefusedError with sbatch's own words, and UserError where it is not certain whether Slurm
    took it: on a full disk, and for an answer that says neither.
    """
    folder.mkdir(parents=True, exist_ok=True)
    site = group.first.site.name
    with replaced(for_slurm(group.first.site)):
        executor = SiteExecutor(group, folder=folder, code=code, job_name=job_name)
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what it then raises
                jobs = executor.submit_array(calls)
        except OSError as error:
            raise UserError(f"{site}: {group.name} could not be submitted: {error}") from None
        except utils.FailedJobError as error:
            words = _sbatch_words(error)
            if _UNANSWERED.search(words):
                raise UnansweredError(f"{site}: Slurm did not answer sbatch of {group.name}: {words}") from None
            kind = RefusedError if _REFUSED.search(words) else UserError
            raise kind(f"{site}: sbatch refused {group.name}: {words}") from None
    return str(jobs[0].job_id).split("_")[0]


def _sbatch_words(error: Exception) -> str:
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("subprocess-id"))
