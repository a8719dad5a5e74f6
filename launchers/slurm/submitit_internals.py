"""All use of submitit's private API: its executors with our command line, script and file names.

submitit pickles a job and loads it again on the node; the rest of a submission is ours. A test of this module names the
versions and the signatures that it was tested with.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission, FailedJobError
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from launchers import entry

SCRIPT = "sbatch.sh"  # in the folder of the array


class ArrayExecutor(SlurmExecutor):
    """Submits jobs as one array, whatever its size, with a script of ours."""

    def __init__(self, folder: Path, *, script: str, time_min: int) -> None:
        super().__init__(folder)
        self._script = script
        self._time_min = time_min

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        """Write the script and call sbatch. Writes nothing afterwards, so an OSError means that nothing was submitted.

        Raises FailedJobError with what sbatch printed.
        """
        script = self.folder / SCRIPT
        script.write_text(self._script, encoding="utf-8")
        # With the descriptor of the sweep's lock: sbatch keeps the lock if this process is killed before it returns.
        sbatch = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, close_fds=False)
        if sbatch.returncode:
            raise FailedJobError(sbatch.stderr)
        if not (accepted := re.search(r"Submitted batch job (\d+)", sbatch.stdout)):
            raise FailedJobError(f"sbatch printed no job id ({sbatch.stdout.strip()[:200]})")
        return SlurmJob(folder=self.folder, job_id=accepted[1], tasks=[0])

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[SlurmJob[Any]]:
        """Write the pickles, then call sbatch.

        submitit's own method gives the pickles their final names only when sbatch has answered, so the jobs of a
        launcher that dies in that moment find none. It also limits an array to 256 running tasks.
        """
        for index, submission in enumerate(delayed_submissions):
            # submitit's signal handler in the job reads both values from the pickle.
            submission.set_timeout(self._time_min, self.max_num_timeout)
            submission.dump(self.folder / entry.pickle_name(index))
        array = self._submit_command("")
        job_ids = [f"{array.job_id}_{index}" for index in range(len(delayed_submissions))]
        return [SlurmJob(folder=self.folder, job_id=job_id, tasks=[0]) for job_id in job_ids]


class LocalJobExecutor(LocalExecutor):
    """Runs a job on this machine through our entry point."""

    @property
    def _submitit_command_str(self) -> str:
        return entry.command(sys.executable, self.folder)
