"""What a site's Slurm allows a user and does with jobs, beside what the site file says of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from inpaint_bench.core.site import SiteConfig

from .finding import Finding, differs, equal, judged, not_known, only_here, same
from .slurm_facts import Association, Cluster, NotKnownError, Partition, duration_min, word


def rules(site: SiteConfig, cluster: Cluster, used: Sequence[Partition]) -> Iterator[Finding]:
    """`used`: the partitions that the site file sends jobs to."""
    yield judged("account.value", site.account.value, lambda: account(site, cluster))
    if site.account.pattern:
        yield judged("account.pattern", site.account.pattern, lambda: pattern(site, cluster))
    yield judged("qos", site.qos, lambda: qos(site, cluster, used))
    yield judged("wckey", site.wckey, lambda: wckey(site, cluster))
    size = site.limits.max_array_size
    at = "limits.max_array_size"
    yield judged(at, size, lambda: equal(at, size, int(cluster.setting("MaxArraySize"))))
    yield judged("limits.max_submit_jobs", site.limits.max_submit_jobs, lambda: max_submit_jobs(site, cluster))
    yield judged("requeue.request", site.requeue.request, lambda: requeue(site, cluster))
    yield from preempt(site, cluster, used)


def account(site: SiteConfig, cluster: Cluster) -> Finding:
    place, here = "account.value", site.account.value
    if not _enforced(cluster, "associations"):
        return only_here(place, here, "this Slurm takes any account (AccountingStorageEnforce)")
    mine = _accounts(cluster)
    listed = ", ".join(mine) or "none"
    if here in mine:
        return same(place, here, here)
    if here is None and not site.account.required:
        return same(place, here, listed, "Slurm takes the default one")
    fitting = [name for name in mine if re.fullmatch(site.account.pattern or ".*", name)]
    fix = {place: fitting[0]} if len(fitting) == 1 else {}
    note = "an account must be named" if here is None else "not one of yours"
    return differs(place, here, listed, note, fix)


def pattern(site: SiteConfig, cluster: Cluster) -> Finding:
    place, here = "account.pattern", site.account.pattern
    if not _enforced(cluster, "associations"):
        return only_here(place, here, "this Slurm takes any account (AccountingStorageEnforce)")
    mine = _accounts(cluster)
    if not mine:
        return not_known(place, here, "you have no account there")
    if any(re.fullmatch(here or "", name) for name in mine):
        return same(place, here, ", ".join(mine))
    return differs(place, here, ", ".join(mine), "none of your accounts is of that form")


def qos(site: SiteConfig, cluster: Cluster, used: Sequence[Partition]) -> Finding:
    if site.qos is None:
        mine = _associations(site, cluster)
        default = sorted({one.default_qos or "" for one in mine} - {""})
        return same("qos", None, f"default {', '.join(default)}" if default else "no default")
    if site.qos not in cluster.qos:
        return differs("qos", site.qos, ", ".join(sorted(cluster.qos)), "there is no such QOS")
    closed = [partition.name for partition in used if not partition.allows("Qos", site.qos)]
    if closed:
        return differs("qos", site.qos, site.qos, f"is not let into {', '.join(closed)}")
    if _enforced(cluster, "qos"):
        allowed = sorted({name for one in _associations(site, cluster) for name in one.qos})
        if site.qos not in allowed:
            return differs("qos", site.qos, ", ".join(allowed) or "none", "not one that you may use")
    return same("qos", site.qos, site.qos)


def wckey(site: SiteConfig, cluster: Cluster) -> Finding:
    tracked = cluster.setting("TrackWCKey").lower() == "yes"
    there = f"TrackWCKey={'Yes' if tracked else 'No'}"
    if site.wckey is not None and not tracked:
        return differs("wckey", site.wckey, there, "jobs with a key may be refused", {"wckey": None})
    if site.wckey is None and tracked and _enforced(cluster, "wckeys"):
        return differs("wckey", site.wckey, f"{there}, enforced", "jobs without a key are refused")
    return same("wckey", site.wckey, there)


def max_submit_jobs(site: SiteConfig, cluster: Cluster) -> Finding:
    """The smallest of what the user's association and its QOS allow at once; jobs of an array count one by one."""
    place, here = "limits.max_submit_jobs", site.limits.max_submit_jobs
    if not _enforced(cluster, "limits"):
        return same(place, here, "no limit") if here is None else only_here(place, here, "this Slurm enforces no limit")
    mine = _associations(site, cluster)
    taken = {site.qos} if site.qos else {one.default_qos for one in mine}
    limits = [one.max_submit for one in mine]
    limits += [found.max_submit for name, found in cluster.qos.items() if name in taken]
    known = [limit for limit in limits if limit is not None]
    if known:
        return equal(place, here, min(known), "more jobs than that are refused at once")
    return same(place, here, "no limit") if here is None else only_here(place, here, "Slurm names no such limit")


