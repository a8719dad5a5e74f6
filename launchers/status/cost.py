"""Cost of a sweep: what its attempts may cost and did cost, and whether a budget allows more of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from inpaint_bench.core.attempt_state import RunArtifacts
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize, table
from inpaint_bench.core.errors import UserError
from launchers.points.point import Point, by_site
from launchers.points.site_catalog import reachability
from launchers.slurm.query import elapsed_s
from launchers.sweep.events import AttemptKey, Planned
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import PointSpec

from .survey import OPEN_STATES, AttemptStatus, SweepStatus, poll_sweep


@dataclass(frozen=True, kw_only=True)
class AttemptCost:
    """Cost of one submitted attempt."""

    key: AttemptKey
    site: str
    gpu: str
    limit_min: float | None  # None: of a sweep from before time limits were recorded
    planned: float | None  # service units up to the time limit; None: the site's charging rule is not known
    is_upper_bound: bool = False  # the rate of the GPU is
    elapsed_min: float | None  # None: not known, or not started
    source: str  # of elapsed_min

    @property
    def actual(self) -> float | None:
        """Return service units for the elapsed time: a site charges what was reserved for as long as it was."""
        if self.planned is None or not self.limit_min or self.elapsed_min is None:
            return None
        return self.planned * self.elapsed_min / self.limit_min


def attempt_costs(ledger: Ledger, sweep: SweepStatus) -> list[AttemptCost]:
    """Return the cost of every submitted attempt, in order of points. Queries sacct of the reachable sites."""
    entries = planned_entries(ledger)
    statuses = [status for point in sweep.points for status in point.attempts if status.attempt.job_id is not None]
    elapsed = _accounted_s(statuses, sweep.sites)
    costs = []
    for status in statuses:
        attempt = status.attempt
        entry = entries.get(attempt.key, entries[attempt.point, 0])
        seconds, source = elapsed.get((attempt.site, str(attempt.job_id))), "sacct"
        # sacct was not asked (a site over ssh, an unreachable one), or does not know the job.
        if seconds is None:
            seconds, source = _manifest_s(status.artifacts), "manifest"
        costs.append(
            AttemptCost(
                key=attempt.key,
                site=attempt.site,
                gpu=str(entry.gpu),
                limit_min=entry.total_time_min,
                planned=entry.service_units,
                is_upper_bound=entry.gpu in sweep.sites[attempt.site].charging.upper_bounds,
                elapsed_min=None if seconds is None else seconds / 60,
                source="unknown" if seconds is None else source,
            )
        )
    return costs


def planned_entries(ledger: Ledger) -> dict[AttemptKey, PointSpec]:
    """Return what was planned, by point and attempt; attempt 0 is the point as first composed.

    Of an attempt that was made at another site only that is known.
    """
    planned = {(point.point, 0): point for point in ledger.sweep.points}
    for event in ledger.events(Planned):
        planned |= {(attempt.point, attempt.attempt): attempt for attempt in event.attempts}
    return planned


def cost_table(costs: Sequence[AttemptCost], units: Mapping[str, str]) -> Table:
    """Return a row per site and GPU; `units` is what each site charges in."""
    groups: dict[tuple[str, str], list[AttemptCost]] = {}
    for cost in costs:
        groups.setdefault((cost.site, cost.gpu), []).append(cost)
    rows = [
        (
            site,
            gpu,
            len(group),
            _sum(cost.limit_min for cost in group),
            _sum(cost.elapsed_min for cost in group),
            units[site],
            _at_most(_sum(cost.planned for cost in group), group[0].is_upper_bound),
            _at_most(_sum(cost.actual for cost in group), group[0].is_upper_bound),
            ", ".join(sorted({cost.source for cost in group})),
        )
        for (site, gpu), group in groups.items()
    ]
    columns = ("site", "gpu", "attempts", "limit min", "elapsed min", "unit", "planned", "actual", "elapsed from")
    return table(columns, rows)


def _accounted_s(statuses: Iterable[AttemptStatus], sites: Mapping[str, SiteConfig]) -> dict[tuple[str, str], float]:
    """Return elapsed seconds by site and job id, of the sites whose accounting answered."""
    jobs: dict[str, dict[str, str | None]] = {}
    for attempt in (status.attempt for status in statuses):
        if attempt.job_id and not attempt.carried:
            jobs.setdefault(attempt.site, {})[attempt.job_id] = attempt.job_name
    return {
        (site, job_id): seconds
        for site, names in jobs.items()
        if sites[site].connect.method == "slurm" and reachability(sites[site]).ok
        for job_id, seconds in elapsed_s(sites[site], names).items()
    }


def _manifest_s(artifacts: RunArtifacts) -> float | None:
    """Return seconds from the start of the run to its end or last write; the job itself started earlier."""
    manifest = artifacts.manifest
    if manifest is None or manifest.started_unix_ns is None:
        return None
    end_ns = manifest.ended_unix_ns
    end_unix = end_ns / 1e9 if end_ns else time.time() - (artifacts.manifest_age_s or 0.0)
    return end_unix - manifest.started_unix_ns / 1e9


def _sum(values: Iterable[float | None]) -> str | float | None:
    """Return the sum of the known values, with how many they are if some are unknown."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    if not known or len(known) == len(listed):
        return sum(known) if known else None
    return f"{sum(known):.4g} ({len(known)} of {len(listed)})"


