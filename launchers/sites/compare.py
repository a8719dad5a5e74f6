"""Compare a site file with what its Slurm reports, key by key. Pure.

Facts of the cluster (a partition's name, its time limit) must match exactly. Tunable values (CPUs and memory per GPU)
must be feasible. Anything that Slurm does not report is unknown, whatever the file says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial, reduce
from typing import Any

from inpaint_bench.core.config.site import SiteConfig

from .compare_gpus import GpuComparison, compare_constraint
from .findings import Agreement, Finding
from .slurm_facts import Cluster, NotReportedError, Partition, none_if_empty, parse_int, parse_minutes

# Settings of slurm.conf that explain findings: defaults of memory (MB), preemption and what accounting enforces.
SUMMARY = (
    *("ClusterName", "SLURM_VERSION", "DefMemPerCPU", "DefMemPerNode"),
    *("PreemptType", "PreemptMode", "AccountingStorageEnforce"),
)


def compare(site: SiteConfig, cluster: Cluster) -> list[Finding]:
    """Return a finding per key, in the order of a site file. Never raises: a missing fact is a finding too."""
    gpus = [GpuComparison(site, model, cluster) for model in site.gpus]
    findings = [finding for gpu in gpus for finding in gpu.findings()]
    if site.charging.units_per_gpu:
        findings.append(Finding("charging.units_per_gpu", site.charging.units_per_gpu).compare(partial(_rates, gpus)))
    if site.constraint:
        findings.append(Finding("constraint", site.constraint).compare(lambda c: compare_constraint(c, gpus)))
    partitions = []
    for gpu in gpus:
        # A partition that does not exist has a finding of its own.
        with suppress(NotReportedError):
            partitions.append(gpu.partition)
    return findings + list(_Policies(site, cluster, partitions).findings())


def cluster_summary(cluster: Cluster) -> dict[str, str]:
    """Return settings of the cluster that no key of a site file states, by name; empty if it does not answer."""
    try:
        return {key: value for key in SUMMARY if (value := none_if_empty(cluster.config.get(key)))}
    except NotReportedError:
        return {}


def _rates(gpus: Sequence[GpuComparison], rates: Finding) -> Finding:
    """Show the billing weights, which may hold the rates that are only upper bounds in the site file."""
    weights = [f"{gpu.model}: {value}" for gpu in gpus if (value := gpu.billing_weights)]
    bounds = gpus[0].site.charging.upper_bounds if gpus else []
    note = f"; upper bound: {', '.join(bounds)}" if bounds else ""
    return rates.unknown(
        "charging is the site's own rule" + note, f"TRESBillingWeights: {'; '.join(weights) or 'none'}"
    )


class _Policies:
    """What the site's Slurm permits the user and does with jobs: account, QOS, limits, requeueing, preemption."""

    def __init__(self, site: SiteConfig, cluster: Cluster, partitions: Sequence[Partition]) -> None:
        self.site = site
        self.cluster = cluster
        self.partitions = partitions  # that the site file submits to

    def findings(self) -> Iterator[Finding]:
        """Yield a finding per key."""
        yield self._compare("account.value", self._account)
        if self.site.account.pattern:
            yield self._compare("account.pattern", self._account_pattern)
        yield self._compare("qos", self._qos)
        yield self._compare("limits.max_array_size", self._max_array_size)
        yield self._compare("limits.max_submit_jobs", self._max_submit_jobs)
        yield self._compare("requeue.request", self._requeue)
        yield from self._preemption()

    def _compare(self, key: str, compare: Callable[[Finding], Finding]) -> Finding:
        return Finding(key, reduce(getattr, key.split("."), self.site)).compare(compare)

    def _account(self, account: Finding) -> Finding:
        if not self.cluster.enforces("associations"):
            return account.not_applicable("this Slurm accepts any account (AccountingStorageEnforce)")
        names = self._accounts()
        if account.configured in names:
            return account.same(account.configured)
        listed = ", ".join(names) or "none"
        if account.configured is None and not self.site.account.required:
            return account.same(listed, "Slurm uses the default account")
        # A correction is offered only where there is no choice.
        matching = [name for name in names if re.fullmatch(self.site.account.pattern or ".*", name)]
        note = "an account must be given" if account.configured is None else "not one of your accounts"
        return account.differs(listed, note, {account.key: matching[0]} if len(matching) == 1 else {})

    def _account_pattern(self, pattern: Finding) -> Finding:
        if not self.cluster.enforces("associations"):
            return pattern.not_applicable("this Slurm accepts any account (AccountingStorageEnforce)")
        names = self._accounts()
        if not names:
            return pattern.unknown("you have no account on this cluster")
        if any(re.fullmatch(pattern.configured, name) for name in names):
            return pattern.same(", ".join(names))
        return pattern.differs(", ".join(names), "none of your accounts matches")

    def _qos(self, qos: Finding) -> Finding:
        # Jobs request no QOS, so the default of the user's association applies.
        if qos.configured is None:
            defaults = sorted({a["DefaultQOS"] for a in self._associations() if none_if_empty(a["DefaultQOS"])})
            return qos.same(f"default {', '.join(defaults)}" if defaults else "no default")
        # The QOS has to exist, to be allowed in the partitions, and to be among those of the user.
        if qos.configured not in self.cluster.qos:
            return qos.differs(", ".join(sorted(self.cluster.qos)), "no such QOS")
        closed = [partition.name for partition in self.partitions if not partition.allows("Qos", qos.configured)]
        if closed:
            return qos.differs(qos.configured, f"not allowed in {', '.join(closed)}")
        if self.cluster.enforces("qos"):
            allowed = sorted({name for a in self._associations() for name in a["QOS"].split(",") if name})
            if qos.configured not in allowed:
                return qos.differs(", ".join(allowed) or "none", "not a QOS that you may use")
        return qos.same(qos.configured)

    def _max_array_size(self, size: Finding) -> Finding:
        return size.exactly(parse_int(self.cluster.setting("MaxArraySize")))

    def _max_submit_jobs(self, limit: Finding) -> Finding:
        """Compare with the smallest limit of the user's association and QOS; every task of an array counts."""
        if self.cluster.enforces("limits"):
            texts = [association["MaxSubmitJobs"] for association in self._associations()]
            texts += [qos["MaxSubmitJobsPerUser"] for name, qos in self.cluster.qos.items() if name in self._job_qos()]
            if limits := [parse_int(text) for text in texts if none_if_empty(text)]:
                return limit.exactly(min(limits), "Slurm refuses further jobs")
        return limit.same("no limit") if limit.configured is None else limit.not_applicable("Slurm enforces no limit")

    def _requeue(self, request: Finding) -> Finding:
        """Compare with JobRequeue, the default for scripts that give neither --requeue nor --no-requeue; ours do."""
        enabled = self.cluster.setting("JobRequeue") == "1"
        if request.configured or not enabled:
            return request.same(f"JobRequeue={int(enabled)}")
        note = "the site requeues jobs by default, and our scripts would say --no-requeue"
        return request.differs("JobRequeue=1", note, {request.key: True})

    def _preemption(self) -> Iterator[Finding]:
        """Yield the keys of `preempt`; without preemption only those that are configured."""
        for name, reported in (("signal", self._signal), ("grace_s", self._grace_s)):
            finding = self._compare(f"preempt.{name}", partial(self._preempted, reported))
            if finding.configured or finding.agreement is not Agreement.NOT_APPLICABLE:
                yield finding

    def _preempted(self, reported: Callable[[], Any], finding: Finding) -> Finding:
        if not self._preempted_partitions:
            return finding.not_applicable("no partition of this file is subject to preemption")
        return finding.exactly(reported())

    @cached_property
    def _preempted_partitions(self) -> list[Partition]:
        preempt_type = self.cluster.setting("PreemptType")
        if preempt_type in ("preempt/none", "(null)"):
            return []
        # By QOS, jobs in any partition may be preempted; by partition, those where PreemptMode is not OFF.
        return [partition for partition in self.partitions if self._by_qos or partition.value("PreemptMode") != "OFF"]

    @property
    def _by_qos(self) -> bool:
        return "qos" in self.cluster.setting("PreemptType")

    def _signal(self) -> str:
        """Return SIGTERM, unless the site sends the signal that a job requests."""
        parameters = self.cluster.setting("SlurmctldParameters") + self.cluster.config.get("PreemptParameters", "")
        if "send_user_signal" in parameters:
            raise NotReportedError("send_user_signal: the site sends the signal of the job's --signal")
        return "SIGTERM"

    def _grace_s(self) -> int:
        """Return the shortest time between SIGTERM and SIGKILL."""
        # Partitions and QOS both have a GraceTime; that of what preempts counts.
        if not self._by_qos:
            return min(parse_int(partition.value("GraceTime")) for partition in self._preempted_partitions)
        times = [self.cluster.qos[name]["GraceTime"] for name in self._job_qos() if name in self.cluster.qos]
        if not times:
            raise NotReportedError(f"`sacctmgr show qos` lists none of {', '.join(sorted(self._job_qos()))}")
        return min(0 if none_if_empty(time) is None else round(60 * parse_minutes(time)) for time in times)

    def _accounts(self) -> list[str]:
        return sorted({association["Account"] for association in self.cluster.associations})

    def _associations(self) -> list[dict[str, str]]:
        """Return those of the configured account; all of the user's if none is configured."""
        associations = self.cluster.associations
        return [a for a in associations if self.site.account.value in (None, a["Account"])] or associations

    def _job_qos(self) -> set[str]:
        """Return the names of the QOS that a job may run in."""
        return {self.site.qos or none_if_empty(a["DefaultQOS"]) or "normal" for a in self._associations()}
