"""Compare a site file with what its Slurm reports, and with what is found at the site, key by key.

Facts of the cluster (a partition's name, its time limit) must match exactly. Tunable values (CPUs and memory per GPU)
must be feasible. Anything that Slurm does not report is unknown, whatever the file says.
"""

from __future__ import annotations

import difflib
import math
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig, SiteGpu
from launchers.remote.ssh import login_bash, strip_startup
from launchers.slurm.environment import slurm_environment

from .slurm_facts import (
    Cluster,
    Node,
    NotReportedError,
    Partition,
    is_model,
    is_slice,
    none_if_empty,
    parse_int,
    parse_minutes,
)

# Prints each of its arguments that exists.
_PRINT_EXISTING = ("sh", "-c", 'for path; do test ! -e "$path" || printf "%s\\n" "$path"; done', "sh")


class Agreement(StrEnum):
    """How a key compares."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_APPLICABLE = "not applicable"  # this Slurm has nothing that the key could contradict
    UNKNOWN = "unknown"  # Slurm did not report it


@dataclass(frozen=True)
class Finding:
    """One key; `compare` and the methods that it may call return the finding with its result."""

    key: str  # dotted key of the site file, such as gpus.a40.max_minutes
    configured: Any  # the value in force: the file's own, or what overrides it
    agreement: Agreement = Agreement.UNKNOWN
    reported: str = ""  # what Slurm reports, as text
    note: str = ""  # what it means, or why it is unknown
    corrections: Mapping[str, Any] = field(default_factory=dict)  # by key; empty if the right value is not known

    def compare(self, comparison: Callable[[Finding], Finding]) -> Finding:
        """Return what `comparison` finds, or unknown if Slurm did not report what it needs."""
        try:
            return comparison(self)
        except NotReportedError as error:
            return self.unknown(str(error))

    def same(self, reported: object, note: str = "") -> Finding:
        return replace(self, agreement=Agreement.SAME, reported=str(reported), note=note)

    def differs(self, reported: object, note: str = "", corrections: Mapping[str, Any] | None = None) -> Finding:
        result = replace(self, agreement=Agreement.DIFFERS, reported=str(reported), note=note)
        return replace(result, corrections=corrections or {})

    def not_applicable(self, reason: str) -> Finding:
        """Return that this Slurm has nothing to compare the key with."""
        return replace(self, agreement=Agreement.NOT_APPLICABLE, note=reason)

    def unknown(self, reason: str, reported: str = "") -> Finding:
        """Return that Slurm did not report what decides."""
        return replace(self, agreement=Agreement.UNKNOWN, reported=reported, note=reason)

    def exactly(self, reported: Any, note: str = "") -> Finding:
        """Compare a fact, which must match exactly: what Slurm reports is the correction."""
        if self.configured == reported:
            return self.same(reported)
        return self.differs(reported, note, {self.key: reported})

    @property
    def block(self) -> str:
        """Return the block of the file that has a `checked_on` of its own: limits, gpus.a40; "" for top-level keys."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def compare(site: SiteConfig, cluster: Cluster) -> list[Finding]:
    """Return a finding per key, in the order of a site file. Never raises: a missing fact is a finding too."""
    gpus = [GpuComparison(site, model, cluster) for model in site.gpus]
    findings = [finding for gpu in gpus for finding in gpu.findings()]
    if site.charging.units_per_gpu:
        findings.append(Finding("charging.units_per_gpu", site.charging.units_per_gpu).compare(partial(_rates, gpus)))
    if site.constraint:
        findings.append(Finding("constraint", site.constraint).compare(lambda c: _constraint(c, gpus)))
    account = Finding("account.value", site.account.value)
    findings.append(account.compare(lambda finding: _account(site, cluster, finding)))
    size = Finding("limits.max_array_size", site.limits.max_array_size)
    findings.append(size.compare(lambda finding: finding.exactly(parse_int(cluster.setting("MaxArraySize")))))
    submit_limit = Finding("limits.max_submit_jobs", site.limits.max_submit_jobs)
    return [*findings, submit_limit.compare(lambda finding: _max_submit_jobs(site, cluster, finding))]


def _rates(gpus: Sequence[GpuComparison], rates: Finding) -> Finding:
    """Show the billing weights, which may hold the rates that are only upper bounds in the site file."""
    weights = [f"{gpu.model}: {value}" for gpu in gpus if (value := gpu.billing_weights)]
    bounds = gpus[0].site.charging.upper_bounds if gpus else []
    note = f"; upper bound: {', '.join(bounds)}" if bounds else ""
    return rates.unknown(
        "charging is the site's own rule" + note, f"TRESBillingWeights: {'; '.join(weights) or 'none'}"
    )