def _at_most(cost: str | float | None, is_upper_bound: bool) -> str | float | None:
    if cost is None or not is_upper_bound:
        return cost
    return f"<= {cost if isinstance(cost, str) else f'{cost:.4g}'}"


def rate_note(points: Iterable[Point]) -> str:
    """Return a remark on the rates that are upper bounds, with a space before it; empty where none is."""
    names = sorted({f"{point.bench.gpu.name} at {point.site.name}" for point in points if point.has_bounded_rate})
    return f" (an upper bound: the rate of {', '.join(names)} is not known)" if names else ""


def cost_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield a line per site: the cost of its points if all of them run up to their time limits."""
    for name, members in by_site(points).items():
        if members[0].site.connect.method == "local":
            continue
        known = [point.service_units for point in members if point.service_units is not None]
        unit = members[0].site.charging.unit
        cost = f"at most {sum(known):.1f} {unit}" if known else "cost unknown (no charging rule configured)"
        partly = f" for {len(known)} of them" if 0 < len(known) < len(members) else ""
        yield f"{name}: {pluralize(len(members), 'point')}, {cost}{partly}{rate_note(members)}"


# --- budget --------------------------------------------------------------------------------------

# A site, and what an attempt costs or may cost there; None: its charging rule is not known.
Expense = tuple[SiteConfig, float | None]


def check_budget(points: Sequence[Point], budget: float | None, ledger: Ledger | None = None) -> None:
    """Raise UserError if these points and the sweep so far may cost more than `budget`, or if a cost is unknown.

    `ledger` is that of an existing sweep; the accounting of its sites is then queried.
    """
    if budget is None:
        return
    earlier = _earlier_expenses(ledger, {point.num for point in points}) if ledger else []
    new = [(point.site, point.service_units) for point in points if point.site.connect.method != "local"]
    expenses = [*earlier, *new]
    if unknown := sorted({site.name for site, amount in expenses if amount is None}):
        raise UserError(
            f"budget={budget:g}: the charging rule of {', '.join(unknown)} is not known "
            "(charging and charge_factor in its site file), so the cost cannot be capped"
        )
    units = sorted({site.charging.unit for site, _ in expenses})
    if len(units) > 1:
        raise UserError(f"budget={budget:g}: the sites charge in {' and '.join(units)}, so one number cannot cap them")
    spent, total = (sum(amount or 0.0 for _, amount in group) for group in (earlier, expenses))
    if total > budget:
        of_it = f", {spent:.1f} {units[0]} of it for earlier attempts" if spent else ""
        of_it += _by_site(expenses) + rate_note(points)
        raise UserError(f"budget={budget:g}: this sweep may cost {total:.1f} {units[0]}{of_it}; nothing was submitted")


def _by_site(expenses: Sequence[Expense]) -> str:
    """Return what each site charges, where there are several: their units have one name, but not one value."""
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
    sweep, entries = poll_sweep(ledger, holding_lock=True), planned_entries(ledger)
    costs = {cost.key: cost for cost in attempt_costs(ledger, sweep)}
    expenses: list[Expense] = []
    for point in sweep.points:
        num, is_resubmitted = point.record.num, point.record.num in resubmitted
        if point.record.plan and not point.attempts and not is_resubmitted:  # the plan is submitted at another site
            expenses.append((sweep.sites[point.record.site], entries[num, 0].service_units))
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
                amount = entries.get(attempt.key, entries[num, 0]).service_units
            expenses.append((sweep.sites[attempt.site], amount))
    return [(site, amount) for site, amount in expenses if site.connect.method != "local"]
