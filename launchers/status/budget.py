"""What a budget allows: it caps a sweep as a whole, so what was sent before counts beside what is to be sent now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Status
from launchers.points.point import Point
from launchers.sweep.ledger import Attempt, Ledger, PointRecord

from .cost import asked_for, spent
from .survey import sites_of


@dataclass(frozen=True, kw_only=True)
class Expense:
    site: str
    unit: str
    amount: float | None  # None: the site's rule is not known


def check(points: Sequence[Point], budget: float | None, ledger: Ledger | None = None) -> None:
    """Refuse points with which their sweep may cost more than `budget`, or whose cost is not known.

    `ledger`: of the sweep, where it exists already; the accounting of its sites is then asked. Raises UserError.
    """
    if budget is None:
        return
    before = earlier(ledger, {point.num for point in points}) if ledger else []
    now = [
        Expense(site=point.site.name, unit=point.site.charging.unit, amount=point.service_units)
        for point in points
        if point.site.connect.method != "local"
    ]
    unknown = sorted({one.site for one in (*before, *now) if one.amount is None})
    if unknown:
        raise UserError(
            f"budget={budget:g}: the charging rule of {', '.join(unknown)} is not known "
            "(charging and charge_factor in its site file), so the cost cannot be capped"
        )
    units = sorted({one.unit for one in (*before, *now)})
    if len(units) > 1:
        raise UserError(f"budget={budget:g}: its sites charge in {' and in '.join(units)}, so no one number caps it")
    had, more = (sum(one.amount or 0.0 for one in some) for some in (before, now))
    if had + more > budget:
        (unit,) = units
        of_it = f", {had:.1f} {unit} of it by what was sent before" if had else ""
        raise UserError(f"budget={budget:g}: this sweep may cost {had + more:.1f} {unit}{of_it}; nothing was submitted")


def earlier(ledger: Ledger, again: Collection[int]) -> list[Expense]:
    """What the attempts so far cost, where that is known and they have ended, and else at most.

    `again`: the points that are about to be sent, whose last attempt has ended therefore, or was never sent.
    """
    sites, asked, records = sites_of(ledger), asked_for(ledger), ledger.points()
    took = {(one.point, one.attempt): one for one in spent(ledger, records.values())}
    found = []
    for record in records.values():
        for key, site in _charged(record, ledger, again):
            if sites[site].connect.method == "local":
                continue
            one = took.get(key)
            actual = one.actual if one and _over(record, key[1], ledger, again) else None
            most = asked.get(key, asked[record.num, 0]).service_units
            amount = most if actual is None else actual
            found.append(Expense(site=site, unit=sites[site].charging.unit, amount=amount))
    return found


def _charged(record: PointRecord, ledger: Ledger, again: Collection[int]) -> Iterator[tuple[tuple[int, int], str]]:
    """Point and attempt, and its site, of what may have been charged for, or may be yet."""
    if not record.attempts and record.plan and record.num not in again:
        yield (record.num, 0), record.site  # whoever carries the plan sends it
    for attempt in record.attempts:
        if attempt.refused and attempt.job_id is None:
            continue
        if attempt.job_id is None and record.num in again and not _left(attempt, ledger).run_dir_exists:
            continue  # the look before this one found that it never was in a queue
        yield (record.num, attempt.attempt), attempt.site


def _over(record: PointRecord, number: int, ledger: Ledger, again: Collection[int]) -> bool:
    """Nothing more will be charged for the attempt."""
    assert record.last is not None
    if record.num in again or number != record.last.attempt:
        return True
    word = SchedulerState.load(ledger.folder / record.last.subdir)
    manifest = _left(record.last, ledger).manifest or {}
    return (word is not None and word.final) or manifest.get("status") in (Status.COMPLETED, Status.FAILED)


def _left(attempt: Attempt, ledger: Ledger) -> RunArtifacts:
    return RunArtifacts.read(ledger.folder / attempt.subdir)