def _account(site: SiteConfig, cluster: Cluster, account: Finding) -> Finding:
    if not cluster.enforces("associations"):
        return account.not_applicable("this Slurm accepts any account (AccountingStorageEnforce)")
    names = sorted({association["Account"] for association in cluster.associations})
    if account.configured in names:
        return account.same(account.configured)
    listed = ", ".join(names) or "none"
    if account.configured is None and not site.account.required:
        return account.same(listed, "Slurm uses the default account")
    # A correction is offered only if there is no choice.
    matching = [name for name in names if re.fullmatch(site.account.pattern or ".*", name)]
    note = "an account must be given" if account.configured is None else "not one of your accounts"
    return account.differs(listed, note, {account.key: matching[0]} if len(matching) == 1 else {})


def _max_submit_jobs(site: SiteConfig, cluster: Cluster, limit: Finding) -> Finding:
    """Compare with the smallest limit of the user's association and QOS; every task of an array counts."""
    if cluster.enforces("limits"):
        own = [a for a in cluster.associations if site.account.value in (None, a["Account"])] or cluster.associations
        job_qos = {site.qos or none_if_empty(association["DefaultQOS"]) or "normal" for association in own}
        texts = [association["MaxSubmitJobs"] for association in own]
        texts += [qos["MaxSubmitJobsPerUser"] for name, qos in cluster.qos.items() if name in job_qos]
        if limits := [parse_int(text) for text in texts if none_if_empty(text)]:
            return limit.exactly(min(limits), "Slurm refuses further jobs")
    return limit.same("no limit") if limit.configured is None else limit.not_applicable("Slurm enforces no limit")


def _constraint(constraint: Finding, gpus: Sequence[GpuComparison]) -> Finding:
    """Compare node features: each must be in every partition. Expressions of several are left to Slurm."""
    # A single feature is an identifier; "a&b" or "[a|b]" is not.
    missing = [
        f"{feature} in {gpu.partition.name}"
        for gpu in gpus
        for feature in constraint.configured
        if feature.isidentifier() and not any(feature in node.features for node in gpu.partition.nodes)
    ]
    if missing:
        return constraint.differs(f"missing: {', '.join(missing)}", "jobs would be refused")
    return constraint.same("features of its nodes")


def compare_paths(site: SiteConfig, cluster: Cluster) -> Iterator[Finding]:
    """Yield a finding per key that names paths at the site. A folder that only compute nodes may have is unknown."""
    container, storage = site.environment.container, site.storage
    keys: dict[str, Any] = {
        "python": site.python,
        "environment.container.image": container.image,
        "environment.container.binds": container.binds if container.image else None,
        "storage.scratch": storage.scratch,
        "storage.node_tmp": storage.node_tmp,
        "storage.file_quotas": storage.file_quotas,
    }
    named = {key: [value] if isinstance(value, str) else value for key, value in keys.items() if value}
    # source:target of a bind; a name without a folder, such as python3, is looked up by the job
    paths = {key: [p for path in each if "/" in (p := path.split(":")[0])] for key, each in named.items()}
    ask = (*_PRINT_EXISTING, *(path for each in paths.values() for path in each))
    for key, each in paths.items():
        yield Finding(key, keys[key]).compare(partial(_existing, each, cluster, ask))


def _existing(paths: list[str], cluster: Cluster, ask: tuple[str, ...], finding: Finding) -> Finding:
    existing = cluster.text(*ask).splitlines()
    if not (missing := ", ".join(path for path in paths if path not in existing)):
        return finding.same("found")
    if finding.key in ("storage.node_tmp", "storage.file_quotas"):
        return finding.unknown("look for it on a compute node", f"not found: {missing}")
    return finding.differs(f"not found: {missing}", "jobs may need it: create it or correct the path")


def compare_container(site: SiteConfig) -> Iterator[Finding]:
    """Yield a finding for the program that runs the container; none for a site without one."""
    container = site.environment.container
    if not container.image:
        return
    program = Finding("environment.container.command", container.command)
    if found := _program(site, container.command):
        yield program.same(found)
    else:
        yield program.unknown("not found here, also with the modules of a job; look for it on a compute node")


