"""Cost of a sweep: what its attempts may cost and did cost, and whether a budget allows more of them."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from inpaint_bench.core.attempt_state import RunArtifacts
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from launchers.points.placement import uncounted_directives
from launchers.points.point import Point, by_site
from launchers.points.site_catalog import reachability
from launchers.slurm.query import elapsed_s
from launchers.sweep.attempt import AttemptKey
from launchers.sweep.ledger import Ledger

from .survey import OPEN_STATES, AttemptStatus, PointStatus, SweepStatus, by_queue, poll_sweep

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of an attempt, or of all attempts of a point, in its site's service units."""

    # for the elapsed time: a site charges what was reserved for as long as it was; None: not known
    actual: float | None
    at_most: float | None  # with the time limit of an attempt that has not ended; None: charging rule not known
    is_upper_bound: bool = False  # the rate of the GPU is


def attempt_costs(sweep: SweepStatus) -> dict[AttemptKey, Cost]:
    """Return the cost of every submitted attempt, by the elapsed time of its job as sacct has it.

    The actual cost is not known if this site's sacct does not give that: a manifest lacks the time before the run.
    """
    statuses = {s.attempt.key: s for point in sweep.points for s in point.attempts if s.attempt.job_id is not None}
    costs = {key: _cost(status, sweep.sites) for key, status in statuses.items()}
    for queue, (site, attempts) in by_queue(sweep.sites, (status.attempt for status in statuses.values())).items():
        if site.connection.submits_here and reachability(site).ok:
            since_unix = min(attempt.planned_unix for attempt in attempts)
            by_job = elapsed_s(site, {str(attempt.job_id): attempt.job_name for attempt in attempts}, since_unix)
            sharing = Counter(attempt.job_id for attempt in attempts)  # points that one job ran share its time
            unknown = 0
            for attempt in attempts:
                if (seconds := by_job.get(str(attempt.job_id))) is not None:
                    costs[attempt.key] = _cost(statuses[attempt.key], sweep.sites, seconds / sharing[attempt.job_id])
                else:
                    costs[attempt.key] = replace(costs[attempt.key], actual=None, at_most=attempt.service_units)
                    unknown += statuses[attempt.key].state not in OPEN_STATES
            if unknown:
                those = pluralize(unknown, "attempt")
                log.warning(f"{queue}: sacct gives no elapsed time of {those}: time limits count against the budget")
    return costs


def point_cost(point: PointStatus, sites: Mapping[str, SiteConfig]) -> Cost:
    """Return what the attempts of a point at its present site did and may cost: each site has a unit of its own."""
    here = [status for status in point.attempts if status.attempt.site == point.record.site]
    own = [_cost(status, sites) for status in here if status.attempt.job_id is not None]
    return Cost(
        actual=_sum([cost.actual for cost in own]),
        at_most=_sum([cost.at_most for cost in own]),
        is_upper_bound=any(cost.is_upper_bound for cost in own),
    )


