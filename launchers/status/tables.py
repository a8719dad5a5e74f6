"""Tables of a sweep: its points before they are submitted, and their states afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from typing import NamedTuple

from ClusterShell.RangeSet import RangeSet
from rich.table import Table

from inpaint_bench.core.console import pluralize, table
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.point import Point

from .forecast import STALE_PACE_S, Forecast
from .survey import PointStatus

FOLD_ABOVE = 100  # points: with more, similar points share a row
FOLD_FROM = 3  # similar points


def differing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each point the overrides that not all points share, without those that have a column."""
    common = set(overrides[0]).intersection(*overrides) if overrides else set()
    return [
        " ".join(o for o in point if o not in common and not o.startswith(("gpu=", "batch="))) for point in overrides
    ]


def plan_table(points: Sequence[Point], starts: Mapping[str, str] | None = None) -> Table:
    """Return a row per point before submission; `starts` is by array when Slurm expects to start it."""
    units = {point.site.charging.unit for point in points if point.service_units is not None}
    rows = []
    for point, overrides in zip(points, differing([point.overrides for point in points]), strict=True):
        cost: float | str | None = point.service_units
        # A unit that all sites share is in the heading of the column instead.
        if cost is not None and len(units) > 1:
            cost = f"{cost:.4g} {point.site.charging.unit}"
        if cost is not None and point.has_bounded_rate:
            cost = f"<= {cost if isinstance(cost, str) else f'{cost:.4g}'}"
        rows.append(
            (
                point.num,
                point.bench.gpu.name,
                point.bench.batch,
                overrides,
                point.site.name,
                point.request.partition,
                str(point.request),
                f"{point.request.time_min} min" + (f", up to {point.starts} times" if point.starts > 1 else ""),
                point.limit_basis,
                (starts or {}).get(point.group),
                cost,
                point.group or f"plan.{point.site.name}.yaml",
            )
        )
    columns = ("point", "gpu", "batch", "overrides", "site", "partition", "request", "time limit", "limit from")
    max_cost = f"max {units.pop()}" if len(units) == 1 else "max cost"
    return table((*columns, "expected start", max_cost, "array"), rows)


class _Row(NamedTuple):
    point: int | str
    gpu: str | None
    batch: int | str | None
    overrides: str | None
    site: str
    attempt: int | None
    earlier: str | None  # how earlier attempts ended
    job: str | None
    state: str
    reason: str | None
    step: str | None
    pace: float | str | None
    end: str | None
    message: str


def points_table(points: Sequence[PointStatus], forecasts: Mapping[int, Forecast], *, fold: bool = True) -> Table:
    """Return a row per point. `fold`: of more than 100 points those in the same state share a row."""
    groups: dict[object, list[_Row]] = {}
    for point, overrides in zip(points, differing([point.record.overrides for point in points]), strict=True):
        row = _row(point, forecasts[point.record.num], overrides)
        # Running points keep a row each: step, pace and expected end are their own.
        if fold and len(points) > FOLD_ABOVE and point.state is not PointState.RUNNING:
            groups.setdefault(_folded(row), []).append(row)
        else:
            groups[row.point] = [row]
    rows: list[_Row] = []
    for folded, similar in groups.items():
        if len(similar) < FOLD_FROM or not isinstance(folded, _Row):
            rows += similar
        else:
            numbers, job = str(RangeSet([row.point for row in similar])), folded.job and pluralize(len(similar), "job")
            rows.append(folded._replace(point=numbers, job=job))
    return table([{"pace": "images/s"}.get(name, name) for name in _Row._fields], rows)


def _row(point: PointStatus, forecast: Forecast, overrides: str) -> _Row:
    record, last = point.record, point.record.last
    return _Row(
        point=record.num,
        gpu=record.gpu,
        batch=record.batch,
        overrides=overrides,
        site=record.site,
        attempt=last.attempt if last else None,
        earlier=", ".join(str(attempt.reason or attempt.state) for attempt in point.attempts[:-1]) or None,
        job=last.job_id if last else None,
        state=state_label(point),
        reason=str(point.reason) if point.reason else None,
        step=_steps(forecast),
        pace=_pace(forecast),
        end=None if forecast.end_unix is None else f"{'by ' * forecast.is_latest}{clock(forecast.end_unix)}",
        message=_message(point, forecast),
    )


def _folded(row: _Row) -> _Row:
    """Return the row without the columns in which points in the same state differ."""
    return row._replace(point="", batch=None, overrides=None, job=row.job and "job", step=None, pace=None)


def state_label(point: PointStatus) -> str:
    """Return the state as shown: `unavailable` is separate, though the attempt itself has failed."""
    return str(Reason.UNAVAILABLE if point.reason is Reason.UNAVAILABLE else point.state)


def _steps(forecast: Forecast) -> str | None:
    return None if forecast.step is None else f"{forecast.step} of {forecast.steps_total or '?'}"


def _pace(forecast: Forecast) -> float | str | None:
    if forecast.images_per_s is None or (forecast.pace_age_s or 0.0) <= STALE_PACE_S:
        return forecast.images_per_s
    return f"{forecast.images_per_s:.4g} ({duration(forecast.pace_age_s or 0.0)} ago)"


def _message(point: PointStatus, forecast: Forecast) -> str:
    message = point.message
    if point.state is PointState.RUNNING:
        message = message.removeprefix(f"step {_steps(forecast)}").strip(" ,")  # has a column of its own
    parts = [message]
    if forecast.start_unix is not None:
        parts.append(f"expected to start at {clock(forecast.start_unix)}")
    if forecast.basis.startswith("should"):
        parts.append(forecast.basis)
    return "; ".join(filter(None, parts))


def calendar_time(unix: float, zone: tzinfo | None = None) -> datetime | None:
    """Return a time in a time zone, by default the local one; None for what is no time, as a damaged file may have."""
    try:
        return datetime.fromtimestamp(unix, zone)
    except (ValueError, OverflowError, OSError):
        return None


def clock(unix: float) -> str:
    """Return a local time, with the day if it is not today; "?" for what is no time."""
    time = calendar_time(unix)
    if time is None:
        return "?"
    return f"{time:%H:%M}" if time.date() == datetime.now().date() else f"{time:%a %d %b %H:%M}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "45 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    # Rounded before it is divided: 3,599 s are 1 h, not 60 min.
    hours, minutes = divmod(round(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    parts = [f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if number]
    return " ".join(parts[:2])