def _program(site: SiteConfig, name: str) -> str | None:
    """Return the path of a program as a job finds it: in a login shell, with the job's modules."""
    environment = site.environment
    lines = ["module reset"] * environment.modules_reset + ["module purge"] * environment.modules_purge
    lines += [f"module load {shlex.quote(module)}" for module in environment.modules]
    lines = [f"{{ {line}; }} >/dev/null 2>&1" for line in lines]
    script = "; ".join([*lines, f"command -v {name}"])
    try:
        done = child.run(login_bash(script), env=slurm_environment(site), timeout_s=site.limits.command_timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.decode(errors="replace").split("\n") if strip_startup(done) else []
    return next((line for line in found if line.startswith("/")), None) if done.returncode == 0 else None


class GpuComparison:
    """One GPU model of a site file, with the partition and nodes that serve it.

    If the configured partition does not exist, the other keys are compared with the one that was most likely meant.
    """

    def __init__(self, site: SiteConfig, model: str, cluster: Cluster) -> None:
        self.site = site
        self.model = model
        self.entry: SiteGpu = site.gpus[model]
        self.cluster = cluster

    def findings(self) -> Iterator[Finding]:
        yield self._finding("partition").compare(self._partition)
        if self.entry.request == "gres":
            yield Finding(self._key("gres"), self.entry.gres or self.model).compare(self._gres)
        elif self.entry.request == "gpus_per_node":
            yield self._finding("request").compare(self._request_by_number)
        if self.entry.request != "none":  # else nothing is stated about nodes with GPUs
            yield self._finding("max_per_node").compare(lambda finding: finding.exactly(self.gpus_per_node))
            yield self._finding("max_nodes").compare(self._max_nodes)
            yield self._finding("max_minutes").compare(self._max_minutes)
            yield self._finding("cpus_per_gpu").compare(self._cpus)
            yield self._finding("mem_gb_per_gpu").compare(self._memory)
        if self.entry.charge_factor is not None:
            yield self._finding("charge_factor").compare(self._charge_factor)

    @cached_property
    def partition(self) -> Partition:
        """Return the configured partition, or the one most likely meant. Raises NotReportedError."""
        partition = self._configured_partition or self._likely_partition
        if partition is None:
            raise NotReportedError(f"there is no partition {self.entry.partition}")
        return partition

    @cached_property
    def gres_type(self) -> str | None:
        """Return the GRES type of this model in the partition; "" if its GPUs have no type, None if it has none."""
        types, configured = self.partition.gpu_types, self.entry.gres or self.model
        if configured in types and not is_slice(configured):
            return configured
        # Else a type that names the model (nvidia_a100-sxm4-40gb for a100), else GPUs without any type.
        return next((t for t in types if is_model(self.model, t)), "" if types == [""] else None)

    @cached_property
    def gpus_per_node(self) -> int:
        """Return the most GPUs of this model that a node has. Raises NotReportedError if there are none."""
        if self.gres_type is None:
            raise NotReportedError(f"partition {self.partition.name} has no {self.model}")
        return max(node.gpus.get(self.gres_type, 0) for node in self.partition.nodes)

    @property
    def fullest_nodes(self) -> list[Node]:
        return [node for node in self.partition.nodes if node.gpus.get(self.gres_type or "") == self.gpus_per_node]

    def _key(self, name: str) -> str:
        return f"gpus.{self.model}.{name}"

    def _finding(self, name: str) -> Finding:
        return Finding(self._key(name), getattr(self.entry, name))

    @cached_property
    def _configured_partition(self) -> Partition | None:
        return self.cluster.partitions.get(self.entry.partition or self.cluster.default_partition or "")

    @cached_property
    def _likely_partition(self) -> Partition | None:
        """Return the partition with this model that has the most similar name."""

        def similarity(partition: Partition) -> float:
            return difflib.SequenceMatcher(None, partition.name, self.entry.partition or "").ratio()

        serving = [p for p in self.cluster.partitions.values() if any(is_model(self.model, t) for t in p.gpu_types)]
        return max(serving, key=similarity, default=None)

    def _partition(self, partition: Finding) -> Finding:
        reported = self._configured_partition
        if reported is None and partition.configured is None:
            return partition.differs("no default partition", "a partition must be given")
        if reported is None:
            if (likely := self._likely_partition) is None:
                with_gpus = sorted(p.name for p in self.cluster.partitions.values() if p.gpu_types)
                return partition.differs("no such partition", f"with GPUs: {', '.join(with_gpus) or 'none'}")
            note = "no such partition; the other keys are compared with this one"
            return partition.differs(likely.name, note, {partition.key: likely.name})
        if (state := reported.value("State")) != "UP":
            return partition.differs(f"{reported.name}, {state}", "jobs stay pending until it is UP")
        if self.site.account.value and not reported.allows(self.site.account.value):
            return partition.differs(reported.name, f"is closed to account {self.site.account.value}")
        return partition.same(reported.name)

    def _gres(self, gres: Finding) -> Finding:
        if (gres_type := self.gres_type) is None:
            return self._no_such_gpu(gres)
        if gres_type == gres.configured:
            return gres.same(gres_type)
        if not gres_type:
            note = "its GPUs have no type, so a request with a type is refused"
            return gres.differs("GPUs without a type", note, {self._key("request"): "gpus_per_node"})
        return gres.differs(gres_type, f"--gres=gpu:{gres.configured}:1 would be refused", {gres.key: gres_type})

    def _request_by_number(self, request: Finding) -> Finding:
        """Compare a request by number alone: the partition must have no other GPU."""
        types = self.partition.gpu_types
        if (gres_type := self.gres_type) is None:
            return self._no_such_gpu(request)
        # One partition may still mix models if their GRES have no type, which nothing here would show.
        if not gres_type:
            return request.unknown("Slurm does not report the model of GPUs without a type", "GPUs without a type")
        if types == [gres_type]:
            return request.same(f"only {gres_type}")
        corrections: dict[str, object] = {request.key: "gres"}
        if gres_type != self.model:
            corrections[self._key("gres")] = gres_type
        return request.differs(", ".join(types), "a request without a type may get any of these GPUs", corrections)

    def _no_such_gpu(self, finding: Finding) -> Finding:
        types = ", ".join(self.partition.gpu_types) or "no GPUs"
        whole = ", and a MIG slice is no GPU" if any(map(is_slice, self.partition.gpu_types)) else ""
        return finding.differs(types, f"partition {self.partition.name} has no {self.model}{whole}")

    def _max_nodes(self, max_nodes: Finding) -> Finding:
        """Compare with the partition's own limit and how many of its nodes have the GPU; less is a choice."""
        limit, present = self.partition.limit("MaxNodes"), len(self.fullest_nodes)
        allowed = int(min(limit, present))
        reported = f"{allowed} nodes" if limit > present else f"MaxNodes={allowed}"
        if max_nodes.configured is None and math.isinf(limit):
            return max_nodes.same("no limit")
        if max_nodes.configured is not None and max_nodes.configured <= allowed:
            return max_nodes.same(reported)
        return max_nodes.differs(reported, "jobs of more nodes are refused", {max_nodes.key: allowed})

    def _max_minutes(self, max_minutes: Finding) -> Finding:
        """Compare with the shortest limit of the partition, its QOS and the job's QOS."""
        limits = {self.partition.name: parse_minutes(self.partition.value("MaxTime"))}
        # The QOS of a partition limits every job in it, in addition to the job's own.
        for name in filter(None, (none_if_empty(self.partition.values.get("QoS")), self.site.qos)):
            if name in self.cluster.qos:
                limits[f"QOS {name}"] = parse_minutes(self.cluster.qos[name]["MaxWall"])
        source = min(limits, key=limits.__getitem__)
        if math.isinf(limits[source]):
            return max_minutes.same("no limit")
        allowed = int(limits[source])
        note = f"longer jobs never start in {source}" if max_minutes.configured > allowed else f"{source} allows more"
        return max_minutes.exactly(allowed, note)

    def _cpus(self, cpus: Finding) -> Finding:
        # The smallest of these nodes counts, because a job may land on any of them.
        of_node = min(*(node.cpus for node in self.fullest_nodes), self.partition.limit("MaxCPUsPerNode"))
        return self._feasible(cpus, of_node, f"{of_node:g} CPUs")

    def _memory(self, memory: Finding) -> Finding:
        """Compare in Slurm's G, 2^30 bytes. Above MaxMemPerCPU Slurm allocates, and charges, more CPUs."""
        of_node = min(*(node.memory_mb for node in self.fullest_nodes), self.partition.limit("MaxMemPerNode"))
        of_cpus = self.partition.limit("MaxMemPerCPU") * (self.entry.cpus_per_gpu or math.inf) * self.gpus_per_node
        memory_gb = min(of_node, of_cpus) / 1024
        return self._feasible(memory, memory_gb, f"{memory_gb:.4g} G")

    def _feasible(self, value: Finding, of_node: float, reported: str) -> Finding:
        """Compare a tunable value, which must be feasible even if all GPUs of a node are requested."""
        largest = int(of_node // self.gpus_per_node)
        reported = f"{reported} for {self.gpus_per_node} GPUs: at most {largest}"
        if value.configured is None or value.configured <= largest:
            return value.same(reported)
        return value.differs(reported, "more than a node has if all its GPUs are requested", {value.key: largest})

    def _charge_factor(self, factor: Finding) -> Finding:
        """Show the billing weights: they are only relative, and a site may charge by another rule."""
        weights = self.billing_weights or "none"
        return factor.unknown("charging is the site's own rule", f"TRESBillingWeights={weights}")

    @property
    def billing_weights(self) -> str | None:
        return self.partition.values.get("TRESBillingWeights")