def _cost(status: AttemptStatus, sites: Mapping[str, SiteConfig], elapsed_s: float | None = None) -> Cost:
    """Return the cost of an attempt whose job held its resources for `elapsed_s`; None: as long as its run took."""
    attempt, actual = status.attempt, None
    seconds = _manifest_s(status.artifacts) if elapsed_s is None else elapsed_s
    if attempt.service_units is not None and attempt.total_time_min and seconds is not None:
        actual = attempt.service_units * seconds / 60 / attempt.total_time_min
    return Cost(
        actual=actual,
        at_most=attempt.service_units if status.state in OPEN_STATES or actual is None else actual,
        is_upper_bound=attempt.gpu in sites[attempt.site].charging.upper_bounds,
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum of the known values; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _manifest_s(artifacts: RunArtifacts) -> float | None:
    """Return seconds from the start of the run to its end or last write; the job itself started earlier."""
    manifest = artifacts.manifest
    if manifest is None or manifest.started_unix_ns is None:
        return None
    end_ns = manifest.ended_unix_ns
    end_unix = end_ns / 1e9 if end_ns else time.time() - max(0.0, artifacts.manifest_age_s or 0.0)
    return end_unix - manifest.started_unix_ns / 1e9


def rate_note(points: Iterable[Point]) -> str:
    """Return a remark on the rates that are upper bounds, with a space before it; empty if none is."""
    names = sorted({f"{point.bench.gpu.name} at {point.site.name}" for point in points if point.has_bounded_rate})
    return f" (an upper bound: the rate of {', '.join(names)} is not known)" if names else ""


def cost_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield a line per site: the cost of its points if all of them run up to their time limits."""
    for name, members in by_site(points).items():
        if not members[0].site.connection.has_slurm:
            continue
        known = [point.service_units for point in members if point.service_units is not None]
        unit = members[0].site.charging.unit
        cost = f"at most {sum(known):.1f} {unit}" if known else "cost unknown (its charging rule does not tell it)"
        partly = f" for {len(known)} of them" if 0 < len(known) < len(members) else ""
        yield f"{name}: {pluralize(len(members), 'point')}, {cost}{partly}{rate_note(members)}"


# --- budget --------------------------------------------------------------------------------------

# A site, and what an attempt costs or may cost there; None: its charging rule is not known.
Expense = tuple[SiteConfig, float | None]


def _how_to_cap(site: SiteConfig, gpu: str) -> str:
    """Return which keys to set so that the cost of this GPU is known; GPU hours if the site has no rule at all."""
    rule, entry = site.charging, site.gpus.get(gpu)
    charging, own = f"sites.{site.name}.charging", f"sites.{site.name}.gpus.{gpu}"
    if not entry or not (rule.units_per_gpu or rule.gpus_per_unit or rule.cores_per_unit):
        return f"to cap GPU hours, set {charging}.unit=GPU-h {charging}.units_per_gpu.{gpu}=1"
    lacking = {
        f"{charging}.units_per_gpu.{gpu}": rule.units_per_gpu and gpu not in rule.units_per_gpu,
        f"{own}.charge_factor": not rule.units_per_gpu and entry.charge_factor is None,
        f"{own}.cpus_per_gpu": rule.cores_per_unit and entry.cpus_per_gpu is None,
        f"{own}.mem_gb_per_gpu": gpu in rule.mem_gb_per_unit and entry.mem_gb_per_gpu is None,
    }
    return f"set {' and '.join(key for key, is_lacking in lacking.items() if is_lacking) or charging}"


def check_budget(points: Sequence[Point], budget: float | None, ledger: Ledger | None = None) -> None:
    """Raise UserError if these points and the sweep so far may cost more than `budget`, or if a cost is unknown.

    `ledger` is that of an existing sweep; the accounting of its sites is then queried.
    """
    if budget is None:
        return
    earlier = _earlier_expenses(ledger, {point.num for point in points}) if ledger else []
    new = [(point.site, point.service_units) for point in points if point.site.connection.has_slurm]
    expenses = [*earlier, *new]
    for point in points:
        for name, key in uncounted_directives(point.site, point.bench.gpu.name).items():
            raise UserError(
                f"budget={budget:g}: sites.{point.site.name}.directives.{name} changes what a job costs, and the "
                f"charging rule does not see it; leave it out{f', and set {key}' if key else ''}"
            )
    if unknown := {site.name: site for site, amount in expenses if amount is None}:
        name, site = min(unknown.items())
        gpus = [p.bench.gpu.name for p in points if p.service_units is None and p.site.name == name]
        way = _how_to_cap(site, min(gpus, default=points[0].bench.gpu.name))
        raise UserError(
            f"budget={budget:g}: the charging rule of {', '.join(sorted(unknown))} is not known "
            f"(charging and charge_factor in its site file), so the cost cannot be capped; {way}"
        )
    units = sorted({site.charging.unit for site, _ in expenses})
    if len(units) > 1:
        raise UserError(f"budget={budget:g}: the sites charge in {' and '.join(units)}, so one number cannot cap them")
    spent, total = (sum(amount or 0.0 for _, amount in group) for group in (earlier, expenses))
    if total > budget:
        of_it = f", {spent:.1f} {units[0]} of it for earlier attempts" if spent else ""
        of_it += _by_site(expenses) + rate_note(points)
        raise UserError(
            f"budget={budget:g}: this sweep may cost {total:.1f} {units[0]}{of_it}; nothing was submitted. "
            "A shorter time limit, time_min=..., lowers what it may cost"
        )


def _by_site(expenses: Sequence[Expense]) -> str:
    """Return what each site charges, if there are several: their units have one name, but not one value."""
    amounts: dict[str, float] = {}
    for site, amount in expenses:
        amounts[site.name] = amounts.get(site.name, 0.0) + (amount or 0.0)
    if len(amounts) < 2:
        return ""
    return ", " + " and ".join(f"{amount:.1f} at {name}" for name, amount in sorted(amounts.items()))


def _earlier_expenses(ledger: Ledger, resubmitted: Collection[int]) -> list[Expense]:
    """Return the expenses of a sweep so far: actual for attempts that have ended, else up to the time limit.

    `resubmitted` points are about to be submitted, so their last attempt has ended or never was in a queue.
    """
    sweep = poll_sweep(ledger)
    launched = {point.point: point for point in ledger.sweep.points}
    costs = attempt_costs(sweep)
    expenses: list[Expense] = []
    for point in sweep.points:
        num, is_resubmitted = point.record.num, point.record.num in resubmitted
        if point.record.plan and not point.attempts and not is_resubmitted:  # the plan is submitted at another site
            expenses.append((sweep.sites[point.record.site], launched[num].service_units))
        for status in point.attempts:
            attempt, cost = status.attempt, costs.get(status.attempt.key)
            # Without a job id it may still be in a queue, if its launcher died inside sbatch. One that is resubmitted
            # is not, and may be charged only if it left a run directory.
            may_be_charged = not attempt.refused and (not is_resubmitted or status.artifacts.run_dir_exists)
            if not attempt.job_id and not may_be_charged:
                continue
            # An attempt that is still open may use all of its time limit.
            amount = cost.actual if cost and (is_resubmitted or status.state not in OPEN_STATES) else None
            if amount is None:
                amount = attempt.service_units
            expenses.append((sweep.sites[attempt.site], amount))
    return [(site, amount) for site, amount in expenses if site.connection.has_slurm]
