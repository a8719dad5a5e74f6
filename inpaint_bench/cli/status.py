"""`status`: show the state of every point of a sweep. docs/running.md lists the fields of `--json`."""

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core.console import console, echo, echo_json
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import SCHEMA_VERSION, SWEEP, PointState, Reason
from launchers.status.cost import point_cost
from launchers.status.forecast import forecast_point, sweep_end
from launchers.status.stages import stages_table
from launchers.status.survey import AttemptStatus, PointStatus, SweepStatus, poll_sweep, sites_of, slowest_site
from launchers.status.tables import (
    calendar_time,
    footer,
    log_files,
    next_steps,
    point_details,
    points_table,
    sources,
)
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import SweepRecord

LATEST = 10  # sweeps that are listed without a path
REFRESH_S = 60.0
MIN_LOCAL_REFRESH_S, MAX_REFRESH_S = 0.1, 86400.0

# Exit codes, beside those of every command. 1 is that of points that failed in every command.
EXIT_COMPLETED, EXIT_FAILED, EXIT_OPEN, EXIT_UNKNOWN = 0, 1, 3, 4


def run_status(
    sweep: Path | None,
    *,
    watch: bool,
    as_json: bool,
    point: int | None,
    all_points: bool,
    every_s: float | None,
    stages: bool = False,
) -> int:
    """Print the state of every point of `sweep`, or the latest sweeps without one, and return the exit code."""
    views = {"--watch": watch, "--json": as_json, "--point": point is not None, "--stages": stages}
    if len(given := [option for option, is_given in views.items() if is_given]) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined")
    if sweep is None:
        if given:
            raise UserError(f"{given[0]}: needs a sweep directory; `inpaint-bench status` lists the latest")
        _list_latest()
        return EXIT_COMPLETED
    submitting = as_json and Ledger(sweep).is_locked()  # before the poll, which sees all that was submitted by then
    try:
        ledger = Ledger.open(sweep)
    except UserError:
        # For a machine that has sent a plan here and got no reply: it may be about to become a sweep.
        if as_json and not (sweep / SWEEP).exists():
            echo_json({"sweep_id": None, "submitting": submitting})
        raise
    interval_s = _interval_s(ledger, watch=watch, every_s=every_s)
    while True:
        status = poll_sweep(ledger)
        if point is not None:
            _print_point(ledger, status, point)
        elif stages:
            console().print(stages_table(status.points))
        elif as_json:
            # In ASCII: escapes instead of what a terminal would obey, and names of files that are no UTF-8.
            echo_json(_json(ledger, status, submitting=submitting))
        else:
            _print(ledger, status, clear=watch, fold=not all_points)
        if not watch or not any(point_status.is_open for point_status in status.points):
            return _exit_code([p for p in status.points if point is None or p.record.num == point])
        echo(f"Next refresh at {datetime.fromtimestamp(time.time() + interval_s):%H:%M:%S}; Ctrl-C to stop.")
        time.sleep(interval_s)


def _list_latest() -> None:
    """Print the latest sweeps where `launch` makes them by default, with their overrides. Raises UserError for none."""
    records = [path for pattern in ("*", "*/*") for path in Path("runs").glob(f"{pattern}/{SWEEP}")]
    if not records:
        raise UserError("runs: no sweep in this folder; give the sweep directory that `launch -m` printed")
    for path in sorted(records, key=lambda path: path.stat().st_mtime, reverse=True)[:LATEST]:
        try:
            about = shlex.join(SweepRecord.read(path.parent).overrides)
        except UserError:
            about = "(its record cannot be read)"
        echo(f"{path.parent}  {about}")


def sweep_status(sweep: Path | str) -> dict[str, Any]:
    """Return what `status --json` prints of a sweep directory, asking Slurm once. Raises UserError."""
    ledger = Ledger.open(Path(sweep))
    submitting = ledger.is_locked()
    return _json(ledger, poll_sweep(ledger), submitting=submitting)


def _exit_code(points: Sequence[PointStatus]) -> int:
    """Return what a script wants to know first: whether to wait, to find out, to rerun, or to go on."""
    states = {point.state for point in points if point.reason is not Reason.UNAVAILABLE}
    if states & {PointState.QUEUED, PointState.RUNNING}:
        return EXIT_OPEN
    if PointState.UNKNOWN in states:
        return EXIT_UNKNOWN
    return EXIT_FAILED if states - {PointState.COMPLETED} else EXIT_COMPLETED


