"""What a training does about the time limit of its job: when Slurm warns it, and how often it requeues itself.

A training saves a checkpoint and continues from there, so a limit that is too short costs a wait in the queue but no
step. A benchmark is one measured window, and half of that is no measurement: the limit ends it, and `rerun` submits
it with a longer one.
"""

from __future__ import annotations

from .bench import BenchConfig
from .site import SiteConfig

# Slurm checks every 30 s and signals up to a minute early: a limit that is not much longer would leave little time.
MIN_LIMIT_OVER_WARNING = 10


def max_requeues(bench: BenchConfig, site: SiteConfig) -> int:
    """Return how often a job at this site may requeue itself at its time limit; 0 for a benchmark."""
    # In a container there is no scontrol to ask for it.
    allowed = site.requeue.request and site.connection.has_slurm and not site.environment.container.image
    return bench.rerun.timeout.requeues if allowed and bench.workload.resumes else 0


def warning_s(bench: BenchConfig, site: SiteConfig) -> int:
    """Return how long before its limit Slurm signals a job; 0: not at all. Only steps that srun started get it."""
    seconds = bench.rerun.timeout.warn_s
    if not bench.workload.resumes or not site.use_srun or not site.connection.has_slurm:
        return 0
    return seconds if 60 * int(bench.time_min) >= MIN_LIMIT_OVER_WARNING * seconds else 0
