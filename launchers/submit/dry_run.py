"""Checks before anything is submitted, and the preview of a dry run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.console import console, pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import CODE, JOBS
from launchers.points.point import Group, Point, by_site, group_points
from launchers.remote import client
from launchers.slurm.script import render
from launchers.slurm.submit import UNKNOWN, estimate_starts, job_command
from launchers.status import tables
from launchers.sweep import snapshot
from launchers.sweep.ledger import job_name
from launchers.sweep.sweep_record import LaunchContext

log = logging.getLogger(__name__)

SCRIPTS = "sbatch"  # folder of a dry run's scripts


def check_points(points: Sequence[Point], folder: Path, launch_context: LaunchContext) -> None:
    """Raise UserError for mistakes that sbatch would report later, or that nothing would report."""
    for char in "%\\":
        if char in str(folder):
            raise UserError(f"{folder}: Slurm reads {char} in a path as a pattern; choose another hydra.sweep.dir")
    for name, members in by_site(points).items():
        site = members[0].site
        most = site.limits.max_submit_jobs
        if most is not None and len(members) > most and site.connect.method != "local":
            raise UserError(
                f"{len(members)} points for {name}, which takes {most} jobs of one user at a time "
                "(limits.max_submit_jobs of its site file): launch fewer at once"
            )
        if any(point.site.connect != site.connect for point in members):
            raise UserError(f"sites.{name}.connect differs between points, and a sweep reaches a site one way")
        if launch_context.extra_config_dirs and members[0].reachable and site.connect.method == "ssh":
            raise UserError(
                f"{', '.join(launch_context.extra_config_dirs)}: the points for {name} are composed there, from a copy "
                "of the code without these files; move them into conf/"
            )
    for group in group_points(points):
        if group.site.connect.method != "local":
            script_of(group, folder, folder, "check")


def check_accounts(points: Sequence[Point]) -> None:
    """Raise UserError where a reachable site wants an account and none is set."""
    for message in missing_accounts([point for point in points if point.reachable]):
        raise UserError(message)


def missing_accounts(points: Sequence[Point]) -> list[str]:
    """Return a sentence per site that wants an account where none is set."""
    sentences = []
    for site in (point.site for point in points):
        account, key = site.account, f"sites.{site.name}.account.value"
        if account.required and not account.value and site.connect.method != "local":
            hint = f"{key}=... (pattern {account.pattern}); `{account.how_to_list}` lists yours"
            sentences.append(f"{site.name} needs an account: {hint}")
    return list(dict.fromkeys(sentences))


def script_of(group: Group, folder: Path, code: Path, sweep_id: str) -> str:
    """Return the group's sbatch script; for a site over ssh, as it will be rendered there."""
    site = group.site
    if site.connect.method == "ssh":
        folder = Path(client.root_of(site, sweep_id))
        code = folder / CODE / code.name
    jobs = folder / JOBS / group.name
    return render(
        group, command=job_command(group, jobs), folder=jobs, code=code, job_name=job_name(group.name, sweep_id)
    )


def preview(points: Sequence[Point], folder: Path, sweep_id: str, first_group_number: int) -> None:
    """Write the scripts, and print what a launch would submit."""
    groups = group_points(points, first_number=first_group_number)
    scripts = _write_scripts(groups, folder, sweep_id)
    console().print(tables.plan_table(points, starts=_estimated_starts(groups, scripts)))
    for group in groups:
        if group.name in scripts:
            log.info(f"{pluralize(len(group.points), 'point')}: {scripts[group.name]}")
    for line in cost_lines(points):
        log.info(line)
    for site, members in by_site(points).items():
        if not members[0].reachable:
            reason = members[0].reachability.reason
            log.info(f"{site} cannot be reached from here ({reason}): a launch would write a plan file for it")
    for line in missing_accounts(points):
        log.info(line)
    log.info("Dry run: nothing was submitted.")


def cost_lines(points: Sequence[Point]) -> Iterator[str]:
    """Yield a line per site: the cost of its points if all of them run up to their time limits."""
    for name, members in by_site(points).items():
        if members[0].site.connect.method == "local":
            continue
        known = [point.service_units for point in members if point.service_units is not None]
        unit = members[0].site.charging.unit
        cost = f"at most {sum(known):.1f} {unit}" if known else "cost unknown (no charging rule configured)"
        partly = f" for {len(known)} of them" if 0 < len(known) < len(members) else ""
        yield f"{name}: {pluralize(len(members), 'point')}, {cost}{partly}"


def _write_scripts(groups: Sequence[Group], folder: Path, sweep_id: str) -> dict[str, Path]:
    """Return the files by group; incomplete where the disk takes no more."""
    code = snapshot.planned_path(folder / CODE)
    files: dict[str, Path] = {}
    for group in groups:
        if group.site.connect.method == "local":
            continue
        file = folder / SCRIPTS / f"{group.name}.sh"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(script_of(group, folder, code, sweep_id), encoding="utf-8")
        except OSError as error:
            log.info(f"{error.filename or file}: {error.strerror}, so the scripts were not written")
            break
        files[group.name] = file
    return files


def _estimated_starts(groups: Sequence[Group], scripts: Mapping[str, Path]) -> dict[str, str]:
    """Return by group when Slurm expects to start it, in words. Queries only sites whose commands work here."""
    starts = dict.fromkeys(scripts, UNKNOWN)
    written = [group for group in groups if group.name in scripts and group.points[0].reachable]
    for members in by_site(group for group in written if group.site.connect.method == "slurm").values():
        estimates = estimate_starts(members[0].site, [scripts[group.name] for group in members])
        for group, estimate in zip(members, estimates, strict=True):
            starts[group.name] = estimate if isinstance(estimate, str) else tables.clock(estimate)
    return starts
