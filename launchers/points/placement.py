"""Choose a site for a point, what to request there, and what that costs."""

from __future__ import annotations

from omegaconf import DictConfig

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.site import SiteConfig, SiteGpu
from inpaint_bench.core.errors import UserError

from .point import SlurmRequest
from .site_catalog import Reachability, SiteCatalog, reachability


def choose_site(bench: BenchConfig, config: DictConfig, catalog: SiteCatalog) -> tuple[SiteConfig, Reachability]:
    """Return the site of a point, and whether it can be reached. Raises UserError if no site has the GPU.

    `site=auto` prefers a site that this machine is logged in to, then the GPU's home site if it can be reached, then
    any other reachable site, then the home site although it cannot be reached.
    """
    gpu = bench.gpu.name
    if bench.site.name != "auto":
        # A site that the user names is taken even if it is out of reach: its points then wait in a plan file.
        site = catalog.site(bench.site.name, config)
        if gpu not in site.gpus:
            raise UserError(f"gpu={gpu}: not on site {site.name}; it has: {', '.join(sorted(site.gpus)) or 'none'}")
        return site, reachability(site)
    home = bench.gpu.home_site
    # `local` can always be reached and would win for every GPU that it lists: it counts only for gpu=cpu.
    # A broken file of another site stops nobody; without that of the home site the choice would be another one.
    sites = [site for site in catalog.sites(config, needed=[str(home)]) if site.name != "local" or home == "local"]
    candidates = [(site, reachability(site)) for site in sites if gpu in site.gpus]
    if not candidates:
        have = "; ".join(f"{site.name}: {', '.join(sorted(site.gpus))}" for site in sites)
        raise UserError(
            f"gpu={gpu}: no site has it ({have}). "
            "Add it to a file in conf/site, or use site=local if this machine has one."
        )

    def rank(candidate: tuple[SiteConfig, Reachability]) -> tuple[bool, bool, bool]:
        site, reach = candidate
        # False sorts before True. The first by name wins among equal candidates, unless this machine is of both.
        return (not (reach.on_site and reach.ok), not reach.ok, site.name != home)

    best = min(candidates, key=rank)
    equal = [site.name for site, reach in candidates if reach.on_site and rank((site, reach)) == rank(best)]
    if len(equal) > 1:
        raise UserError(
            f"gpu={gpu}: this machine belongs to {' and '.join(equal)} by their connect.hostnames; "
            f"choose with site={equal[0]}, or correct one of the files"
        )
    return best


def slurm_request(bench: BenchConfig, site: SiteConfig) -> SlurmRequest:
    """Return what the point requests. Raises UserError without a partition, or if its limits do not allow it."""
    gpu, entry, time_min = bench.gpu.name, site.gpus[bench.gpu.name], int(bench.time_min)
    slurm = site.connection.has_slurm  # else nothing is requested
    partition, node_gb = f"partition {entry.partition} of {site.name}", node_mem_gb(entry)
    if slurm and entry.partition is None and bench.gpu.nvml_name:
        raise UserError(f"sites.{site.name}.gpus.{gpu}.partition is not set: name the Slurm partition with this GPU")
    if time_min > entry.max_minutes:
        raise UserError(f"time_min={bench.time_min}: {partition} allows {entry.max_minutes}")
    if not slurm and bench.nodes > 1:
        raise UserError(f"nodes={bench.nodes}: site {site.name} is this machine alone")
    if slurm and bench.gpus > entry.max_per_node:
        raise UserError(f"gpus={bench.gpus}: a node of {site.name} has {entry.max_per_node} {gpu}")
    if slurm and entry.max_nodes is not None and bench.nodes > entry.max_nodes:
        raise UserError(f"nodes={bench.nodes}: a job in {partition} may have {entry.max_nodes}")
    if bench.mem_gb is not None and "mem" in site.directives:
        raise UserError(f"mem_gb={bench.mem_gb}: sites.{site.name}.directives.mem stands in its place; leave one out")
    if bench.mem_gb is not None and node_gb is not None and bench.mem_gb > node_gb:
        raise UserError(f"mem_gb={bench.mem_gb}: a node with {gpu} of {site.name} has {node_gb} G for jobs")
    if slurm and bench.nodes > 1 and not site.use_srun:
        raise UserError(f"nodes={bench.nodes}: srun starts a task per node; set use_srun=true")
    options = {
        "gres": ("gres", f"gpu:{entry.gres or gpu}:{bench.gpus}"),
        "gpus_per_node": ("gpus-per-node", str(bench.gpus)),
    }
    return SlurmRequest(
        partition=entry.partition if slurm else None,
        gpu_option=options.get(entry.request) if slurm else None,
        nodes=bench.nodes,
        tasks_per_node=bench.gpus,
        cpus_per_task=entry.cpus_per_gpu,
        mem_gb=bench.mem_gb or (entry.mem_gb_per_gpu or 0) * bench.gpus or None,
        time_min=time_min,
        warning_s=bench.warning_s(site),
        features=tuple(site.counter_features) if bench.profiler == "ncu" else (),
    )


def node_mem_gb(entry: SiteGpu) -> int | None:
    """Return the memory that a node has for jobs at least: the share of each of its GPUs; None: not known."""
    return entry.mem_gb_per_gpu * entry.max_per_node if entry.mem_gb_per_gpu else None


def service_units(bench: BenchConfig, site: SiteConfig, request: SlurmRequest) -> float | None:
    """Return the service units if each start of the job runs to its time limit. None: charging rule not known."""
    entry = site.gpus[bench.gpu.name]
    cpus, mem_gb = (request.cpus_per_task or 0) * request.tasks, request.nodes * (request.mem_gb or 0)
    rate = site.charging.units_per_hour(bench.gpu.name, entry, bench.ranks, cpus or None, mem_gb or None)
    if rate is None or not site.connection.has_slurm:
        return None
    hours = (1 + bench.max_requeues(site)) * request.time_min / 60
    return rate * hours
