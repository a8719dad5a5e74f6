"""A point of a sweep as it is submitted, and the groups of points that become one Slurm array."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.site import SiteConfig
from launchers.sweep.attempt import Attempt

from .site_catalog import Reachability

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


@dataclass(frozen=True, kw_only=True)
class SlurmRequest:
    """What an array of jobs requests from Slurm. Points of equal site and request share an array."""

    partition: str | None
    gpu_option: tuple[str, str] | None  # sbatch option and value, e.g. ("gres", "gpu:a100:1")
    nodes: int = 1
    tasks_per_node: int = 1  # one per GPU
    cpus_per_task: int | None  # None: left to Slurm
    mem_gb: int | None  # per node; None: left to Slurm
    time_min: int
    warning_s: int = 0  # a signal this long before the time limit; 0: none
    features: tuple[str, ...] = ()  # features of the nodes, beside the site's own constraint

    def __str__(self) -> str:
        if self.partition is None:
            return "-"
        gpu = "{}={} ".format(*self.gpu_option) if self.gpu_option else ""
        nodes = f"nodes={self.nodes} " if self.nodes > 1 else ""
        cpus = f"cpus={self.cpus_per_task * self.tasks_per_node} " if self.cpus_per_task else ""
        return f"{nodes}{gpu}{cpus}{f'mem={self.mem_gb}G' if self.mem_gb else ''}".strip() or "-"

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node


@dataclass(frozen=True, kw_only=True)
class ComposedConfig:
    """A point's configuration: what Hydra composed for its groups, and what is set on a copy of that.

    A thousand points of the same groups hold one `base`; composed in full, each would take most of a megabyte.
    """

    base: DictConfig  # with Hydra's own node; never changed
    app: DictConfig  # the same without that node
    values: tuple[Override, ...] = ()
    edits: Mapping[str, Any] = field(default_factory=dict)  # by key; set by our launcher, last

    def with_edits(self, edits: Mapping[str, Any]) -> ComposedConfig:
        """Return a copy that also sets these keys, which exist already or belong to Hydra's own node."""
        return replace(self, edits={**self.edits, **edits})

    def build_app(self) -> DictConfig:
        """Return a new DictConfig without Hydra's own node and without edits. Raises what `build` does."""
        return self._with_values(self.app)

    def build(self) -> DictConfig:
        """Return a new DictConfig. Raises OmegaConf's errors if a value does not fit its key."""
        config = self._with_values(self.base)
        # Hydra makes its own node read-only, and struct mode forbids new keys.
        with read_write(config), open_dict(config):
            for key, value in self.edits.items():
                # Not merged: only the keys of the chosen site may remain in the node `site`.
                OmegaConf.update(config, key, value, merge=False)
        return config

    def _with_values(self, shared: DictConfig) -> DictConfig:
        from . import hydra_internals  # Hydra, which `status` does without

        config = copy.deepcopy(shared)
        hydra_internals.apply_overrides(self.values, config)
        return config


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
    site_basis: str = ""  # what each site said to `site=soonest`
    service_units: float | None = None  # for all its starts; None: not known
    likely_min: float | None = None  # likely time of its run: by earlier runs if points_per_job=auto, else predicted
    attempt: int = 1
    run_id: str = ""
    cluster: str | None = None  # cluster that its script asks sbatch for; None: the local one
    block: int | None = None  # number of the first point of its job, which runs several; None: a job of its own
    block_size: int = 1
    group: str = ""

    @property
    def reachable(self) -> bool:
        """Return whether this machine can submit to the point's site."""
        return self.reachability.ok

    @property
    def has_bounded_rate(self) -> bool:
        """Return whether the site's rate of its GPU is an upper bound."""
        return self.bench.gpu.name in self.site.charging.upper_bounds

    @property
    def starts(self) -> int:
        """Return how often its job may run up to its time limit."""
        return 1 + self.bench.max_requeues(self.site)

    @property
    def subdir(self) -> str:
        return f"{self.num}/attempt-{self.attempt}"

    def requested(self) -> Attempt:
        """Return the point as the sweep's record has it."""
        return Attempt(
            point=self.num,
            overrides=self.overrides,
            gpu=self.bench.gpu.name,
            batch=self.bench.batch,
            site=self.site.name,
            cluster=self.cluster,
            total_time_min=math.ceil(self.starts * self.request.time_min / self.block_size),
            service_units=self.service_units,
            likely_min=self.likely_min,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Points that are submitted as one array: same site, same request."""

    name: str
    site: SiteConfig
    request: SlurmRequest
    points: tuple[Point, ...]

    @property
    def in_blocks(self) -> bool:
        """Return whether its jobs run their points one after another, as steps."""
        return self.points[0].block is not None

    @property
    def tasks(self) -> list[list[Point]]:
        """Return the points of each array task."""
        tasks: dict[int, list[Point]] = {}
        for point in self.points:
            tasks.setdefault(point.num if point.block is None else point.block, []).append(point)
        return list(tasks.values())


@dataclass(kw_only=True)
class SubmitOutcome:
    """How many points of a submission were not accepted as far as is known."""

    not_accepted: int = 0
    unanswered: bool = False  # Slurm, or a site, gave no answer for some of them


Placed = TypeVar("Placed", Point, Group)


def by_site(placed: Iterable[Placed]) -> dict[str, list[Placed]]:
    """Return points or groups by the name of their site."""
    sites: dict[str, list[Placed]] = {}
    for item in placed:
        sites.setdefault(item.site.name, []).append(item)
    return sites


def group_points(points: Sequence[Point], *, first_number: int = 0) -> list[Group]:
    """Group points into arrays of the size that their site allows, in the order of the first point of each.

    Sets `group` of each point. Names are unique in a sweep if `first_number` is above the numbers used so far.
    """
    groups: list[Group] = []
    for members in by_request(points):
        site, request, gpu = members[0].site, members[0].request, members[0].bench.gpu.name
        # Slurm refuses an array with more tasks than a user may have in the queue.
        size = min(site.limits.max_array_size, site.limits.max_submit_jobs or site.limits.max_array_size)
        tasks = Group(name="", site=site, request=request, points=tuple(members)).tasks
        for start in range(0, len(tasks), size):
            parts = [f"{first_number + len(groups):02d}", site.name, request.partition or "", gpu]
            # The name becomes a folder and a part of the job name: plain characters only.
            name = "-".join(re.sub(r"[^A-Za-z0-9_]+", "_", part) for part in parts if part)
            own = tuple(point for task in tasks[start : start + size] for point in task)
            groups.append(Group(name=name, site=site, request=request, points=own))
            for point in own:
                point.group = name
    return groups


def by_request(points: Iterable[Point], *, any_limit: bool = False) -> list[list[Point]]:
    """Return the points of equal site and request together; with `any_limit` their time limits may differ."""
    groups: dict[object, list[Point]] = {}
    sites: dict[int, str] = {}  # most points share the object, and its text takes long to make
    for point in points:
        # the whole site, because a sweep may vary any of its keys
        if id(point.site) not in sites:
            sites[id(point.site)] = repr(point.site)
        request = replace(point.request, time_min=0) if any_limit else point.request
        groups.setdefault((sites[id(point.site)], request, point.block is None), []).append(point)
    return list(groups.values())
