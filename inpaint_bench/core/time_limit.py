"""A training and its time limit: when Slurm says that it comes, and how often the job then starts again by itself.

It saves a checkpoint and goes on from there, so a limit that is too short costs a wait in the queue and no step. A
benchmark is one measured stretch, and half of it is no measurement: its limit ends it, and `rerun` sends it with a
longer one.
"""

from __future__ import annotations

from .config import BenchConfig
from .site import SiteConfig

# Slurm looks every 30 s and signals up to a minute early: of a limit that is hardly longer little would be left.
LIMIT_OVER_WARNING = 10


def requeues(bench: BenchConfig, site: SiteConfig) -> int:
    """How often a job at this site goes back into the queue by itself because its time was up."""
    allowed = site.requeue.request and site.connect.method != "local"
    return bench.rerun.timeout.requeues if allowed and bench.workload.train_steps is not None else 0


def warning_s(bench: BenchConfig, site: SiteConfig) -> int:
    """How long before its limit a job is to be signalled; 0: not at all. Only steps of srun hear of it."""
    wanted = bench.rerun.timeout.warn_s
    if bench.workload.train_steps is None or not site.use_srun or site.connect.method == "local":
        return 0
    return wanted if 60 * int(bench.time_min) >= LIMIT_OVER_WARNING * wanted else 0
