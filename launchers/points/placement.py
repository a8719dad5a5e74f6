"""Choose a site for a point, what to request there, for how long, and what that costs."""

import math
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.site import CHOSEN, SiteConfig, SiteGpu
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import decode_record
from inpaint_bench.core.schema import MANIFEST, SWEEP, Reason, Status

from .point import SlurmRequest
from .site_catalog import Reachability, SiteCatalog, reachability

AUTO = "auto"  # `time_min=auto`: a time limit from how long earlier runs of the same cell took
DEFAULT_MIN = 60  # without earlier runs; the default of `time_min`
MARGIN = 1.5  # over the longest run: cold caches, another node, a busy file system
STARTUP_MIN = 10  # from the start of the job to that of the run: modules, imports, login scripts
ROUND_TO_MIN = 5
MAX_SWEEPS = 100  # newest sweeps that are read

Cell = tuple[str, str, str]  # site, GPU, config hash
Candidate = tuple[tuple[bool, bool, bool], SiteConfig, Reachability]  # the first sorts them


def choose_site(bench: BenchConfig, config: DictConfig, catalog: SiteCatalog) -> tuple[SiteConfig, Reachability]:
    """Return the site of a point, and whether it can be reached. Raises UserError if no site has the GPU."""
    gpu = bench.gpu.name
    if bench.site.name not in CHOSEN:
        # A site that the user names is taken even if it is out of reach: its points then wait in a plan file.
        site = catalog.site(bench.site.name, config)
        if gpu not in site.gpus:
            raise UserError(f"gpu={gpu}: not on site {site.name}; it has: {', '.join(sorted(site.gpus)) or 'none'}")
        return site, reachability(site)
    found = candidates(bench, config, catalog)
    equal = [site.name for rank, site, reach in found if reach.on_site and rank == found[0][0]]
    if len(equal) > 1:
        raise UserError(
            f"gpu={gpu}: this machine belongs to {' and '.join(equal)} by their connect.hostnames; "
            f"choose with site={equal[0]}, or correct one of the files"
        )
    return found[0][1:]


def candidates(bench: BenchConfig, config: DictConfig, catalog: SiteCatalog) -> list[Candidate]:
    """Return the sites that have a point's GPU, the first one that of `site=auto`. Raises UserError if none has it.

    It prefers a site that this machine is logged in to, then the GPU's home site if it can be reached, then any other
    reachable site, then the home site although it cannot be reached.
    """
    gpu, home = bench.gpu.name, bench.gpu.home_site
    # `local` can always be reached and would win for every GPU that it lists: it counts only for gpu=cpu.
    # A broken file of another site stops nobody; without that of the home site the choice would be another one.
    sites = [site for site in catalog.sites(config, needed=[str(home)]) if site.name != "local" or home == "local"]
    found: list[Candidate] = []
    for site in (site for site in sites if gpu in site.gpus):
        reach = reachability(site)
        # False sorts before True. The first by name wins among equal candidates, unless this machine is of both.
        found.append(((not (reach.on_site and reach.ok), not reach.ok, site.name != home), site, reach))
    if not found:
        have = "; ".join(f"{site.name}: {', '.join(sorted(site.gpus))}" for site in sites)
        raise UserError(
            f"gpu={gpu}: no site has it ({have}). "
            "Add it to a file in conf/site, or use site=local if this machine has one."
        )
    return sorted(found, key=itemgetter(0))


def slurm_request(bench: BenchConfig, site: SiteConfig) -> SlurmRequest:
    """Return what the point requests. Raises UserError without a partition, or if its limits do not allow it."""
    gpu, entry, time_min = bench.gpu.name, site.gpus[bench.gpu.name], int(bench.time_min)
    slurm = site.connection.has_slurm  # else nothing is requested
    partition, node_gb = f"partition {entry.partition} of {site.name}", node_mem_gb(entry)
    if slurm and entry.partition is None and bench.gpu.nvml_name:
        raise UserError(f"sites.{site.name}.gpus.{gpu}.partition is not set: name the Slurm partition with this GPU")
    if time_min > entry.max_minutes:
        raise UserError(f"time_min={bench.time_min}: {partition} allows {entry.max_minutes} minutes")
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


