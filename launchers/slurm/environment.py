"""What a job may inherit from the shell that submits it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inpaint_bench.core.site import SiteConfig

# A sweep is often submitted from inside another job; its allocation must not become the new job's.
_LEAKS = tuple(
    f"{name}_"
    for name in (
        *("SLURM", "SLURMD", "SRUN", "SBATCH", "SALLOC", "SCANCEL", "SACCT", "SQUEUE", "SINFO", "SCONTROL"),
        *("SUBMITIT", "PMI", "PMIX"),
    )
)
_LEAK_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "HYDRA_FULL_ERROR",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
    }
)


def leaks(environment: Mapping[str, str]) -> list[str]:
    return sorted(k for k in environment if k.startswith(_LEAKS) or k in _LEAK_NAMES)


def for_slurm(site: SiteConfig) -> dict[str, str]:
    """The environment of Slurm's commands for one site: no leak, and the SLURM_CONF of that site."""
    hidden = set(leaks(os.environ))
    clean = {k: v for k, v in os.environ.items() if k not in hidden}
    conf = site.connect.slurm_conf or os.environ.get("SLURM_CONF")
    if conf:
        clean["SLURM_CONF"] = conf
    return clean


def python_path(code: Path) -> str:
    """The snapshot first, then whatever the submitting shell had."""
    return os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))


@contextmanager
def replaced(environment: Mapping[str, str]) -> Iterator[None]:
    """`os.environ` becomes `environment` inside the block."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
