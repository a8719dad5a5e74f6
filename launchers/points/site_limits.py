"""What a site takes of one user at once, held against a whole sweep. `place` checks the limits of a partition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import TABLES
from inpaint_bench.core.site import Quota, SiteConfig
from launchers.sweep import snapshot

from .point import Point

# Of one run: manifest, windows, scheduler's word, log, Hydra's three; of its job: pickle, result, two logs.
RUN_FILES = 11
TELEMETRY_FILES = 2  # the sidecar's account and log


def check(points: Sequence[Point], folder: Path) -> None:
    """Raises UserError for what the site is known to refuse, before sbatch is called. `folder`: of the sweep."""
    for site, theirs in _by_site(points):
        limits = theirs[0].site.limits
        if limits.max_submit_jobs is not None and len(theirs) > limits.max_submit_jobs:
            raise UserError(
                f"{len(theirs)} points for {site}, which takes {limits.max_submit_jobs} jobs of one user at a time "
                "(limits.max_submit_jobs of its site file): launch fewer at once"
            )
        quota, least = _quota(theirs[0].site, folder), sum(map(_files_at_least, theirs)) + snapshot.size()
        if quota is not None and least > quota.files:
            raise UserError(
                f"{len(theirs)} points for {site} leave at least {least:,} files, and {quota.folder} takes "
                f"{quota.files:,} (storage.quotas of its site file): launch fewer at once, or elsewhere"
            )


def notes(points: Sequence[Point], folder: Path) -> Iterator[str]:
    """What may come to a limit, in sentences. What lies there already is not counted."""
    for site, theirs in _by_site(points):
        quota, most = _quota(theirs[0].site, folder), sum(map(_files_at_most, theirs)) + snapshot.size()
        if quota is not None and most > quota.files:
            yield (
                f"{site}: {most:,} files if all points run to their time limit, and {quota.folder} takes "
                f"{quota.files:,}; a higher telemetry.part_s makes fewer"
            )


def _quota(site: SiteConfig, folder: Path) -> Quota | None:
    """Of the file system that the sweep lies on, if the site file knows it."""
    root = Path(site.connect.folder or "") if site.connect.method == "ssh" else folder.resolve()
    around = [quota for quota in site.storage.quotas if root.is_relative_to(Path(quota.folder).resolve())]
    return max(around, key=lambda quota: len(Path(quota.folder).parts), default=None)


def _by_site(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    by_site: dict[str, list[Point]] = {}
    for point in points:
        if point.site.connect.method != "local":
            by_site.setdefault(point.site.name, []).append(point)
    yield from by_site.items()


def _files_at_least(point: Point) -> int:
    return RUN_FILES + (0 if point.bench.telemetry.source == "none" else TELEMETRY_FILES)


def _files_at_most(point: Point) -> int:
    """Of each start a part of every table per `telemetry.part_s`, and a last one."""
    parts = point.starts * (math.ceil(60 * point.request.time_min / point.bench.telemetry.part_s) + 1)
    return _files_at_least(point) + len(TABLES) * parts
