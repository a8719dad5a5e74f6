"""What a site takes of one user at once, held against a whole sweep. `place` checks the limits of a partition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from inpaint_bench.contract import TABLES
from inpaint_bench.errors import UserError

from .point import Point

# Of one run: manifest, windows, scheduler's word, log, Hydra's three; of its job: pickle, result, two logs.
RUN_FILES = 11
TELEMETRY_FILES = 2  # the sidecar's account and log


def check(points: Sequence[Point]) -> None:
    """Raises UserError for what the site is known to refuse, before sbatch is called."""
    for site, theirs in _by_site(points):
        limits = theirs[0].site.limits
        if limits.max_submit_jobs is not None and len(theirs) > limits.max_submit_jobs:
            raise UserError(
                f"{len(theirs)} points for {site}, which takes {limits.max_submit_jobs} jobs of one user at a time "
                "(limits.max_submit_jobs of its site file): launch fewer at once"
            )
        least = sum(map(_files_at_least, theirs))
        if limits.files_quota is not None and least > limits.files_quota:
            raise UserError(
                f"{len(theirs)} points for {site} leave at least {least:,} files, and its scratch takes "
                f"{limits.files_quota:,} (limits.files_quota of its site file): launch fewer at once"
            )


def notes(points: Sequence[Point]) -> Iterator[str]:
    """What may come to a limit, in sentences."""
    for site, theirs in _by_site(points):
        quota = theirs[0].site.limits.files_quota
        most = sum(map(_files_at_most, theirs))
        if quota is not None and most > quota:
            yield (
                f"{site}: {most:,} files if all points run to their time limit, and its scratch takes {quota:,}; "
                "a higher telemetry.part_s makes fewer"
            )


def _by_site(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    by_site: dict[str, list[Point]] = {}
    for point in points:
        if point.site.reach.method != "local":
            by_site.setdefault(point.site.name, []).append(point)
    yield from by_site.items()


def _files_at_least(point: Point) -> int:
    return RUN_FILES + (0 if point.bench.telemetry.source == "none" else TELEMETRY_FILES)


def _files_at_most(point: Point) -> int:
    """A part of every table each `telemetry.part_s`, and a last one."""
    parts = math.ceil(60 * point.request.time_min / point.bench.telemetry.part_s) + 1
    return _files_at_least(point) + len(TABLES) * parts
