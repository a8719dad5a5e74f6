"""The preview of a dry run: the scripts, and a table of what a launch would submit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inpaint_bench.core.console import console, echo_json, output
from inpaint_bench.core.schema import CODE, SCHEMA_VERSION
from launchers.points.input_paths import given_paths, is_visible
from launchers.points.point import Group, Point, by_site, group_points
from launchers.slurm.query import UNKNOWN, estimate_starts
from launchers.status import tables
from launchers.status.cost import cost_lines
from launchers.sweep import snapshot

from .checks import missing_accounts, script_of
from .estimates import Estimate, lines

log = logging.getLogger(__name__)

SCRIPTS = "sbatch"  # folder of a dry run's scripts
REQUESTED = ("point", "overrides", "gpu", "batch", "site", "total_time_min", "service_units")


def preview(
    points: Sequence[Point],
    folder: Path,
    sweep_id: str,
    first_group_number: int,
    estimates: Mapping[int, Estimate],
    left_out: Sequence[str],
) -> None:
    """Write the scripts, and print what a launch would submit; `left_out` are sentences on points that do not fit."""
    groups = group_points(points, first_number=first_group_number)
    scripts = _write_scripts(groups, folder, sweep_id)
    starts = _estimated_starts(groups, scripts)
    if output.as_json:
        echo_json(_as_json(groups, starts, folder, estimates) | {"left_out": left_out})
    else:
        console().print(*tables.plan_tables(points, starts, {num: each.shown for num, each in estimates.items()}))
    if scripts:
        log.info(f"scripts: {folder / SCRIPTS}")
    for line in (*cost_lines(points), *lines(points, estimates)):
        log.info(line)
    for site, members in by_site(points).items():
        if not members[0].reachable:
            reason = members[0].reachability.reason
            log.info(f"{site} cannot be reached from here ({reason}): a launch would write a plan file for it")
    for site, members in by_site(points).items():
        paths = dict.fromkeys(path for point in members for path in given_paths(point.bench))
        if paths and not is_visible(members[0].site, members[0].reachability):
            log.info(f"{', '.join(paths)}: at {site}, which this machine does not see, so this was not looked at")
    for line in missing_accounts(points):
        log.info(line)
    log.info("Dry run: nothing was submitted.")


def _as_json(
    groups: Sequence[Group], starts: Mapping[str, str], folder: Path, estimates: Mapping[int, Estimate]
) -> dict[str, Any]:
    """Return the arrays with their points, as `--json` prints them: fields may be added, none is removed."""
    arrays = []
    for group in groups:
        requested = [point.requested() for point in group.points]
        points = [
            {name: getattr(attempt, name) for name in REQUESTED} | {"likely": asdict(estimates[attempt.point])}
            for attempt in requested
        ]
        arrays.append(
            {
                "array": group.name,
                "site": group.site.name,
                "reachable": group.points[0].reachable,
                "partition": group.request.partition,
                "request": str(group.request),
                "time_min": group.request.time_min,
                "expected_start": starts.get(group.name),
                "unit": group.site.charging.unit,
                "points": points,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "sweep": str(folder), "arrays": arrays}


def _write_scripts(groups: Sequence[Group], folder: Path, sweep_id: str) -> dict[str, Path]:
    """Return the files by group; incomplete if the disk takes no more."""
    code = snapshot.planned_path(folder / CODE)
    files: dict[str, Path] = {}
    for group in groups:
        if not group.site.connection.has_slurm:
            continue
        file = folder / SCRIPTS / f"{group.name}.sh"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(script_of(group, folder, code, sweep_id), encoding="utf-8")
        except OSError as error:
            # A preview without scripts is still of use.
            log.info(f"{error.filename or file}: {error.strerror}, so the scripts were not written")
            break
        files[group.name] = file
    return files


def _estimated_starts(groups: Sequence[Group], scripts: Mapping[str, Path]) -> dict[str, str]:
    """Return by group when Slurm expects to start it, in words. Queries only sites whose commands work here."""
    starts = dict.fromkeys(scripts, UNKNOWN)
    written = [group for group in groups if group.name in scripts and group.points[0].reachable]
    for members in by_site(group for group in written if group.site.connection.submits_here).values():
        estimates = estimate_starts(members[0].site, [scripts[group.name] for group in members])
        for group, start in zip(members, estimates, strict=True):
            starts[group.name] = start if isinstance(start, str) else tables.clock(start)
    return starts
