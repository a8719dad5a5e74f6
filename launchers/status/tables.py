"""Tables of a sweep: its points before they are submitted, and their states afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, tzinfo
from textwrap import shorten
from typing import Any

from ClusterShell.RangeSet import RangeSet
from rich.table import Table

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize, table
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.point import Point

from .cost import point_cost
from .forecast import Forecast, forecast_point
from .survey import PointStatus

FOLD_ABOVE = 100  # points: with more, similar points share a row
FOLD_FROM = 3  # similar points
DIFFERING = dict.fromkeys(("point", "batch", "overrides", "step", "cost"))  # columns that a shared row leaves out

# point, GPU, batch, overrides, array, cost
_PlannedRow = tuple[int | str, str, int | str | None, str, str, float | str | None]
LIKELY = ("likely memory", "likely min")
Likely = tuple[str | None, float | None]  # memory in words, minutes


def differing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each point the overrides that not all points share, without those that have a column."""
    common = set(overrides[0]).intersection(*overrides) if overrides else set()
    return [
        " ".join(o for o in point if o not in common and not o.startswith(("gpu=", "batch="))) for point in overrides
    ]


def plan_tables(
    points: Sequence[Point], starts: Mapping[str, str] | None = None, likely: Mapping[int, Likely] | None = None
) -> list[Table]:
    """Return the arrays, and the points in them, before submission.

    `starts` maps an array to the time at which Slurm expects to start it, `likely` a point to what it will likely need.
    If there are more than 100 points, similar ones share a row, which leaves that out.
    """
    units = {point.site.charging.unit for point in points if point.service_units is not None}
    arrays: dict[str, list[Point]] = {}
    for point in points:
        arrays.setdefault(_array(point), []).append(point)
    array_rows = []
    for array, members in arrays.items():
        point = members[0]
        again = f", up to {point.starts} times" if point.starts > 1 else ""
        limit_basis = ", ".join(dict.fromkeys(member.limit_basis for member in members if member.limit_basis))
        request = (len(members), str(point.request), f"{point.request.time_min} min{again}", limit_basis)
        start = (starts or {}).get(point.group)
        array_rows.append((array, point.site.name, point.request.partition, *request, start))
    columns = ("array", "site", "partition", "points", "request", "time limit", "limit from", "expected start")
    max_cost = f"max {next(iter(units))}" if len(units) == 1 else "max cost"
    rows: list[_PlannedRow] = [
        (point.num, point.bench.gpu.name, point.bench.batch, changed, _array(point), _cost(point, units))
        for point, changed in zip(points, differing([point.overrides for point in points]), strict=True)
    ]
    if len(points) > FOLD_ABOVE:
        similar: dict[object, list[_PlannedRow]] = {}
        for row in rows:
            _, gpu, _, _, array, cost = row
            similar.setdefault((gpu, array, cost), []).append(row)
        rows = [_folded(members) for members in similar.values()]
        likely = None
    needs = [(likely or {}).get(point.num, (None, None)) for point in points] if likely else [(None, None)] * len(rows)
    point_columns = ("point", "gpu", "batch", "overrides", "array", max_cost, *LIKELY)
    return [
        table(columns, array_rows, optional=("limit from", "expected start")),
        table(point_columns, [(*row, *need) for row, need in zip(rows, needs, strict=True)], optional=LIKELY),
    ]


def _folded(rows: Sequence[_PlannedRow]) -> _PlannedRow:
    """Return one row for those that differ in point, batch and overrides; the cost is that of each point."""
    numbers, gpus, all_batches, all_overrides, arrays, costs = zip(*rows, strict=True)
    batches, overrides, cost = list(dict.fromkeys(all_batches)), list(dict.fromkeys(all_overrides)), costs[0]
    whole = all(isinstance(batch, int) for batch in batches)
    return (
        str(RangeSet(numbers)),
        gpus[0],
        shorten(str(RangeSet(batches)) if whole else ",".join(map(str, batches)), 40),
        overrides[0] if len(overrides) == 1 else f"{len(overrides):,} different",
        arrays[0],
        cost if cost is None else f"{cost:.4g} each" if isinstance(cost, float) else f"{cost} each",
    )


def _array(point: Point) -> str:
    """Return the number of the point's array, or the plan file that it waits in."""
    return point.group.partition("-")[0] or f"plan.{point.site.name}.yaml"


def _cost(point: Point, units: Collection[str]) -> float | str | None:
    cost: float | str | None = point.service_units
    # A unit that all sites share is in the heading of the column instead.
    if cost is not None and len(units) > 1:
        cost = f"{cost:.4g} {point.site.charging.unit}"
    return bounded(cost, point.has_bounded_rate)


def bounded(cost: float | str | None, is_upper_bound: bool) -> float | str | None:
    """Return a cost, marked if it is an upper bound."""
    if cost is None or not is_upper_bound:
        return cost
    return f"<= {cost if isinstance(cost, str) else f'{cost:.4g}'}"


def points_table(points: Sequence[PointStatus], sites: Mapping[str, SiteConfig], *, fold: bool = True) -> Table:
    """Return a row per point. `fold`: of more than 100 points those in the same state share a row."""
    groups: dict[object, list[dict[str, Any]]] = {}
    for point, overrides in zip(points, differing([point.record.overrides for point in points]), strict=True):
        row = _row(point, sites, overrides)
        # Running points keep a row each: step and expected end are their own.
        alone = not fold or len(points) <= FOLD_ABOVE or point.state is PointState.RUNNING
        state = tuple((row | DIFFERING | {"job": bool(row["job"])}).values())
        groups.setdefault(row["point"] if alone else state, []).append(row)
    rows: list[dict[str, Any]] = []
    for similar in groups.values():
        if len(similar) < FOLD_FROM:
            rows += similar
        else:
            job = pluralize(len(similar), "job") if similar[0]["job"] else None
            numbers = str(RangeSet([row["point"] for row in similar]))
            rows.append(similar[0] | DIFFERING | {"point": numbers, "job": job})
    columns = list(rows[0]) if rows else []
    optional = ("attempt", "job", "site", "cost", "end", "overrides")
    return table(columns, [list(row.values()) for row in rows], optional=optional)


def _row(point: PointStatus, sites: Mapping[str, SiteConfig], overrides: str) -> dict[str, Any]:
    record, last = point.record, point.record.last
    forecast, cost = forecast_point(point), point_cost(point, sites)
    return {
        "point": record.num,
        "gpu": record.gpu,
        "batch": record.batch,
        "overrides": overrides,
        "site": record.site,
        "attempt": last.attempt if last else None,
        "job": last.job_id if last else None,
        "state": state_label(point),
        "reason": str(point.reason) if point.reason else None,
        "step": _steps(forecast),
        "cost": bounded(cost.at_most, cost.is_upper_bound or cost.actual != cost.at_most),
        "end": None if forecast.end_unix is None else f"{'by ' * forecast.is_latest}{clock(forecast.end_unix)}",
        "message": _message(point, forecast),
    }


def state_label(point: PointStatus) -> str:
    """Return the state as shown: `unavailable` is separate, though the attempt itself has failed."""
    return str(Reason.UNAVAILABLE if point.reason is Reason.UNAVAILABLE else point.state)


def _steps(forecast: Forecast) -> str | None:
    return None if forecast.step is None else f"{forecast.step} of {forecast.steps_total or '?'}"


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
