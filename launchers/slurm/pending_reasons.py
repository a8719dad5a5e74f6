"""Why a job is pending, in plain words, and what the user can do about it.

The codes are Slurm's own (https://slurm.schedmd.com/job_reason_codes.html). The rules cover those of daily use, first
match wins; any other code is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inpaint_bench.core.site import SiteConfig


@dataclass(frozen=True, kw_only=True)
class PendingReason:
    """Why a job waits. `stuck`: it will not start unless the user does something."""

    code: str  # Slurm's
    text: str
    advice: str
    stuck: bool

    @property
    def sentence(self) -> str:
        """Text and code."""
        return f"{self.text} ({self.code})" if self.code else self.text


@dataclass(frozen=True)
class _Rule:
    """`text` and `advice` may name {site}, {job}, {list_accounts}, {limit} (account or QOS) and {nodes}."""

    pattern: str  # of the whole code
    text: str
    advice: str = "nothing to do"
    stuck: bool = False


_FIT = "compare the site file with `inpaint-bench doctor site {site}`, then cancel the job and `rerun`"
RULES = (
    _Rule("", "the scheduler has not considered it yet"),
    _Rule(
        "Priority|Resources",
        "waits for resources, or behind jobs of higher priority",
        "nothing to do; a shorter time_min may start sooner, in a gap",
    ),
    _Rule(
        "ReqNodeNotAvail(?P<nodes>.*)|Nodes required for job are DOWN.*",
        "the nodes it could run on are down, drained or reserved for maintenance{nodes}",
        "`sinfo -R` and `scontrol show reservation` at {site} show until when; a time_min that ends before a "
        "maintenance may start now",
    ),
    _Rule("BeginTime", "may not start before its begin time; Slurm delays a requeued job by 2 minutes"),
    _Rule(
        "(Assoc|QOS)Grp(?!.*RunMinutes).*(Minutes|WallLimit).*",
        "the allocation of {limit} is used up",
        "it starts when there is more; {list_accounts}; for another account cancel it and `rerun` with "
        "sites.{site}.account.value=...",
        stuck=True,
    ),
    _Rule(
        "PartitionTimeLimit.*|(Assoc|QOS)Max(WallDuration|.*Minutes)PerJob.*|(QOS|Association)TimeLimit",
        "its time limit is longer than {limit} allows",
        "cancel it and `rerun` with a smaller time_min",
        stuck=True,
    ),
    _Rule(
        "Partition(NodeLimit|MaxNodes|MinNodes|Config).*|BadConstraints|MaxMemPerLimit|QOSMin.*"
        "|(Assoc|QOS)Max.*Per(Job|Node).*",
        "{limit} does not allow, or no node has, what it requests",
        _FIT,
        stuck=True,
    ),
    _Rule(
        "(Assoc|QOS)(Grp|Max).*|Max.*PerAccount|(QOS|Association)(Job|Resource)Limit|JobArrayTaskLimit",
        "a limit of {limit} is reached by jobs that run or are queued",
        "it starts as they end",
    ),
    _Rule(
        "Invalid(Account|QOS)|(Account|QOS)NotAllowed",
        "its account or QOS does not exist, has expired, or may not use this partition",
        "{list_accounts}; cancel it and `rerun` with sites.{site}.account.value=... or sites.{site}.qos=...",
        stuck=True,
    ),
    _Rule(
        "DependencyNeverSatisfied|ReservationDeleted|DeadLine",
        "what it waits for will never happen",
        "cancel it and `rerun`",
        stuck=True,
    ),
    _Rule("JobHeldAdmin", "is held by the site's administrators", "ask the site's support", stuck=True),
    _Rule(
        "JobHeldUser|JobHoldMaxRequeue|JobLaunchFailure|.*[ _](failed|held)([ _].*)?",
        "is held, by a user or because it could not be started and was requeued",
        "`scontrol release {job}` at {site}; its log and `scontrol show job {job}` show why",
        stuck=True,
    ),
)
_OTHER = _Rule("", "Slurm gives this reason", "`scontrol show job {job}` at {site} shows more")

# states that say more than an empty reason
_STATES = {
    "CONFIGURING": "its node is booting or being configured",
    "SUSPENDED": "is suspended by the site and continues later",
    "REQUEUED": "is being requeued",
    "REQUEUE_HOLD": "was requeued and is held",
    "SPECIAL_EXIT": "was requeued and is held",
}


def explain(code: str, site: SiteConfig, *, state: str = "PENDING", jobs: Sequence[str] = ()) -> PendingReason:
    """Explain Slurm's reason `code` of jobs in `state`; `jobs` are named in the advice."""
    code = "" if code == "None" else code.strip()
    match, rule = next(((match, rule) for rule in RULES if (match := re.fullmatch(rule.pattern, code))), (None, _OTHER))
    nodes = ((match and match.groupdict().get("nodes")) or "").strip(" ,").removeprefix("UnavailableNodes:")
    limits = {"QOS": "its QOS", "Par": "its partition"}
    values = {
        "site": site.name,
        "job": ",".join(jobs) or "<job>",
        "list_accounts": f"`{site.account.how_to_list or 'sacctmgr show assoc user=$USER'}` at {site.name} lists yours",
        "limit": limits.get(code[:3], "its account" if code.startswith("Assoc") else "the site"),
        "nodes": f": {nodes}" if nodes else "",
    }
    text = rule.text.format(**values)
    if not code and state in _STATES:
        text = _STATES[state]
    return PendingReason(code=code, text=text, advice=rule.advice.format(**values), stuck=rule.stuck)
