"""Explain why a job is pending, and what the user can do about it.

The codes are Slurm's own (https://slurm.schedmd.com/job_reason_codes.html). The rules cover the common ones, and the
first that matches applies; any other code is shown as it is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inpaint_bench.core.attempt_state import JOB_STATES, RELEASE, JobState
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.schema import PointState

from .query import expand_array


@dataclass(frozen=True, kw_only=True)
class PendingReason:
    """Why a job is pending; `status --json` prints these fields."""

    code: str  # Slurm's
    explanation: str
    advice: str
    stuck: bool  # it will not start unless the user does something

    @property
    def sentence(self) -> str:
        return f"{self.explanation} ({self.code})" if self.code else self.explanation


@dataclass(frozen=True)
class _Rule:
    """`explanation` and `advice` may contain {site}, {job}, {one_job}, {list_accounts} and {limit} (what sets it)."""

    pattern: str  # matches the whole code
    explanation: str
    advice: str = "nothing to do"
    stuck: bool = False


RULES = (
    _Rule("", "the scheduler has not considered it yet"),
    _Rule(
        "Priority|Resources",
        "waits for resources, or behind jobs of higher priority",
        "nothing to do; a shorter time_min may start sooner, in a gap",
    ),
    _Rule(
        "ReqNodeNotAvail.*|Nodes required for job are DOWN.*",
        "the nodes it could run on are down, drained or reserved for maintenance",
        "`sinfo -R` and `scontrol show reservation` at {site} show until when; a time_min that ends before a "
        "maintenance may start now",
    ),
    _Rule("BeginTime", "may not start before its begin time; Slurm delays a requeued job by 2 minutes"),
    _Rule(
        # AssocGrpGRESMinutes is a budget that is spent; ...RunMinutes limits what runs at a time, and is below.
        "(Assoc|QOS)Grp(?!.*RunMinutes).*(Minutes|WallLimit).*",
        "the allocation of {limit} is used up",
        "it starts when the allocation is renewed; {list_accounts}; for another account cancel it and `rerun` with "
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
        # After the time limits: the last of these patterns matches QOSMaxWallDurationPerJobLimit too.
        "Partition(NodeLimit|MaxNodes|MinNodes|Config).*|BadConstraints|MaxMemPerLimit|QOSMin.*"
        "|(Assoc|QOS)Max.*Per(Job|Node).*",
        "{limit} does not allow, or no node has, what it requests",
        "compare the site file with `inpaint-bench doctor site {site}`, then cancel the job and `rerun`",
        stuck=True,
    ),
    _Rule(
        # The remaining limits of accounts and QOS depend on other jobs.
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
        "its dependency, reservation or deadline can never be met",
        "cancel it and `rerun`",
        stuck=True,
    ),
    _Rule("JobHeldAdmin", "is held by the site's administrators", "ask the site's support", stuck=True),
    _Rule(
        "JobHeldUser|JobHoldMaxRequeue|JobLaunchFailure|.*[ _](failed|held)([ _].*)?",
        "is held, by a user or because it could not be started and was requeued",
        RELEASE,
        stuck=True,
    ),
)
_OTHER = _Rule("", "Slurm gives this reason", "`scontrol show job {one_job}` at {site} shows more")


def explain(code: str, site: SiteConfig, *, state: str = "PENDING", jobs: Sequence[str] = ()) -> PendingReason:
    """Explain Slurm's reason `code` of jobs in `state`; the advice names `jobs`."""
    code = "" if code == "None" else code.strip()
    rule = next((rule for rule in RULES if re.fullmatch(rule.pattern, code)), _OTHER)
    meaning = JOB_STATES.get(state, JobState(PointState.QUEUED))
    # The state outweighs a reason after which the job would start by itself.
    if meaning.advice and not rule.stuck:
        rule, code = _Rule("", meaning.explanation, meaning.advice, stuck=True), state
    elif meaning.explanation and not code:
        rule = _Rule("", meaning.explanation, rule.advice)
    limits = {"QOS": "its QOS", "Partition": "its partition", "Assoc": "its account"}  # by how the code begins
    values = {
        "site": site.name,
        "job": ",".join(jobs) or "<job>",
        "one_job": next(expand_array(jobs[0])) if jobs else "<job>",  # `scontrol show` takes no list of tasks
        "list_accounts": f"`{site.account.how_to_list or 'sacctmgr show assoc user=$USER'}` at {site.name} lists yours",
        "limit": next((limit for prefix, limit in limits.items() if code.startswith(prefix)), "the site"),
    }
    cluster = f"-M {site.cluster} " if site.cluster else ""
    advice = re.sub("`(scontrol|sinfo) ", rf"`\1 {cluster}", rule.advice.format(**values))
    return PendingReason(code=code, explanation=rule.explanation.format(**values), advice=advice, stuck=rule.stuck)
