"""What a person sees of a sweep: the points before they are sent, and how they stand afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from rich.table import Table

from inpaint_bench.core.console import pluralize, table
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.point import Point

from .forecast import STALE_S, Forecast, forecast_points
from .survey import PointStatus


def differing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each point the overrides that not all points share, less those with a column of their own."""
    common = set(overrides[0]).intersection(*overrides) if overrides else set()
    own = ("gpu=", "batch=")
    return [" ".join(o for o in point if o not in common and not o.startswith(own)) for point in overrides]


def plan_table(points: Sequence[Point], starts: Mapping[str, str] | None = None) -> Table:
    """`starts`: by array when Slurm expects to start it."""
    units = {point.site.charging.unit for point in points if point.service_units is not None}

    def cost(point: Point) -> float | str | None:
        several = len(units) > 1 and point.service_units is not None
        return f"{point.service_units:.4g} {point.site.charging.unit}" if several else point.service_units

    rows = [
        (
            point.num,
            point.bench.gpu.name,
            point.bench.batch,
            also,
            point.site.name,
            point.request.partition,
            str(point.request),
            f"{point.request.time_min} min" + (f", up to {point.starts} times" if point.starts > 1 else ""),
            point.limit_basis,
            (starts or {}).get(point.group),
            cost(point),
            point.group or f"plan.{point.site.name}.yaml",
        )
        for point, also in zip(points, differing([point.overrides for point in points]), strict=True)
    ]
    asked = ("point", "gpu", "batch", "also", "site", "partition", "request")
    columns = (*asked, "time limit", "from", "may start", _at_most(units), "array")
    return table(columns, rows)


def _at_most(units: Collection[str]) -> str:
    """Heads the column of costs; several units stand with the numbers."""
    return f"{next(iter(units))} at most" if len(units) == 1 else "at most"


def state(point: PointStatus) -> str:
    """In one word; `unavailable` is its own, though the attempt itself ended as failed."""
    word = point.resolved
    return str(Reason.UNAVAILABLE if word.reason is Reason.UNAVAILABLE else word.state)


FOLD_ABOVE = 100  # points
FOLD_FROM = 3  # that are alike


def standings_table(
    points: Sequence[PointStatus], found: Mapping[int, Forecast] | None = None, *, fold: bool = True
) -> Table:
    """`found`: how each point is expected to go on, where that was worked out before. `fold`: points that have come
    to the same share a row, where there are very many."""
    found = forecast_points(points) if found is None else found
    also = dict(zip((s.record.num for s in points), differing([s.record.overrides for s in points]), strict=True))
    groups: dict[object, list[tuple[object, ...]]] = {}
    for point in points:
        record, word = point.record, point.resolved
        forecast = found[record.num]
        last = record.last
        row = (
            record.num,
            record.gpu,
            record.batch,
            also[record.num],
            record.site,
            last.attempt if last else None,
            _earlier(point),
            last.job_id if last else None,
            state(point),
            str(word.reason) if word.reason else None,
            _steps(forecast),
            _pace(forecast),
            _end(forecast),
            _happened(point, forecast),
        )
        settled = fold and len(points) > FOLD_ABOVE and word.state is not PointState.RUNNING
        # all but number, batch, overrides, job, step and pace
        groups.setdefault(tuple(row[i] for i in (1, 4, 5, 6, 8, 9, 12, 13)) if settled else record.num, []).append(row)
    rows = [line for alike in groups.values() for line in _folded(alike)]
    columns = (
        "point",
        "gpu",
        "batch",
        "also",
        "site",
        "attempt",
        "before",
        "job",
        "state",
        "reason",
        "step",
        "images/s",
        "ends",
        "what happened",
    )
    return table(columns, rows)


def _folded(alike: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Rows that are alike as one, where they are several."""
    if len(alike) < FOLD_FROM:
        return alike
    one: list[object] = list(alike[0])
    one[0] = spans([int(str(row[0])) for row in alike])
    one[2] = one[3] = one[10] = one[11] = None
    one[7] = pluralize(len(alike), "job") if one[7] else None
    return [tuple(one)]


def spans(numbers: Sequence[int]) -> str:
    """ "0-4,7,9-12" of numbers in order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def clock(unix: float, now: float | None = None) -> str:
    """Local time, with the day where it is another one."""
    then, today = datetime.fromtimestamp(unix), datetime.fromtimestamp(time.time() if now is None else now)
    return then.strftime("%H:%M" if then.date() == today.date() else "%a %d %b %H:%M")


def span(seconds: float) -> str:
    """In the two largest units: "45 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _earlier(point: PointStatus) -> str | None:
    """How the attempts before the last one ended."""
    return ", ".join(str(tried.resolved.reason or tried.state) for tried in point.attempts[:-1]) or None


def _steps(forecast: Forecast) -> str | None:
    return None if forecast.step is None else f"{forecast.step} of {forecast.steps_total or '?'}"


def _pace(forecast: Forecast) -> float | str | None:
    """With its age where it is not of now."""
    if forecast.images_per_s is None or forecast.pace_age_s is None or forecast.pace_age_s <= STALE_S:
        return forecast.images_per_s
    return f"{forecast.images_per_s:.4g} ({span(forecast.pace_age_s)} ago)"


def _end(forecast: Forecast) -> str | None:
    if forecast.end_unix is None:
        return None
    return f"{'by ' if forecast.at_most else ''}{clock(forecast.end_unix)}"


def _happened(point: PointStatus, forecast: Forecast) -> str:
    message = point.message
    if point.state is PointState.RUNNING:
        message = message.removeprefix(f"step {_steps(forecast)}").strip(" ,")  # it has a column
    parts = [message]
    if forecast.start_unix is not None:
        parts.append(f"expected to start at {clock(forecast.start_unix)}")
    if forecast.skew_s is not None:
        parts.append(f"its node's clock is {span(forecast.skew_s)} ahead of this machine's")
    if forecast.basis.startswith("should"):
        parts.append(forecast.basis)
    return "; ".join(filter(None, parts))


def summary(points: Sequence[PointStatus]) -> str:
    counts = Counter(map(state, points))
    return f"{pluralize(len(points), 'point')}: " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
