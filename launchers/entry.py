"""What a job starts with, `python -m launchers.entry FOLDER FILE...`: run the point in the file of its array task."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from inpaint_bench.core.errors import UserError

from .sweep import private_dirs


def command(python: str, folder: Path, files: Sequence[Path]) -> str:
    """Return the shell command of an array whose tasks run the points in these files of a folder."""
    return shlex.join([python, "-u", "-m", __name__, str(folder), *(file.name for file in files)])


def run(file: Path) -> None:
    """Run the point in a file. Raises what failed, and UserError if its run directory belongs to another run."""
    from hydra import version
    from hydra.core.utils import JobRuntime, run_job, setup_globals

    from inpaint_bench.core.hydra_support import register
    from inpaint_bench.run.manifest import check_owner
    from inpaint_bench.run.task import task

    from .points import hydra_internals, point_file

    register()
    setup_globals()  # Hydra's resolvers, such as ${hydra:...}
    config = point_file.read(file)
    run_dir = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir)
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) and _is_complete(run_dir, config.identity.run_id):
        print(f"{run_dir}: an earlier start of this job has completed the run")
        return
    if int(os.environ.get("SLURM_PROCID", "0")):
        _follow(config, run_dir)
        return
    check_owner(run_dir, config.identity.run_id)  # before Hydra writes its own record there
    version.setbase("1.3")  # else jobs would change to their run directory
    JobRuntime.instance().set("name", config.hydra.job.name)
    result = run_job(
        hydra_context=hydra_internals.job_context(config),
        task_function=task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    # Hydra only stores what failed. Raised, it makes the process exit non-zero, so that Slurm records a failure.
    _ = result.return_value


def _is_complete(run_dir: Path, run_id: str) -> bool:
    """Return whether the run has ended well. Slurm 24.11 starts a job that was pre-empted once more after its end."""
    from inpaint_bench.core.attempt_state import RunArtifacts
    from inpaint_bench.core.schema import Status

    artifacts = RunArtifacts.read(run_dir)
    manifest = artifacts.manifest
    if manifest is None or manifest.run_id != run_id:
        return False
    return manifest.status == Status.COMPLETED and not artifacts.missing_parts


def _follow(config: DictConfig, run_dir: Path) -> None:
    """Run the ranks of a node other than the first, where no files of Hydra's are written."""
    from inpaint_bench.core.config.parse import parse_config
    from inpaint_bench.ranks.engine import run_ranks
    from inpaint_bench.run.worker import run_rank

    run_ranks(parse_config(config), run_dir, run_rank)


def main(argv: Sequence[str]) -> int:
    """Run the point of this array task; returns an exit code."""
    folder, files = Path(argv[0]), argv[1:]
    # Until the run has a handler of its own: one that is pre-empted this early is requeued by Slurm when it is killed.
    for signum in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signum, lambda *_: None)
    try:
        private_dirs.check(folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    # A single file is that of a step, in a job of several points (launchers/slurm/blocks.py).
    run(folder / files[int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")) if len(files) > 1 else 0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
