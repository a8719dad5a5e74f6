"""Compare the GPUs of a site file with the partitions and nodes that Slurm reports."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from inpaint_bench.core.config.site import SiteConfig, SiteGpu

from .findings import Finding
from .slurm_facts import Cluster, Node, NotReportedError, Partition, is_model, is_slice, none_if_empty, parse_minutes


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


def compare_constraint(constraint: Finding, gpus: Sequence[GpuComparison]) -> Finding:
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
