"""What a job starts with, `python -m launchers.entry FOLDER`: check the folder, then load the job from it."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import SWEEP

from .sweep import private_dirs


def command(python: str, folder: Path) -> str:
    """Return the shell command of a job whose pickle lies in `folder`."""
    return f"{shlex.quote(python)} -u -m {__name__} {shlex.quote(str(folder))}"


def pickle_name(task: int | str) -> str:
    """Return the name that an array task's pickle has until the task starts and renames it to submitit's own."""
    return f"{task}.pkl"


def main(argv: list[str]) -> int:
    """Run the job in the folder `argv[0]`; returns an exit code."""
    folder = Path(argv[0])
    # Before anything is unpickled: whoever can write there could run code as this user.
    try:
        private_dirs.check(folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sweep = next((parent for parent in folder.parents if (parent / SWEEP).is_file()), folder)
    os.umask(os.umask(0o077) | private_dirs.umask(sweep))
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.submission import process_job

    # JobEnvironment looks for the files of the job in the folder that this variable names.
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    job = JobEnvironment()
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    # The job id in submitit's own name is known only now; a requeued job has renamed its pickle before.
    if job.cluster == "slurm" and task and not job.paths.submitted_pickle.exists():
        with suppress(FileNotFoundError):  # another task of the job has done it; submitit waits for the file
            (folder / pickle_name(task)).rename(job.paths.submitted_pickle)
    result = job.paths.result_pickle
    # submitit refuses to write beside the unfinished result of an earlier start of a requeued job
    result.with_suffix(f"{result.suffix}.save_tmp").unlink(missing_ok=True)
    process_job(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
