"""What a person sees of a sweep: the points before they are sent, and how they stand afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from inpaint_bench.contract import Reason
from inpaint_bench.terminal import table

from .point import Point
from .watch import Standing


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def differing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each point the overrides that not all points share, less those with a column of their own."""
    common = set(overrides[0]).intersection(*overrides) if overrides else set()
    own = ("gpu=", "batch=")
    return [" ".join(o for o in point if o not in common and not o.startswith(own)) for point in overrides]


def plan_table(points: Sequence[Point]) -> Table:
    rows = [
        (
            point.num,
            point.bench.gpu.name,
            point.bench.batch,
            also,
            point.site.name,
            point.request.partition,
            str(point.request),
            f"{point.request.time_min} min",
            point.service_units,
            point.group or f"plan.{point.site.name}.yaml",
        )
        for point, also in zip(points, differing([point.overrides for point in points]), strict=True)
    ]
    columns = ("point", "gpu", "batch", "also", "site", "partition", "request", "time limit", "SU at most", "array")
    return table(columns, rows)


def state(standing: Standing) -> str:
    """In one word; `unavailable` is its own, though the attempt itself ended as failed."""
    word = standing.verdict
    return str(Reason.UNAVAILABLE if word.reason is Reason.UNAVAILABLE else word.state)


def standings_table(standings: Sequence[Standing]) -> Table:
    rows = []
    for standing, also in zip(standings, differing([s.record.overrides for s in standings]), strict=True):
        record, word = standing.record, standing.verdict
        last = record.last
        progress = (standing.left.manifest or {}).get("progress") or {}
        rows.append(
            (
                record.num,
                record.gpu,
                record.batch,
                also,
                record.site,
                last.attempt if last else None,
                last.job_id if last else None,
                state(standing),
                str(word.reason) if word.reason else None,
                progress.get("images_per_s"),
                word.message,
            )
        )
    columns = (
        "point",
        "gpu",
        "batch",
        "also",
        "site",
        "attempt",
        "job",
        "state",
        "reason",
        "images/s",
        "what happened",
    )
    return table(columns, rows)


def summary(standings: Sequence[Standing]) -> str:
    counts = Counter(map(state, standings))
    return f"{count(len(standings), 'point')}: " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