# Options of sbatch that change what a job costs, and the key that requests the same.
_CHARGED = {
    "time": "time_min",
    "nodes": "nodes",
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task", "ntasks", "ntasks-per-node"), "gpus"),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), "cpus_per_gpu of the GPU"),
    "exclusive": None,
}
_CHARGED_MEMORY = dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "mem_gb")


def uncounted_directives(site: SiteConfig, gpu: str) -> dict[str, str | None]:
    """Return the directives of the site that change what a job costs, unseen by its charging rule; with the keys."""
    charged = _CHARGED | (_CHARGED_MEMORY if gpu in site.charging.mem_gb_per_unit else {})
    # One node and one task are the default of Slurm; a job of several must have these options or `ntasks`.
    left_out = {name for name, value in site.directives.items() if value is None} & {"nodes", "ntasks-per-node"}
    return {name: charged[name] for name in site.directives if name in charged and name not in left_out}


def service_units(bench: BenchConfig, site: SiteConfig, request: SlurmRequest) -> float | None:
    """Return the service units if each start of the job runs to its time limit. None: not known."""
    if uncounted_directives(site, bench.gpu.name):
        return None
    entry = site.gpus[bench.gpu.name]
    cpus, mem_gb = (request.cpus_per_task or 0) * request.tasks, request.nodes * (request.mem_gb or 0)
    rate = site.charging.units_per_hour(bench.gpu.name, entry, bench.ranks, cpus or None, mem_gb or None)
    if rate is None or not site.connection.has_slurm:
        return None
    hours = (1 + bench.max_requeues(site)) * request.time_min / 60
    return rate * hours


class _Run(msgspec.Struct):
    """The part of a manifest that tells how long which cell ran."""

    site: str
    gpu: str
    config_hash: str
    status: Status
    reason: str | None
    resumed: list[Any] | None
    started_unix_ns: int
    ended_unix_ns: int


def time_limit(minutes: Sequence[float], out: str, max_minutes: int) -> tuple[int, str]:
    """Return the time limit after runs of these minutes, at most `max_minutes`, and in words where it comes from."""
    if not minutes:
        return min(DEFAULT_MIN, max_minutes), f"default, no such run in {out}"
    estimate = MARGIN * max(minutes) + STARTUP_MIN
    limit = min(ROUND_TO_MIN * math.ceil(estimate / ROUND_TO_MIN), max_minutes)
    return limit, f"{pluralize(len(minutes), 'earlier run')}, {max(minutes):.3g} min at most"


def read_minutes(out: Path) -> dict[Cell, list[float]]:
    """Return how long runs of the newest sweeps took. Damaged ones are skipped: a limit too short costs one rerun."""
    # A launch makes <out>/<date>/<time>-<name>, a plan file <out>/<sweep id>-<site>.
    records = [*out.glob(f"*/{SWEEP}"), *out.glob(f"*/*/{SWEEP}")]
    newest = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    minutes: dict[Cell, list[float]] = {}
    for record in islice(newest, MAX_SWEEPS):
        for file in record.parent.glob(f"*/attempt-*/{MANIFEST}"):
            try:
                run = decode_record(file.read_bytes(), _Run)
            except (OSError, ValueError):
                continue
            # One that ran in one go to its end, or, which gives a lower bound, to its time limit.
            if (run.status is Status.COMPLETED and not run.resumed) or run.reason == Reason.TIMEOUT:
                cell = (run.site, run.gpu, run.config_hash)
                minutes.setdefault(cell, []).append((run.ended_unix_ns - run.started_unix_ns) / 60e9)
    return minutes
