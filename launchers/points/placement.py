"""Which site a point goes to, what is asked of it there, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from inpaint_bench.core import time_limit
from inpaint_bench.core.config import BenchConfig, config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import SiteConfig, SiteGpu, check_account

from .composition import Composition
from .point import Point, Request
from .site_catalog import Catalogue, Reachable, reachable
from .time_limit import AUTO, Histories


def place(
    num: int, overrides: list[str], composition: Composition, catalogue: Catalogue, histories: Histories | None = None
) -> Point:
    """Compose, type, check and place one point. Raises UserError, and Hydra's errors for overrides that do not fit.

    `histories` keeps what `time_min=auto` has read of earlier runs from one point to the next.
    """
    composed = composition(overrides)
    bench, config = composition.typed(composed)
    site, reach = _choose(bench, config, catalogue)
    check_account(site)
    edits: dict[str, Any] = {"hydra.job.num": num}
    limit = None
    if bench.time_min == AUTO:
        history = (histories or Histories())[bench.out]
        most = site.gpus[bench.gpu.name].max_minutes
        limit = history.limit(site=site.name, gpu=bench.gpu.name, config_hash=config_hash(config), most=most)
        edits["time_min"] = limit.minutes
        bench = replace(bench, time_min=limit.minutes)
    url = _exporter(bench, site)
    if url is not None:
        edits["telemetry.dcgm_url"] = url
        bench = replace(bench, telemetry=replace(bench.telemetry, dcgm_url=url))
    return Point(
        num=num,
        overrides=overrides,
        composed=composed.edited(edits),
        bench=bench,
        site=site,
        request=request(bench, site),
        limit_basis=limit.basis if limit else "",
        reachable=reach.yes,
        why=reach.why,
        service_units=service_units(bench, site),
    )


def _exporter(bench: BenchConfig, site: SiteConfig) -> str | None:
    """The site's dcgm-exporter goes into the point's own configuration, where that names none."""
    if bench.telemetry.dcgm_url is not None or bench.telemetry.source != "nvml":
        return None
    return site.gpus[bench.gpu.name].dcgm_url


def _choose(bench: BenchConfig, config: DictConfig, catalogue: Catalogue) -> tuple[SiteConfig, Reachable]:
    gpu = bench.gpu.name
    if bench.site.name != "auto":
        site = catalogue.site(bench.site.name, config)
        if gpu not in site.gpus:
            raise UserError(f"gpu={gpu}: not on site {site.name}; it has: {', '.join(sorted(site.gpus))}")
        return site, reachable(site)
    home = bench.gpu.home_site
    known = [catalogue.site(name, config) for name in catalogue.names if name != "local" or home == "local"]
    serving = [(site, reachable(site)) for site in known if gpu in site.gpus]
    if not serving:
        have = "; ".join(f"{site.name}: {', '.join(sorted(site.gpus))}" for site in known)
        raise UserError(
            f"gpu={gpu}: no site serves it ({have}). "
            "Add it to a file in conf/site, or say site=local if this machine has one."
        )

    def preference(item: tuple[SiteConfig, Reachable]) -> tuple[bool, bool, bool]:
        site, reach = item
        return (not (reach.standing and reach.yes), not reach.yes, site.name != home)

    return min(serving, key=preference)


def request(bench: BenchConfig, site: SiteConfig) -> Request:
    """Raises UserError where the partition's limits do not allow it."""
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
    here = site.connect.method == "local"  # nothing is asked of anyone
    option = {
        "gres": ("gres", f"gpu:{entry.gres or bench.gpu.name}:{bench.gpus}"),
        "gpus_per_node": ("gpus-per-node", str(bench.gpus)),
        "none": None,
    }["none" if here else entry.request]
    return Request(
        partition=None if here else entry.partition,
        gpu_option=option,
        cpus_per_task=entry.cpus_per_gpu * bench.gpus,
        mem_gb=bench.mem_gb or entry.mem_gb_per_gpu * bench.gpus,
        time_min=time_min,
        warning_s=time_limit.warning_s(bench, site),
    )


def node_mem_gb(entry: SiteGpu) -> int:
    """What a node has for jobs at least: the share of each of its GPUs."""
    return entry.mem_gb_per_gpu * entry.max_per_node


def service_units(bench: BenchConfig, site: SiteConfig) -> float | None:
    """Service units if each start of the job runs to its time limit, by the site's rule; None where not known."""
    rule, entry = site.charging, site.gpus[bench.gpu.name]
    mem_gb = request(bench, site).mem_gb * 2**30 / 1e9  # Slurm's G is 2^30 bytes, the rule's GB 10^9
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
