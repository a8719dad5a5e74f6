"""A point of a sweep as it is submitted, and the groups of points that become one Slurm array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from inpaint_bench.core import time_limit
from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.site import SiteConfig
from launchers.sweep.sweep_record import PointSpec

from .composition import ComposedConfig
from .site_catalog import Reachability


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What an array of jobs requests from Slurm. Points of equal site and request share an array."""

    partition: str | None
    gpu_option: tuple[str, str] | None  # sbatch option and value, e.g. ("gres", "gpu:a100:1")
    cpus_per_task: int
    mem_gb: int
    time_min: int
    warning_s: int = 0  # a signal this long before the time limit; 0: none

    def __str__(self) -> str:
        if self.partition is None:
            return "-"
        gpu = "{}={} ".format(*self.gpu_option) if self.gpu_option else ""
        return f"{gpu}cpus={self.cpus_per_task} mem={self.mem_gb}G"


@dataclass(kw_only=True)
class Point:
    """One combination of a sweep: its configuration, its site, and its Slurm request."""

    num: int
    overrides: list[str]
    composed: ComposedConfig
    bench: BenchConfig
    site: SiteConfig
    request: SlurmRequest
    reachability: Reachability
    limit_basis: str = ""  # where `time_min=auto` got the time limit from
    service_units: float | None = None  # of all its starts; None: the site's charging rule is not known
    attempt: int = 1
    run_id: str = ""
    group: str = ""

    @property
    def reachable(self) -> bool:
        """This machine can submit to the point's site."""
        return self.reachability.ok

    @property
    def config(self) -> DictConfig:
        """The composed configuration with Hydra's own node; built anew each time, which takes milliseconds."""
        return self.composed.build()

    @property
    def starts(self) -> int:
        """How often its job may run up to its time limit."""
        return 1 + time_limit.max_requeues(self.bench, self.site)

    @property
    def subdir(self) -> str:
        """Run directory below the sweep directory."""
        return f"{self.num}/attempt-{self.attempt}"

    def planned(self) -> PointSpec:
        """Return the point as the sweep's record has it."""
        return PointSpec(
            point=self.num,
            overrides=self.overrides,
            gpu=self.bench.gpu.name,
            batch=self.bench.batch,
            site=self.site.name,
            time_min=self.starts * self.request.time_min,
            service_units=self.service_units,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Points that are submitted as one array: same site, same request."""

    name: str
    points: tuple[Point, ...]

    @property
    def first(self) -> Point:
        """The first point; site and request are those of all."""
        return self.points[0]


def group_points(points: Sequence[Point], *, first_number: int = 0) -> list[Group]:
    """Group points into arrays of the size that their site allows, in the order of the first point of each.

    Sets `group` of each point. Names are unique in a sweep where `first_number` is above the numbers used so far.
    """
    by_request: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        # the whole site, because a sweep may vary any of its keys
        by_request.setdefault((repr(point.site), repr(point.request)), []).append(point)
    groups: list[Group] = []
    for members in by_request.values():
        limits = members[0].site.limits
        size = min(limits.max_array_size, limits.max_submit_jobs or limits.max_array_size)
        for start in range(0, len(members), size):
            name = _group_name(members[start], first_number + len(groups))
            groups.append(Group(name=name, points=tuple(members[start : start + size])))
            for point in groups[-1].points:
                point.group = name
    return groups


def _group_name(point: Point, number: int) -> str:
    parts = [f"{number:02d}", point.site.name, point.request.partition or "", point.bench.gpu.name]
    return "-".join(re.sub(r"[^A-Za-z0-9_]+", "_", part) for part in parts if part)
