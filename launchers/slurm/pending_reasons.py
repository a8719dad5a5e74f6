"""Why a job waits, in plain words, and what a person can do about it.

The codes are Slurm's own (slurm.schedmd.com/job_reason_codes.html). One table of rules, first match wins. A code
that is in none of them is shown as it is: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inpaint_bench.core.site import SiteConfig

_WHAT = {
    "billing": "billing units",
    "cpu": "cores",
    "gres": "GPUs",
    "mem": "memory",
    "memory": "memory",
    "node": "nodes",
    "license": "licences",
    "energy": "energy",
    "bb": "burst buffer",
}
_AGAIN = "cancel it and `rerun` with {change}"
_SHOW = "`scontrol show job {job}` at {site} says more"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """`stuck`: it will not start unless somebody does something."""

    code: str  # as Slurm said it
    words: str
    advice: str
    stuck: bool

    @property
    def sentence(self) -> str:
        return f"{self.words} ({self.code})" if self.code else self.words


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """`words` and `advice` may name {site}, {job}, {accounts}, {who} (account or QOS), {what} and {unavailable}."""

    pattern: str  # regular expression of the whole code
    words: str
    advice: str
    stuck: bool = False


_OWNER = "(?P<who>Assoc|QOS)"
_KIND = "(?P<what>Billing|C[Pp][Uu]|GRES|Mem(?:ory)?|Node|License|Energy|BB|Unknown)"

RULES = (
    _Rule(
        pattern="",
        words="the scheduler has not looked at it yet",
        advice="nothing to do",
    ),
    _Rule(
        pattern="Priority",
        words="jobs of higher priority come first",
        advice="nothing to do; a shorter time_min may start sooner, in a gap",
    ),
    _Rule(
        pattern="Resources",
        words="is next, waits until enough GPUs, cores and memory are free",
        advice="nothing to do; a shorter time_min may start sooner, in a gap",
    ),
    _Rule(
        pattern="Nodes required for job are DOWN.*",
        words="the nodes it could run on are down, drained or kept for jobs of higher priority",
        advice="`sinfo -R` at {site} says which nodes are down and why",
    ),
    _Rule(
        pattern="ReqNodeNotAvail(?P<unavailable>.*)",
        words="the nodes it could run on are down, or kept free for a maintenance{unavailable}",
        advice="`sinfo -R` and `scontrol show reservation` at {site} say until when; a time_min that ends before a "
        "maintenance begins may start now",
    ),
    _Rule(
        pattern="JobArrayTaskLimit",
        words="as many tasks of its array run as may run at once",
        advice="nothing to do",
    ),
    _Rule(
        pattern=f"{_OWNER}Grp{_KIND}RunMinutes(Limit)?",
        words="the jobs that run already hold all the minutes of {what} that {who} may have under way at once",
        advice="it starts as they end; a shorter time_min holds fewer",
    ),
    _Rule(
        pattern=f"{_OWNER}Grp{_KIND}Minutes(Limit)?",
        words="the allocation is used up: {who} has no minutes of {what} left",
        advice="it will not start until there are more; {accounts}; with another account: "
        + _AGAIN.format(change="sites.{site}.account.value=..."),
        stuck=True,
    ),
    _Rule(
        pattern=f"{_OWNER}GrpWallLimit",
        words="the allocation is used up: {who} has no wall-clock time left",
        advice="it will not start until there is more; {accounts}",
        stuck=True,
    ),
    _Rule(
        pattern=f"({_OWNER}GrpJobsLimit|AssocMaxJobsLimit|QOSMaxJobsPerUserLimit|MaxJobsPerAccount|QOSJobLimit"
        "|AssociationJobLimit)",
        words="as many jobs run as {who} may run at once",
        advice="it starts as they end",
    ),
    _Rule(
        pattern="(Assoc|QOS)(Grp|Max)Submit.*|MaxSubmitJobsPerAccount",
        words="as many jobs are queued as may be queued",
        advice="it starts as they end",
    ),
    _Rule(
        pattern=f"{_OWNER}Max(WallDuration|{_KIND}Minutes)PerJob(Limit)?|QOSTimeLimit|AssociationTimeLimit",
        words="asks for more time than {who} allows for one job",
        advice=_AGAIN.format(change="a smaller time_min"),
        stuck=True,
    ),
    _Rule(
        pattern=f"{_OWNER}Max{_KIND}Per(Job|Node)(Limit)?",
        words="asks for more {what} than {who} allows for one job",
        advice="correct the GPU's entry in the site file, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="MaxMemPerLimit",
        words="asks for more memory per core or node than the partition allows",
        advice="correct mem_gb_per_gpu in the site file, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern=f"QOSMax{_KIND}PerUser(Limit)?",
        words="your running jobs use all the {what} that one user may have at once",
        advice="it starts as they end",
    ),
    _Rule(
        pattern=f"Max{_KIND}s?PerAccount",
        words="the account's running jobs use all the {what} that it may have at once",
        advice="it starts as they end",
    ),
    _Rule(
        pattern=f"{_OWNER}Grp{_KIND}(Limit)?",
        words="running jobs use all the {what} that {who} may have at once",
        advice="it starts as they end",
    ),
    _Rule(
        pattern=f"QOSMin{_KIND}.*",
        words="asks for less {what} than its QOS demands",
        advice="correct the request or the qos in the site file, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="(QOS|Association)ResourceLimit|AccountingPolicy|QOSUsageThreshold",
        words="a limit of the account or its QOS is reached",
        advice="{accounts}; " + _SHOW,
    ),
    _Rule(
        pattern="PartitionTimeLimit.*",
        words="asks for more time than its partition allows",
        advice=_AGAIN.format(change="a smaller time_min") + "; `scontrol show partition` at {site} shows MaxTime",
        stuck=True,
    ),
    _Rule(
        pattern="Partition(NodeLimit|MaxNodes|MinNodes|Config).*",
        words="asks for something that its partition does not allow",
        advice="compare the site file with `scontrol show partition` at {site}, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="Partition(Down|Inactive)",
        words="its partition starts no jobs at present",
        advice="the site has closed it; its news, or `scontrol show partition` at {site}, say more",
    ),
    _Rule(
        pattern="BadConstraints",
        words="no node has what it asks for",
        advice="compare the site file with `sinfo -o '%P %G %f %c %m'` at {site}, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="BeginTime",
        words="may not start before its begin time; Slurm lets a requeued job rest for 2 minutes",
        advice="nothing to do",
    ),
    _Rule(
        pattern="DependencyNeverSatisfied",
        words="depends on a job that failed or is gone",
        advice="cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="Dependency",
        words="waits for another job to end",
        advice=_SHOW,
    ),
    _Rule(
        pattern="JobHeldUser",
        words="is held, by you or in your name",
        advice="`scontrol release {job}` at {site}",
        stuck=True,
    ),
    _Rule(
        pattern="JobHeldAdmin",
        words="is held by the site's administrators",
        advice="ask the site's support why",
        stuck=True,
    ),
    _Rule(
        pattern="user[ _]env[ _]retrieval[ _]failed.*",
        words="your login environment could not be loaded on its node, so it was requeued and is held",
        advice="see what your shell's start-up files need that a compute node lacks; then `scontrol release {job}` at "
        "{site}",
        stuck=True,
    ),
    _Rule(
        pattern="launch[ _]failed.*|JobLaunchFailure",
        words="could not be started on its node, so it was requeued and is held",
        advice="`scontrol release {job}` at {site} tries again; if it comes back, tell the site's support the node",
        stuck=True,
    ),
    _Rule(
        pattern="JobHoldMaxRequeue|job[ _]requeued[ _]in[ _]held[ _]state",
        words="was requeued and is held",
        advice="`scontrol release {job}` at {site} lets it go on; its log says why it was requeued",
        stuck=True,
    ),
    _Rule(
        pattern="InvalidAccount|AccountNotAllowed",
        words="its account does not exist, has ended, or may not use this partition",
        advice="{accounts}; " + _AGAIN.format(change="sites.{site}.account.value=..."),
        stuck=True,
    ),
    _Rule(
        pattern="InvalidQOS|QOSNotAllowed",
        words="its QOS does not exist, or its account or partition may not use it",
        advice="correct sites.{site}.qos, then cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="Reservation",
        words="waits for its reservation to begin",
        advice="`scontrol show reservation` at {site} says when",
    ),
    _Rule(
        pattern="ReservationDeleted",
        words="the reservation it asks for is gone",
        advice="cancel it and `rerun`",
        stuck=True,
    ),
    _Rule(
        pattern="Licenses",
        words="waits for licences or file systems that the site counts as such",
        advice="`scontrol show licenses` at {site}",
    ),
    _Rule(
        pattern="BurstBuffer.*|Prolog|Cleaning|SchedDefer|FedJobLock|Power.*",
        words="Slurm prepares it or its nodes",
        advice="nothing to do",
    ),
    _Rule(
        pattern="NodeDown|FrontEndDown|SystemFailure",
        words="what it would run on is down",
        advice="`sinfo -R` at {site} says why",
    ),
    _Rule(
        pattern="DeadLine",
        words="can no longer end before its deadline",
        advice="cancel it and `rerun`",
        stuck=True,
    ),
)

# where the state says more than the reason
_STATES = {
    "CONFIGURING": "its node is being made ready",
    "SUSPENDED": "is suspended by the site, and goes on later",
    "REQUEUED": "is being requeued",
    "REQUEUE_HOLD": "was requeued and is held",
    "SPECIAL_EXIT": "was requeued and is held",
}


def explain(code: str, site: SiteConfig, *, state: str = "PENDING", jobs: Sequence[str] = ()) -> Pending:
    """Slurm's `code` in words. `state` is the job's; `jobs` are those that the advice is for."""
    code = "" if code == "None" else code.strip()
    rule, found = _rule(code)
    job = ",".join(jobs) or "<job>"
    if rule is None:
        words, advice, stuck = "Slurm gives a reason of its own", _SHOW.format(job=job, site=site.name), False
        return Pending(code=code, words=words, advice=advice, stuck=stuck)
    listing = site.account.how_to_list or "sacctmgr show assoc user=$USER"
    groups = {name: text or "" for name, text in (found.groupdict() if found else {}).items()}
    who = "its QOS" if groups.get("who", code[:3]) == "QOS" else "its account"
    unavailable = groups.get("unavailable", "").strip(" ,").removeprefix("UnavailableNodes:")
    values = {
        "site": site.name,
        "job": job,
        "accounts": f"`{listing}` at {site.name} lists yours",
        "who": who,
        "what": _WHAT.get(groups.get("what", "").lower(), "what is counted"),
        "unavailable": f": {unavailable}" if unavailable else "",
    }
    words = rule.words.format(**values)
    if not code and state in _STATES:
        words = _STATES[state]
    return Pending(code=code, words=words, advice=rule.advice.format(**values), stuck=rule.stuck)


def _rule(code: str) -> tuple[_Rule | None, re.Match[str] | None]:
    for rule in RULES:
        if found := re.fullmatch(rule.pattern, code):
            return rule, found
    return None, None