def requeue(site: SiteConfig, cluster: Cluster) -> Finding:
    """Our scripts say --requeue or --no-requeue, so JobRequeue is what others get who say nothing."""
    place, here = "requeue.request", site.requeue.request
    on = cluster.setting("JobRequeue") == "1"
    if here or not on:
        return same(place, here, f"JobRequeue={int(on)}")
    note = "jobs are requeued there unless they refuse, and ours would refuse"
    return differs(place, here, "JobRequeue=1", note, {place: True})


def preempt(site: SiteConfig, cluster: Cluster, used: Sequence[Partition]) -> Iterator[Finding]:
    """Only where a partition that is used can be pre-empted; else the block is about partitions that are not used."""
    wanted = site.preempt
    rows = {"signal": wanted.signal, "grace_s": wanted.grace_s, "min_run_s": wanted.min_run_s}
    try:
        by_qos = "qos" in cluster.setting("PreemptType")
        never = cluster.setting("PreemptType") in ("preempt/none", "(null)")
        exposed = [] if never else [p for p in used if by_qos or p.preempt_modes != {"OFF"}]
    except NotKnownError as error:
        yield from (not_known(f"preempt.{key}", value, str(error)) for key, value in rows.items() if value)
        return
    if not exposed:
        why = "no partition of this file is ever pre-empted"
        yield from (only_here(f"preempt.{key}", value, why) for key, value in rows.items() if value)
        return

    def signal() -> Finding:
        """SIGCONT and SIGTERM, unless the site sends what --signal names, and only a training's script names one."""
        parameters = cluster.setting("SlurmctldParameters") + cluster.config.get("PreemptParameters", "")
        if "send_user_signal" in parameters:
            return not_known("preempt.signal", wanted.signal, "the site sends what --signal names", "send_user_signal")
        return equal("preempt.signal", wanted.signal, "SIGTERM")

    def grace() -> Finding:
        shortest = (
            min(cluster.qos[q].grace_s for q in _job_qos(site, cluster)) if by_qos else min(map(_grace_s, exposed))
        )
        return equal("preempt.grace_s", wanted.grace_s, shortest, "between SIGTERM and SIGKILL")

    def min_run() -> Finding:
        general = duration_min(cluster.setting("PreemptExemptTime")) or 0
        own = [cluster.qos[q].exempt_s for q in _job_qos(site, cluster)] if by_qos else []
        shortest = min([one for one in own if one is not None], default=round(60 * general))
        return equal("preempt.min_run_s", wanted.min_run_s, shortest, "before a job may be pre-empted")

    yield judged("preempt.signal", wanted.signal, signal)
    yield judged("preempt.grace_s", wanted.grace_s, grace)
    yield judged("preempt.min_run_s", wanted.min_run_s, min_run)


def summary(cluster: Cluster) -> list[tuple[str, str]]:
    """Facts of the cluster that no key of a site file holds, in words; none where it does not answer."""
    keys = {
        "cluster": "ClusterName",
        "Slurm": "SLURM_VERSION",
        "memory per CPU where none is asked, MB": "DefMemPerCPU",
        "memory per node where none is asked, MB": "DefMemPerNode",
        "pre-emption": "PreemptType",
        "pre-empted jobs": "PreemptMode",
        "enforced of accounts": "AccountingStorageEnforce",
    }
    try:
        config = cluster.config
    except NotKnownError:
        return []
    return [(words, config[key]) for words, key in keys.items() if word(config.get(key))]


def _enforced(cluster: Cluster, what: str) -> bool:
    """Limits and QOS are enforced only with associations, and Slurm then lists those too."""
    words = cluster.setting("AccountingStorageEnforce").lower().split(",")
    return "all" in words or what in words


def _accounts(cluster: Cluster) -> list[str]:
    return sorted({one.account for one in cluster.associations})


def _associations(site: SiteConfig, cluster: Cluster) -> list[Association]:
    """Those of the account that jobs are charged to; all of the user's where none is named."""
    mine = cluster.associations
    return [one for one in mine if site.account.value in (None, one.account)] or mine


def _job_qos(site: SiteConfig, cluster: Cluster) -> list[str]:
    """The QOS that a job may run in."""
    named = [site.qos] if site.qos else [one.default_qos or "normal" for one in _associations(site, cluster)]
    found = [name for name in named if name in cluster.qos]
    if not found:
        raise NotKnownError(f"`sacctmgr show qos` lists none of {', '.join(named) or 'yours'}")
    return found


def _grace_s(partition: Partition) -> int:
    """scontrol prints GraceTime in seconds."""
    try:
        return int(partition.said("GraceTime"))
    except ValueError:
        raise NotKnownError(f"GraceTime={partition.said('GraceTime')} of {partition.name} is no number") from None
