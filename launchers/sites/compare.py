"""A site file held against what its Slurm says, fact by fact. Pure.

Some keys state a fact of the cluster (a partition's name, its time limit): they must be equal. Others are a choice
(CPUs and memory per GPU): they must fit. What Slurm did not say is not known, whatever the file says.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from inpaint_bench.core.site import SiteConfig, SiteGpu

from .allowances import rules
from .finding import Finding, differs, equal, judged, not_known, same
from .slurm_facts import Cluster, Node, NotKnownError, Partition, gpu_weight, is_model

LONGEST_MIN = 60 * 24 * 366  # the longest time limit that a site file can hold


def compare(site: SiteConfig, cluster: Cluster) -> list[Finding]:
    """In the order of a site file. Raises nothing: a fact that Slurm did not give is a finding too."""
    gpus = [Gpu(site, model, cluster) for model in site.gpus]
    factors = {finding.block: finding for finding in charge_factors(gpus)}
    found: list[Finding] = []
    for gpu in gpus:
        found += gpu.findings()
        found += [factors[block]] if (block := f"gpus.{gpu.model}") in factors else []
    if site.constraint:
        found.append(judged("constraint", site.constraint, lambda: constraint(site, gpus)))
    used = []
    for gpu in gpus:
        try:
            used.append(gpu.partition)
        except NotKnownError:
            continue
    return found + list(rules(site, cluster, used))


class Gpu:
    """One GPU model of a site, and the partition and nodes that its file names for it.

    Where the partition is not there, the rest is held against the one that it was most likely meant to be.
    """

    def __init__(self, site: SiteConfig, model: str, cluster: Cluster) -> None:
        self.site = site
        self.model = model
        self.entry: SiteGpu = site.gpus[model]
        self.cluster = cluster

    def findings(self) -> Iterator[Finding]:
        entry = self.entry
        yield judged(self._at("partition"), entry.partition, self._partition)
        if entry.request == "gres":
            yield judged(self._at("gres"), entry.gres or self.model, self._gres)
        elif entry.request == "gpus_per_node":
            yield judged(self._at("request"), entry.request, self._by_number)
        else:
            return  # no GPU is asked for, so nothing is said about nodes with GPUs
        yield judged(self._at("max_per_node"), entry.max_per_node, self._max_per_node)
        yield judged(self._at("max_minutes"), entry.max_minutes, self._max_minutes)
        yield judged(self._at("cpus_per_gpu"), entry.cpus_per_gpu, self._cpus)
        yield judged(self._at("mem_gb_per_gpu"), entry.mem_gb_per_gpu, self._memory)

    @cached_property
    def partition(self) -> Partition:
        found = self._named() or self._meant
        if found is None:
            raise NotKnownError(f"there is no partition {self.entry.partition} to look at")
        return found

    @cached_property
    def kind(self) -> str:
        """The GRES type of this model in the partition; "" where its GPUs have no type."""
        kinds = {kind for node in self.partition.nodes for kind in node.gpus}
        asked = self.entry.gres or self.model
        if asked in kinds:
            return asked
        alike = sorted(kind for kind in kinds if is_model(self.model, kind))
        if alike:
            return alike[0]
        if kinds == {""}:
            return ""
        has = f"has {', '.join(sorted(kinds))}" if kinds else "has nodes without GPUs only"
        raise NotKnownError(f"partition {self.partition.name} {has}: no {self.model}")

    @cached_property
    def fullest(self) -> list[Node]:
        """The nodes with the most of these GPUs."""
        counts = {node.name: node.gpus.get(self.kind, 0) for node in self.partition.nodes}
        most = max(counts.values(), default=0)
        return [node for node in self.partition.nodes if counts[node.name] == most and most > 0]

    @property
    def per_node(self) -> int:
        return self.fullest[0].gpus[self.kind]

    def _at(self, key: str) -> str:
        return f"gpus.{self.model}.{key}"

    def _named(self) -> Partition | None:
        name = self.entry.partition or self.cluster.default_partition
        return self.cluster.partitions.get(name or "")

    @cached_property
    def _meant(self) -> Partition | None:
        """The partition that serves this model: not pre-empted, with the longest limit, of the likest name."""

        def rank(partition: Partition) -> tuple[bool, float, float]:
            likeness = difflib.SequenceMatcher(None, partition.name, self.entry.partition or "").ratio()
            return ("OFF" not in partition.preempt_modes, -partition.max_minutes, -likeness)

        wanted = self.entry.gres
        serving = [
            partition
            for partition in self.cluster.partitions.values()
            if any(
                is_model(self.model, kind) or (wanted and kind == wanted)
                for node in partition.nodes
                for kind in node.gpus
            )
        ]
        return min(serving, key=rank, default=None)

    def _partition(self) -> Finding:
        place, here, named = self._at("partition"), self.entry.partition, self._named()
        if named is None and here is None:
            return differs(place, here, "no default partition", "a partition must be named")
        if named is None:
            meant = self._meant
            if meant is None:
                have = ", ".join(sorted(p.name for p in self.cluster.partitions.values() if any_gpus(p)))
                return differs(place, here, "not there", f"with GPUs: {have or 'none'}")
            return differs(place, here, meant.name, "not there; the rest is held against this one", {place: meant.name})
        if not named.up:
            return differs(place, here, f"{named.name}, {named.state}", "jobs wait until it is UP again")
        if self.site.account.value and not named.allows("Accounts", self.site.account.value):
            return differs(place, here, named.name, f"is closed to account {self.site.account.value}")
        return same(place, here, named.name)

    def _gres(self) -> Finding:
        place, here = self._at("gres"), self.entry.gres or self.model
        kinds = sorted({kind for node in self.partition.nodes for kind in node.gpus})
        try:
            kind = self.kind
        except NotKnownError as error:
            return differs(place, here, ", ".join(kinds) or "no GPUs", str(error))
        if kind == here:
            return same(place, here, kind)
        if not kind:
            note = "its GPUs have no type, so a request that names one is refused"
            return differs(place, here, "GPUs without a type", note, {self._at("request"): "gpus_per_node"})
        return differs(place, here, kind, f"--gres=gpu:{here}:1 would be refused", {place: kind})

    def _by_number(self) -> Finding:
        """Asked for by number alone, the partition must hold no other GPU."""
        place, here = self._at("request"), self.entry.request
        kinds = sorted({kind for node in self.partition.nodes for kind in node.gpus})
        try:
            kind = self.kind
        except NotKnownError as error:
            return differs(place, here, ", ".join(kinds) or "no GPUs", str(error))
        if not kind:
            return not_known(place, here, "whether they are of this model is not said", "GPUs without a type")
        if kinds == [kind]:
            return same(place, here, f"only {kind}")
        fix: dict[str, object] = {place: "gres"}
        if kind != self.model:
            fix[self._at("gres")] = kind
        return differs(place, here, ", ".join(kinds), "by number alone, which GPU one gets is chance", fix)

    def _max_per_node(self) -> Finding:
        return equal(self._at("max_per_node"), self.entry.max_per_node, self.per_node)

    def _max_minutes(self) -> Finding:
        place, here, partition = self._at("max_minutes"), self.entry.max_minutes, self.partition
        longest, whose = partition.max_minutes, partition.name
        for name in filter(None, (partition.qos, self.site.qos)):
            qos = self.cluster.qos.get(name) if here <= longest else None  # longer than the partition is wrong already
            if qos is not None and qos.max_minutes < longest:
                longest, whose = qos.max_minutes, f"QOS {name}"
        if math.isinf(longest):
            return same(place, here, "no limit")
        right = min(int(longest), LONGEST_MIN)
        if here == right:
            return same(place, here, right)
        note = f"jobs as long as that would never start in {whose}" if here > right else f"{whose} allows more"
        return differs(place, here, right, note, {place: right})

    def _cpus(self) -> Finding:
        cpus = min(*(node.cpus for node in self.fullest), self.partition.most("MaxCPUsPerNode"))
        return self._fits("cpus_per_gpu", self.entry.cpus_per_gpu, cpus, f"{cpus:g} CPUs")

    def _memory(self) -> Finding:
        """In Slurm's G, 2^30 bytes. Beyond MaxMemPerCPU Slurm would give, and charge, more CPUs than were asked."""
        of_node = min(*(node.memory_mb for node in self.fullest), self.partition.most("MaxMemPerNode"))
        of_cpus = self.partition.most("MaxMemPerCPU") * self.entry.cpus_per_gpu * self.per_node
        memory_gb = min(of_node, of_cpus) / 1024
        return self._fits("mem_gb_per_gpu", self.entry.mem_gb_per_gpu, memory_gb, f"{memory_gb:.4g} G")

    def _fits(self, key: str, here: int, of_node: float, shown: str) -> Finding:
        place, right = self._at(key), int(of_node // self.per_node)
        there = f"{shown} for {self.per_node} GPUs: at most {right}"
        if here <= right:
            return same(place, here, there)
        return differs(place, here, there, "more than a node has, where all its GPUs are asked for", {place: right})


def charge_factors(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """TRESBillingWeights give factors only in proportion: the partition of factor 1 says what 1 is."""
    unit: float | None = None
    for gpu in gpus:
        if gpu.entry.charge_factor == 1:
            unit = unit or _weight(gpu)
    for gpu in gpus:
        here = gpu.entry.charge_factor
        if here is None:
            continue
        place, weight = f"gpus.{gpu.model}.charge_factor", _weight(gpu)
        if weight is None:
            yield not_known(place, here, "its partition names no TRESBillingWeights for GPUs")
        elif unit is None:
            why = "a weight alone is no factor: no partition of factor 1 has one"
            yield not_known(place, here, why, f"a GPU weighs {weight:g}")
        else:
            right = weight / unit
            there = f"a GPU weighs {weight:g}, {unit:g} at factor 1: {right:g}"
            close = math.isclose(here, right, rel_tol=1e-3)
            yield same(place, here, there) if close else differs(place, here, there, "", {place: round(right, 4)})


def _weight(gpu: Gpu) -> float | None:
    try:
        return gpu_weight(gpu.partition.values.get("TRESBillingWeights"), gpu.kind)
    except NotKnownError:
        return None


def constraint(site: SiteConfig, gpus: Sequence[Gpu]) -> Finding:
    """Every feature must be on a node of every partition; expressions of several are left to Slurm."""
    lacking = []
    for gpu in gpus:
        have = {feature for node in gpu.partition.nodes for feature in node.features}
        lacking += [
            f"{one} in {gpu.partition.name}" for one in site.constraint if one.isidentifier() and one not in have
        ]
    if lacking:
        return differs("constraint", site.constraint, f"not there: {', '.join(lacking)}", "jobs would be refused")
    return same("constraint", site.constraint, "features of its nodes")


def any_gpus(partition: Partition) -> bool:
    return any(node.gpus for node in partition.nodes)
