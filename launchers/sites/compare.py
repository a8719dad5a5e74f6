"""Compare a site file with what its Slurm reports, key by key.

Facts of the cluster (a partition's name, its time limit) must match exactly. Tunable values (CPUs and memory per GPU)
must be feasible. Anything that Slurm does not report is unknown, whatever the file says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from inpaint_bench.core.config.site import SiteConfig

from .compare_gpus import GpuComparison, compare_constraint
from .findings import Finding
from .slurm_facts import Cluster, NotReportedError, none_if_empty, parse_int

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
    account = Finding("account.value", site.account.value)
    findings.append(account.compare(lambda finding: _account(site, cluster, finding)))
    size = Finding("limits.max_array_size", site.limits.max_array_size)
    findings.append(size.compare(lambda finding: finding.exactly(parse_int(cluster.setting("MaxArraySize")))))
    submit_limit = Finding("limits.max_submit_jobs", site.limits.max_submit_jobs)
    return [*findings, submit_limit.compare(lambda finding: _max_submit_jobs(site, cluster, finding))]


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
