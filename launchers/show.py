"""What a person sees of a sweep: the points before they are sent, and how they stand afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from inpaint_bench.terminal import table

from .point import Point
from .watch import Standing


def plan_table(points: Sequence[Point]) -> Table:
    rows = [
        (
            point.num,
            point.bench.gpu.name,
            point.bench.batch,
            point.site.name,
            point.request.partition,
            str(point.request),
            f"{point.request.time_min} min",
            point.service_units,
            point.group or f"plan.{point.site.name}.yaml",
        )
        for point in points
    ]
    columns = ("point", "gpu", "batch", "site", "partition", "request", "time limit", "SU at most", "array")
    return table(columns, rows)


def standings_table(standings: Sequence[Standing]) -> Table:
    rows = []
    for standing in standings:
        record, word = standing.record, standing.verdict
        last = record.last
        progress = (standing.left.manifest or {}).get("progress") or {}
        rows.append(
            (
                record.num,
                record.gpu,
                record.batch,
                record.site,
                last.attempt if last else None,
                last.job_id if last else None,
                str(word.state),
                str(word.reason) if word.reason else None,
                progress.get("images_per_s"),
                word.message,
            )
        )
    columns = (
        "point",
        "gpu",
        "batch",
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
    counts = Counter(str(standing.verdict.state) for standing in standings)
    return f"{len(standings)} points: " + ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