def _interval_s(ledger: Ledger, *, watch: bool, every_s: float | None) -> float:
    """Return seconds between refreshes. Raises UserError if a site would be polled more often than it allows."""
    site = slowest_site(sites_of(ledger).values())
    # For points on this machine no Slurm is polled, so they may be looked at as often as one likes.
    shortest = site.limits.poll_s if site else MIN_LOCAL_REFRESH_S
    if every_s is None:
        return max(REFRESH_S, shortest)
    if not watch:
        raise UserError(f"--every {every_s:g}: only together with --watch")
    if not shortest <= every_s <= MAX_REFRESH_S:
        limit = f" (limits.poll_s of {site.name})" if site else ""
        raise UserError(f"--every {every_s:g}: must be between {shortest:g} and {MAX_REFRESH_S:g} s{limit}")
    return every_s


def _print(ledger: Ledger, status: SweepStatus, *, clear: bool, fold: bool) -> None:
    out = console()
    # A file or a pipe keeps every refresh.
    if clear and out.is_terminal:
        out.clear()
    out.print(points_table(status.points, status.sites, fold=fold))
    for line in footer(status, ledger.folder):
        echo(line)


def _print_point(ledger: Ledger, status: SweepStatus, num: int) -> None:
    shown = {p.record.num: msgspec.to_builtins(_json_point(p, status, ledger.folder)) for p in status.points}
    if num not in shown:
        raise UserError(f"--point {num}: {ledger.folder} has no such point; it has 0 to {max(shown)}")
    for line in [*point_details(shown[num]), sources(status)]:
        echo(line)


def _json(ledger: Ledger, status: SweepStatus, *, submitting: bool) -> dict[str, Any]:
    end_unix, basis = sweep_end(status.points)
    # What the states were resolved from: the machine that launched over ssh resolves them anew.
    records = [
        attempt.attempt.reported(
            scheduler=attempt.scheduler,
            artifacts=attempt.artifacts,
            is_open=point.is_open and attempt is point.attempts[-1],
        )
        for point in status.points
        for attempt in point.attempts
    ]
    shown = {
        "schema_version": SCHEMA_VERSION,
        "sweep": str(ledger.folder),
        "sweep_id": ledger.sweep.sweep_id,
        "submitting": submitting,
        "polled_at": _iso(status.polled_unix),
        "counts": dict(sorted(Counter(str(point.state) for point in status.points).items())),
        "expected_end": _iso(end_unix),
        "expected_end_basis": basis or None,
        "sources": {
            queue: {
                "squeue": reply.squeue,
                "sacct": reply.sacct,
                "no_answer_reason": None if reply.answered else reply.no_answer_reason,
            }
            for queue, reply in sorted(status.replies.items())
        },
        "notes": status.notes,
        "next": list(next_steps(status, ledger.folder)),
        "points": [_json_point(point, status, ledger.folder) for point in status.points],
        "records": records,
    }
    fields: dict[str, Any] = msgspec.to_builtins(shown)
    return fields


def _json_point(point: PointStatus, status: SweepStatus, folder: Path) -> dict[str, Any]:
    record, last = point.record, point.record.last
    forecast, cost = forecast_point(point), point_cost(point, status.sites)
    return {
        "point": record.num,
        **_named(record, "overrides", "gpu", "batch", "site", "plan"),
        **_named(point, "state", "reason", "message", "pending"),
        **_named(last, "attempt", "job_id", "cluster", "run_id"),
        **_named(forecast, "step", "steps_total", "images_per_s"),
        "cost": cost.actual,
        "cost_at_most": cost.at_most,
        "cost_unit": None if cost.at_most is None else status.sites[record.site].charging.unit,
        "expected_start": _iso(forecast.start_unix),
        "expected_end": _iso(forecast.end_unix),
        "expected_end_basis": forecast.basis if point.is_open else None,
        "expected_end_is_latest": None if forecast.end_unix is None else forecast.is_latest,
        **_named(point.artifacts.manifest, "tracking", "stages"),
        "attempts": [_json_attempt(attempt, folder) for attempt in point.attempts],
    }


def _json_attempt(status: AttemptStatus, folder: Path) -> dict[str, Any]:
    attempt, scheduler, artifacts = status.attempt, status.scheduler, status.artifacts
    return {
        **_named(attempt, "attempt", "run_id", "job_id", "cluster"),
        "planned_at": _iso(attempt.planned_unix),
        **_named(status, "state", "reason", "message"),
        "scheduler": (scheduler.raw or scheduler.state) if scheduler else None,
        "manifest": artifacts.manifest.status if artifacts.manifest else None,
        "parts": artifacts.missing_parts or artifacts.sidecar_status,
        "run_dir": str(status.run_dir),
        "logs": [str(path) for path in log_files(status, folder)],
    }


def _named(holder: object | None, *names: str) -> dict[str, Any]:
    """Return attributes by their names, null without a holder."""
    return {name: getattr(holder, name) if holder else None for name in names}


def _iso(unix: float | None) -> str | None:
    time = None if unix is None else calendar_time(unix, UTC)
    return time.isoformat(timespec="seconds") if time else None
