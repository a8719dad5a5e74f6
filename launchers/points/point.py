"""One combination of a sweep: what was asked, where it goes, and with what request."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from inpaint_bench.core import time_limit
from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.site import SiteConfig

from .composition import Composed


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one array of jobs asks Slurm for. Points with an equal site and request share an array."""

    partition: str | None
    gpu_option: tuple[str, str] | None  # sbatch option and value, e.g. ("gres", "gpu:a100:1")
    cpus_per_task: int
    mem_gb: int
    time_min: int
    warning_s: int = 0  # a signal so long before the time limit; 0: none

    def __str__(self) -> str:
        if self.partition is None:
            return "-"
        gpu = "{}={} ".format(*self.gpu_option) if self.gpu_option else ""
        return f"{gpu}cpus={self.cpus_per_task} mem={self.mem_gb}G"


@dataclass(kw_only=True)
class Point:
    num: int
    overrides: list[str]
    composed: Composed
    bench: BenchConfig
    site: SiteConfig
    request: Request
    reachable: bool
    why: str  # why reachable or not
    limit_basis: str = ""  # where the time limit comes from, if not from what was asked
    service_units: float | None = None  # of all its starts; None: the site's rule is not known
    attempt: int = 1
    run_id: str = ""
    group: str = ""

    @property
    def config(self) -> DictConfig:
        """Unfolded, with Hydra's own node; a new one each time, and not cheap."""
        return self.composed.config()

    @property
    def starts(self) -> int:
        """How often its job may run to its time limit."""
        return 1 + time_limit.max_requeues(self.bench, self.site)

    @property
    def subdir(self) -> str:
        """Run directory below the sweep directory."""
        return f"{self.num}/attempt-{self.attempt}"
