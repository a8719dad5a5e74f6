"""The environment of Slurm's commands and of jobs: what they may inherit from the shell that submits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inpaint_bench.core.config.site import SiteConfig

# A sweep is often submitted from inside another job; its allocation must not become the new job's.
_JOB_PREFIXES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "SCANCEL_", "SACCT_", "SQUEUE_", "SINFO_", "SCONTROL_"),
    *("SUBMITIT_", "PMI_", "PMIX_"),
)
_JOB_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HYDRA_FULL_ERROR"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
)


def job_environment() -> dict[str, str]:
    """Return this process's environment without the variables that belong to another job or Slurm command."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_JOB_PREFIXES) and name not in _JOB_VARIABLES
    }


def slurm_environment(site: SiteConfig) -> dict[str, str]:
    """Return the environment for Slurm's commands at one site: no variables of other jobs, and its SLURM_CONF."""
    # Read here, because job_environment() drops SLURM_CONF with all other variables of Slurm.
    conf = site.connect.slurm_conf or os.environ.get("SLURM_CONF")
    return job_environment() | ({"SLURM_CONF": conf} if conf else {})


def python_path(code: Path) -> str:
    """Return a PYTHONPATH with the snapshot first, then what the submitting shell had."""
    return os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))


@contextmanager
def replaced_environ(environment: Mapping[str, str]) -> Iterator[None]:
    """Replace `os.environ` by `environment` inside the block: submitit runs sbatch with the process's own."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
