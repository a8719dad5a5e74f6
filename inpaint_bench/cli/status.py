"""`status`: how every point of a sweep stands, and why.

`--json` prints one object. Its fields stay; further ones may come. Times are ISO 8601 in UTC; what is not known is
null.

    schema_version, sweep (its directory), looked_at
    counts            points by state
    expected_end      when the last open point is expected to end; null with expected_end_basis saying why
    witnesses         by site: squeue and sacct, each "ok", "not asked", or why it gave nothing; and silence, why
                      nothing at all came from there, else null
    notes             what else should be known, in sentences
    next              what to type, in sentences
    points            in order of their numbers:
        point, overrides, gpu, batch, site, plan (the plan file it waits in)
        state         planned | queued | running | completed | failed | unknown
        reason        why it is not complete, one of the reasons of `rerun --only`; message says it in words
        attempt, job_id, run_id     of its last attempt
        step, steps_total           of that attempt
        images_per_s                the pace of a running point, of any other the last one
        images_per_s_age_s          how old that is, of a running point
        expected_start, expected_end, expected_end_basis, expected_end_is_latest
        pending       of a queued point: code (Slurm's), words, advice, stuck (it will not start by itself)
        attempts      oldest first: attempt, run_id, job_id, sent_at, state, reason, message, scheduler (its own
                      words), manifest (its status), parts (the sidecar's account), directory, logs

Of more than a hundred points those that have come to the same share a row of the table; `--all` gives each its own.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inpaint_bench.core.console import console, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import SCHEMA_VERSION
from launchers.slurm.query import OK, SlurmReply
from launchers.status import cost as costs
from launchers.status import detail, overview, tables
from launchers.status.forecast import Forecast, forecast_points, last_end
from launchers.status.survey import AttemptStatus, PointStatus, SweepStatus, poll_sweep, sites_of, slowest_site
from launchers.sweep.ledger import Ledger

EVERY_S = 60.0
LEAST_S, MOST_S = 0.1, 86400.0  # of what runs on this machine alone; of anything


def run_status(
    sweep: Path,
    *,
    watch: bool,
    as_json: bool,
    point: int | None,
    cost: bool,
    all_points: bool,
    every_s: float | None,
) -> None:
    """Print the state of every point of `sweep`; with `watch` until all have finished."""
    ledger = Ledger.open(sweep)
    if cost:
        units = {name: site.charging.unit for name, site in sites_of(ledger).items()}
        records = [status.record for status in poll_sweep(ledger).points]
        console().print(costs.cost_table(costs.spent(ledger, records), units))
        return
    pause_s = _pause_s(ledger, watch=watch, every_s=every_s)
    while True:
        seen = poll_sweep(ledger)
        found = forecast_points(seen.points)
        if as_json:
            print(json.dumps(_plain(seen, found, ledger.folder), indent=1))
        elif point is not None:
            _print_point(seen, found, ledger.folder, point)
        else:
            _print(seen, found, ledger.folder, clear=watch, fold=not all_points)
        if not watch or not any(status.is_open for status in seen.points):
            return
        print(f"Next look at {datetime.fromtimestamp(time.time() + pause_s):%H:%M:%S}; Ctrl-C ends the watching.")
        time.sleep(pause_s)


def _pause_s(ledger: Ledger, *, watch: bool, every_s: float | None) -> float:
    """Seconds between two looks. Raises UserError where a site would be asked more often than it allows."""
    site = slowest_site(sites_of(ledger).values())
    least = site.limits.poll_s if site else LEAST_S
    if every_s is None:
        return max(EVERY_S, least)
    if not watch:
        raise UserError(f"--every {every_s:g}: only together with --watch")
    if not least <= every_s <= MOST_S:
        why = f", for {site.name} is asked no more often (limits.poll_s of its site file)" if site else ""
        raise UserError(f"--every {every_s:g}: must lie between {least:g} and {MOST_S:g} s{why}")
    return every_s


def _print(seen: SweepStatus, found: Mapping[int, Forecast], folder: Path, *, clear: bool, fold: bool) -> None:
    out = console()
    if clear and out.is_terminal:
        out.clear()
    out.print(tables.standings_table(seen.points, found, fold=fold))
    for line in overview.footer(seen, found, folder):
        print(sanitize(line))


def _print_point(seen: SweepStatus, found: Mapping[int, Forecast], folder: Path, num: int) -> None:
    point = next((s for s in seen.points if s.record.num == num), None)
    if point is None:
        last = max((s.record.num for s in seen.points), default=None)
        have = "it has none" if last is None else f"it has 0 to {last}"
        raise UserError(f"--point {num}: not a point of {folder} ({have})")
    for line in [*detail.point(seen, point, found[num], folder), overview.witnesses(seen)]:
        print(sanitize(line))


def _plain(seen: SweepStatus, found: Mapping[int, Forecast], folder: Path) -> dict[str, Any]:
    ends, how = last_end(seen.points, found)
    return {
        "schema_version": SCHEMA_VERSION,
        "sweep": str(folder),
        "looked_at": _iso(seen.polled_unix),
        "counts": dict(sorted(Counter(str(s.state) for s in seen.points).items())),
        "expected_end": _iso(ends),
        "expected_end_basis": how or None,
        "witnesses": {site: _witnesses(answer) for site, answer in sorted(seen.answers.items())},
        "notes": seen.notes,
        "next": list(overview.following(seen, folder)),
        "points": [_point(point, found[point.record.num], folder) for point in seen.points],
    }


def _witnesses(answer: SlurmReply) -> dict[str, str | None]:
    heard = OK in (answer.squeue, answer.sacct)
    return {"squeue": answer.squeue, "sacct": answer.sacct, "silence": None if heard else answer.no_answer_reason}


def _point(point: PointStatus, forecast: Forecast, folder: Path) -> dict[str, Any]:
    record, last, why = point.record, point.record.last, point.pending
    return {
        "point": record.num,
        "overrides": record.overrides,
        "gpu": record.gpu,
        "batch": record.batch,
        "site": record.site,
        "plan": record.plan,
        "state": point.state,
        "reason": point.reason,
        "message": point.message,
        "attempt": last.attempt if last else None,
        "job_id": last.job_id if last else None,
        "run_id": last.run_id if last else None,
        "step": forecast.step,
        "steps_total": forecast.steps_total,
        "images_per_s": forecast.images_per_s,
        "images_per_s_age_s": forecast.pace_age_s,
        "expected_start": _iso(forecast.start_unix),
        "expected_end": _iso(forecast.end_unix),
        "expected_end_basis": forecast.basis if point.is_open else None,
        "expected_end_is_latest": forecast.at_most if forecast.end_unix is not None else None,
        "pending": {"code": why.code, "words": why.text, "advice": why.advice, "stuck": why.stuck} if why else None,
        "attempts": [_attempt(tried, folder) for tried in point.attempts],
    }


def _attempt(tried: AttemptStatus, folder: Path) -> dict[str, Any]:
    attempt, manifest = tried.attempt, tried.artifacts.manifest
    return {
        "attempt": attempt.attempt,
        "run_id": attempt.run_id,
        "job_id": attempt.job_id,
        "sent_at": _iso(attempt.planned_unix),
        "state": tried.state,
        "reason": tried.resolved.reason,
        "message": tried.resolved.message,
        "scheduler": (tried.scheduler.raw or tried.scheduler.state) if tried.scheduler else None,
        "manifest": manifest["status"] if manifest else None,
        "parts": tried.artifacts.missing_parts or tried.artifacts.sidecar_status,
        "directory": str(tried.run_dir),
        "logs": [str(path) for path in detail.logs(tried, folder)],
    }


def _iso(unix: float | None) -> str | None:
    return None if unix is None else datetime.fromtimestamp(unix, UTC).isoformat(timespec="seconds")
