"""Planned against actual: what the attempts of a sweep might have cost, and what they did by the time they took."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from inpaint_bench.core.attempt_state import RunArtifacts
from inpaint_bench.core.console import table
from inpaint_bench.core.site import SiteConfig
from launchers.points.site_catalog import reachability
from launchers.slurm.query import elapsed_s
from launchers.sweep.events import Planned
from launchers.sweep.ledger import Attempt, Ledger, PointRecord
from launchers.sweep.sweep_record import PointSpec

from .survey import sites_of


@dataclass(frozen=True, kw_only=True)
class Spent:
    """One attempt that was submitted."""

    point: int
    attempt: int
    site: str
    gpu: str
    limit_min: float | None  # None: of a sweep from before limits were written down
    planned: float | None  # service units to the time limit; None: the site's rule is not known
    elapsed_min: float | None  # None: nobody knows, or it has not begun
    witness: str  # who says how long it took

    @property
    def actual(self) -> float | None:
        """Service units by the time it took: a site charges what was reserved for as long as it was held."""
        if self.planned is None or not self.limit_min or self.elapsed_min is None:
            return None
        return self.planned * self.elapsed_min / self.limit_min


def spent(ledger: Ledger, records: Iterable[PointRecord]) -> list[Spent]:
    """Every submitted attempt, in order of points. Asks the accounting of every site of which it is to be had here.

    `records`: as `poll_sweep` leaves them, with the arrays that were found by their names.
    """
    asked = asked_for(ledger)
    attempts = [attempt for record in records for attempt in record.attempts if attempt.job_id is not None]
    accounted = _accounted(attempts, sites_of(ledger))
    return [
        _spent(
            attempt,
            asked.get((attempt.point, attempt.attempt), asked[attempt.point, 0]),
            accounted,
            RunArtifacts.read(ledger.folder / attempt.subdir),
        )
        for attempt in attempts
    ]


def asked_for(ledger: Ledger) -> dict[tuple[int, int], PointSpec]:
    """By point and attempt what was asked for; attempt 0 is the point as it was first composed.

    Of an attempt that was made elsewhere only that is known.
    """
    planned: dict[tuple[int, int], PointSpec] = {(point.point, 0): point for point in ledger.sweep.points}
    for event in ledger.events(Planned):
        planned |= {(attempt.point, attempt.attempt): attempt for attempt in event.attempts}
    return planned


def cost_table(found: Sequence[Spent], unit: Mapping[str, str]) -> Table:
    """A row per site and GPU; `unit` is what each site charges in."""
    groups: dict[tuple[str, str], list[Spent]] = {}
    for one in found:
        groups.setdefault((one.site, one.gpu), []).append(one)
    rows = [
        (
            site,
            gpu,
            len(mine),
            _sum(one.limit_min for one in mine),
            _sum(one.elapsed_min for one in mine),
            unit[site],
            _sum(one.planned for one in mine),
            _sum(one.actual for one in mine),
            ", ".join(sorted({one.witness for one in mine})),
        )
        for (site, gpu), mine in groups.items()
    ]
    columns = ("site", "gpu", "attempts", "min at most", "min taken", "unit", "planned at most", "actual", "time by")
    return table(columns, rows)


def _accounted(attempts: Sequence[Attempt], sites: Mapping[str, SiteConfig]) -> dict[tuple[str, str], float]:
    """Seconds by site and job id, of the sites whose accounting answered."""
    by_site: dict[str, dict[str, str | None]] = {}
    for attempt in attempts:
        if attempt.job_id and not attempt.carried:
            by_site.setdefault(attempt.site, {})[attempt.job_id] = attempt.job_name
    return {
        (site, job_id): seconds
        for site, jobs in by_site.items()
        if sites[site].connect.method == "slurm" and reachability(sites[site]).ok
        for job_id, seconds in (elapsed_s(sites[site], jobs) or {}).items()
    }


def _spent(attempt: Attempt, entry: PointSpec, accounted: Mapping[tuple[str, str], float], left: RunArtifacts) -> Spent:
    seconds, witness = accounted.get((attempt.site, str(attempt.job_id))), "sacct"
    if seconds is None:
        seconds, witness = _of_manifest(left), "manifest"
    return Spent(
        point=attempt.point,
        attempt=attempt.attempt,
        site=attempt.site,
        gpu=str(entry.gpu),
        limit_min=entry.time_min,
        planned=entry.service_units,
        elapsed_min=None if seconds is None else seconds / 60,
        witness="not known" if seconds is None else witness,
    )


def _of_manifest(left: RunArtifacts) -> float | None:
    """From the run's start to its end, or its last sign of life: less than the job's, which starts before it."""
    manifest = left.manifest or {}
    started, ended = manifest.get("started_unix_ns"), manifest.get("ended_unix_ns")
    if started is None:
        return None
    return ended / 1e9 - started / 1e9 if ended else time.time() - (left.manifest_age_s or 0.0) - started / 1e9


def _sum(values: Iterable[float | None]) -> str | float | None:
    """Where some are not known, it says of how many it is the sum."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    if not known or len(known) == len(listed):
        return sum(known) if known else None
    return f"{sum(known):.4g} ({len(known)} of {len(listed)})"
