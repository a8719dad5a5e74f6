"""Choose a site for a point, what to request there, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from inpaint_bench.core import time_limit
from inpaint_bench.core.config import BenchConfig, config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import SiteConfig, SiteGpu, check_account

from .composition import Composition
from .point import Point, SlurmRequest
from .site_catalog import Reachability, SiteCatalog, reachability
from .time_limit import AUTO, RunHistories


def place(
    num: int, overrides: list[str], composition: Composition, catalog: SiteCatalog, histories: RunHistories
) -> Point:
    """Compose, type, check and place one point. Raises UserError, and Hydra's errors for overrides that do not fit."""
    composed = composition(overrides)
    bench, config = composition.typed(composed)
    site, site_reachability = _choose_site(bench, config, catalog)
    check_account(site)
    gpu = site.gpus[bench.gpu.name]
    edits: dict[str, Any] = {"hydra.job.num": num}
    limit_basis = ""
    if bench.time_min == AUTO:
        limit = histories[bench.out].limit(
            site=site.name, gpu=bench.gpu.name, config_hash=config_hash(config), max_minutes=gpu.max_minutes
        )
        edits["time_min"], limit_basis = limit.minutes, limit.basis
        bench = replace(bench, time_min=limit.minutes)
    # the site's dcgm-exporter, where the point names none
    if gpu.dcgm_url is not None and bench.telemetry.dcgm_url is None and bench.telemetry.source == "nvml":
        edits["telemetry.dcgm_url"] = gpu.dcgm_url
        bench = replace(bench, telemetry=replace(bench.telemetry, dcgm_url=gpu.dcgm_url))
    return Point(
        num=num,
        overrides=overrides,
        composed=composed.with_edits(edits),
        bench=bench,
        site=site,
        request=slurm_request(bench, site),
        limit_basis=limit_basis,
        reachability=site_reachability,
        service_units=service_units(bench, site),
    )


def _choose_site(bench: BenchConfig, config: DictConfig, catalog: SiteCatalog) -> tuple[SiteConfig, Reachability]:
    """Prefer a site we are logged in to, then one that can be reached, then the GPU's home site."""
    gpu = bench.gpu.name
    if bench.site.name != "auto":
        site = catalog.site(bench.site.name, config)
        if gpu not in site.gpus:
            raise UserError(f"gpu={gpu}: not on site {site.name}; it has: {', '.join(sorted(site.gpus))}")
        return site, reachability(site)
    home = bench.gpu.home_site
    sites = [catalog.site(name, config) for name in catalog.names if name != "local" or home == "local"]
    candidates = [(site, reachability(site)) for site in sites if gpu in site.gpus]
    if not candidates:
        have = "; ".join(f"{site.name}: {', '.join(sorted(site.gpus))}" for site in sites)
        raise UserError(
            f"gpu={gpu}: no site has it ({have}). "
            "Add it to a file in conf/site, or use site=local if this machine has one."
        )

    def rank(candidate: tuple[SiteConfig, Reachability]) -> tuple[bool, bool, bool]:
        site, reach = candidate
        return (not (reach.on_site and reach.ok), not reach.ok, site.name != home)

    return min(candidates, key=rank)


def slurm_request(bench: BenchConfig, site: SiteConfig) -> SlurmRequest:
    """Return what the point requests. Raises UserError where the partition's limits do not allow it."""
    entry = site.gpus[bench.gpu.name]
    time_min = int(bench.time_min)
    if time_min > entry.max_minutes:
        raise UserError(
            f"time_min={bench.time_min}: partition {entry.partition} of {site.name} allows {entry.max_minutes}"
        )
    if bench.gpus > entry.max_per_node:
        raise UserError(f"gpus={bench.gpus}: a node of {site.name} has {entry.max_per_node} {bench.gpu.name}")
    if bench.mem_gb is not None and bench.mem_gb > node_mem_gb(entry):
        raise UserError(
            f"mem_gb={bench.mem_gb}: a node with {bench.gpu.name} of {site.name} has {node_mem_gb(entry)} G for jobs"
        )
    local = site.connect.method == "local"  # nothing is requested
    option = {
        "gres": ("gres", f"gpu:{entry.gres or bench.gpu.name}:{bench.gpus}"),
        "gpus_per_node": ("gpus-per-node", str(bench.gpus)),
        "none": None,
    }["none" if local else entry.request]
    return SlurmRequest(
        partition=None if local else entry.partition,
        gpu_option=option,
        cpus_per_task=entry.cpus_per_gpu * bench.gpus,
        mem_gb=bench.mem_gb or entry.mem_gb_per_gpu * bench.gpus,
        time_min=time_min,
        warning_s=time_limit.warning_s(bench, site),
    )


def node_mem_gb(entry: SiteGpu) -> int:
    """Return the memory that a node has for jobs at least: the share of each of its GPUs."""
    return entry.mem_gb_per_gpu * entry.max_per_node


def service_units(bench: BenchConfig, site: SiteConfig) -> float | None:
    """Return the service units if each start of the job runs to its time limit. None: charging rule not known."""
    rule, entry = site.charging, site.gpus[bench.gpu.name]
    mem_gb = slurm_request(bench, site).mem_gb * 2**30 / 1e9  # Slurm's G is 2^30 bytes, the rule's GB 10^9
    shares = []
    if rule.gpus_per_unit:
        shares.append(bench.gpus / rule.gpus_per_unit)
    if rule.cores_per_unit:
        shares.append(entry.cpus_per_gpu * bench.gpus / rule.cores_per_unit)
    if per_unit := rule.mem_gb_per_unit.get(bench.gpu.name):
        shares.append(mem_gb / per_unit)
    if not shares or entry.charge_factor is None or site.connect.method == "local":
        return None
    hours = (1 + time_limit.max_requeues(bench, site)) * int(bench.time_min) / 60
    combined = sum(shares) if rule.combine == "sum" else max(shares)
    return combined * entry.charge_factor * hours
