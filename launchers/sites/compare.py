"""Compare a site file with what its Slurm reports, key by key. Pure.

Facts of the cluster (a partition's name, its time limit) must match exactly. Tunable values (CPUs and memory per GPU)
must be feasible. Anything that Slurm does not report is unknown, whatever the file says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from inpaint_bench.core.site import SiteConfig

from .compare_gpus import GpuComparison, compare_charge_factors, compare_constraint
from .findings import Comparison, Finding
from .slurm_facts import Association, Cluster, NotReportedError, Partition, Qos, none_if_empty, parse_int, parse_minutes


def compare(site: SiteConfig, cluster: Cluster) -> list[Finding]:
    """Return a finding per key, in the order of a site file. Never raises: a missing fact is a finding too."""
    gpus = [GpuComparison(site, model, cluster) for model in site.gpus]
    charge_factors = {finding.block: finding for finding in compare_charge_factors(gpus)}
    findings: list[Finding] = []
    for gpu in gpus:
        findings += gpu.findings()
        if (block := f"gpus.{gpu.model}") in charge_factors:
            findings.append(charge_factors[block])
    if site.constraint:
        findings.append(Comparison("constraint", site.constraint).run(lambda c: compare_constraint(c, gpus)))
    partitions = []
    for gpu in gpus:
        try:
            partitions.append(gpu.partition)
        except NotReportedError:
            continue
    return findings + list(_Policies(site, cluster, partitions).findings())


def cluster_summary(cluster: Cluster) -> list[tuple[str, str]]:
    """Return facts of the cluster that no key of a site file states, with labels; empty if it does not answer."""
    labels = {
        "cluster": "ClusterName",
        "Slurm": "SLURM_VERSION",
        "default memory per CPU, MB": "DefMemPerCPU",
        "default memory per node, MB": "DefMemPerNode",
        "preemption": "PreemptType",
        "preempted jobs": "PreemptMode",
        "enforced by accounting": "AccountingStorageEnforce",
    }
    try:
        config = cluster.config
    except NotReportedError:
        return []
    return [(label, config[key]) for label, key in labels.items() if none_if_empty(config.get(key))]


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
        yield self._compare(
            "limits.max_array_size", lambda c: c.exactly(parse_int(self.cluster.setting("MaxArraySize")))
        )
        yield self._compare("limits.max_submit_jobs", self._max_submit_jobs)
        yield self._compare("requeue.request", self._requeue)
        yield from self._preemption()

    def _compare(self, key: str, compare: Callable[[Comparison], Finding]) -> Finding:
        return Comparison(key, reduce(getattr, key.split("."), self.site)).run(compare)

    def _account(self, account: Comparison) -> Finding:
        if not self.cluster.enforces("associations"):
            return account.not_applicable("this Slurm accepts any account (AccountingStorageEnforce)")
        names = self._accounts()
        if account.configured in names:
            return account.same(account.configured)
        listed = ", ".join(names) or "none"
        if account.configured is None and not self.site.account.required:
            return account.same(listed, "Slurm uses the default account")
        matching = [name for name in names if re.fullmatch(self.site.account.pattern or ".*", name)]
        note = "an account must be given" if account.configured is None else "not one of your accounts"
        return account.differs(listed, note, {account.key: matching[0]} if len(matching) == 1 else {})

    def _account_pattern(self, pattern: Comparison) -> Finding:
        if not self.cluster.enforces("associations"):
            return pattern.not_applicable("this Slurm accepts any account (AccountingStorageEnforce)")
        names = self._accounts()
        if not names:
            return pattern.unknown("you have no account on this cluster")
        if any(re.fullmatch(pattern.configured, name) for name in names):
            return pattern.same(", ".join(names))
        return pattern.differs(", ".join(names), "none of your accounts matches")

    def _qos(self, qos: Comparison) -> Finding:
        if qos.configured is None:
            defaults = sorted({a.default_qos for a in self._associations() if a.default_qos})
            return qos.same(f"default {', '.join(defaults)}" if defaults else "no default")
        if qos.configured not in self.cluster.qos:
            return qos.differs(", ".join(sorted(self.cluster.qos)), "no such QOS")
        closed = [partition.name for partition in self.partitions if not partition.allows("Qos", qos.configured)]
        if closed:
            return qos.differs(qos.configured, f"not allowed in {', '.join(closed)}")
        if self.cluster.enforces("qos"):
            allowed = sorted({name for association in self._associations() for name in association.qos})
            if qos.configured not in allowed:
                return qos.differs(", ".join(allowed) or "none", "not a QOS that you may use")
        return qos.same(qos.configured)

    def _max_submit_jobs(self, limit: Comparison) -> Finding:
        """Compare with the smallest limit of the user's association and QOS; every task of an array counts."""
        limits: list[int] = []
        if self.cluster.enforces("limits"):
            associations = self._associations()
            names = {self.site.qos} if self.site.qos else {association.default_qos for association in associations}
            candidates = [association.max_submit for association in associations]
            candidates += [qos.max_submit for name, qos in self.cluster.qos.items() if name in names]
            limits = [candidate for candidate in candidates if candidate is not None]
        if limits:
            return limit.exactly(min(limits), "Slurm refuses further jobs")
        return limit.same("no limit") if limit.configured is None else limit.not_applicable("Slurm enforces no limit")

    def _requeue(self, request: Comparison) -> Finding:
        """Compare with JobRequeue, the default for scripts that give neither --requeue nor --no-requeue; ours do."""
        enabled = self.cluster.setting("JobRequeue") == "1"
        if request.configured or not enabled:
            return request.same(f"JobRequeue={int(enabled)}")
        note = "the site requeues jobs by default, and our scripts would say --no-requeue"
        return request.differs("JobRequeue=1", note, {request.key: True})

    def _preemption(self) -> Iterator[Finding]:
        """Compare `preempt` if a partition in use is subject to preemption; else only the values set are listed."""
        keys = ("preempt.signal", "preempt.grace_s", "preempt.min_run_s")
        configured = [key for key in keys if reduce(getattr, key.split("."), self.site)]
        try:
            preempt_type = self.cluster.setting("PreemptType")
            by_qos = "qos" in preempt_type
            disabled = preempt_type in ("preempt/none", "(null)")
            exposed = [p for p in self.partitions if not disabled and (by_qos or p.preempt_modes != {"OFF"})]
        except NotReportedError as error:
            reason = str(error)
            yield from (self._compare(key, lambda c: c.unknown(reason)) for key in configured)
            return
        if not exposed:
            reason = "no partition of this file is subject to preemption"
            yield from (self._compare(key, lambda c: c.not_applicable(reason)) for key in configured)
            return

        def compare_signal(signal: Comparison) -> Finding:
            """Slurm sends SIGCONT and SIGTERM, unless the site sends the job's own signal."""
            parameters = self.cluster.setting("SlurmctldParameters") + self.cluster.config.get("PreemptParameters", "")
            if "send_user_signal" in parameters:
                return signal.unknown("the site sends the signal of the job's --signal", "send_user_signal")
            return signal.exactly("SIGTERM")

        def compare_grace(grace: Comparison) -> Finding:
            reported = [qos.grace_s for qos in self._job_qos()] if by_qos else [p.grace_s for p in exposed]
            return grace.exactly(min(reported), "between SIGTERM and SIGKILL")

        def compare_min_run(min_run: Comparison) -> Finding:
            general = parse_minutes(self.cluster.setting("PreemptExemptTime")) or 0
            of_qos = [qos.exempt_s for qos in self._job_qos() if qos.exempt_s is not None] if by_qos else []
            return min_run.exactly(min(of_qos, default=round(60 * general)), "before a job may be preempted")

        for key, compare_key in zip(keys, (compare_signal, compare_grace, compare_min_run), strict=True):
            yield self._compare(key, compare_key)

    def _accounts(self) -> list[str]:
        return sorted({association.account for association in self.cluster.associations})

    def _associations(self) -> list[Association]:
        """Return those of the configured account; all of the user's if none is configured."""
        associations = self.cluster.associations
        return [a for a in associations if self.site.account.value in (None, a.account)] or associations

    def _job_qos(self) -> list[Qos]:
        """Return the QOS that a job may run in. Raises NotReportedError if none of them is listed."""
        names = [self.site.qos] if self.site.qos else [a.default_qos or "normal" for a in self._associations()]
        listed = [self.cluster.qos[name] for name in names if name in self.cluster.qos]
        if not listed:
            raise NotReportedError(f"`sacctmgr show qos` lists none of {', '.join(names) or 'yours'}")
        return listed
