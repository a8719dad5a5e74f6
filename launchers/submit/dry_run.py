"""Before anything is submitted: what must hold, and on a dry run what would be sent."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.console import console, pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import CODE, JOBS
from inpaint_bench.core.site import SiteConfig
from launchers.points import site_limits
from launchers.points.group import Group, group_points
from launchers.points.point import Point
from launchers.remote import client
from launchers.slurm import start_estimate
from launchers.slurm.script import render
from launchers.slurm.submit import job_command
from launchers.status import tables
from launchers.sweep import snapshot
from launchers.sweep.launch_context import Surroundings
from launchers.sweep.ledger import job_name

log = logging.getLogger(__name__)

SCRIPTS = "sbatch"  # what a dry run leaves


def check(points: Sequence[Point], folder: Path, around: Surroundings) -> None:
    """Raises UserError for what sbatch, or nobody, would find out later."""
    for sign in "%\\":
        if sign in str(folder):
            raise UserError(f"{folder}: Slurm reads {sign} in a path as a pattern; choose another hydra.sweep.dir")
    site_limits.check(points, folder)
    first: dict[str, Point] = {}
    for point in points:
        if around.folders and point.reachable and point.site.connect.method == "ssh":
            raise UserError(
                f"{', '.join(around.folders)}: the points for {point.site.name} are composed there, from the code that "
                "is sent there, which these files are not part of; put them into conf/"
            )
        if point.site.connect != first.setdefault(point.site.name, point).site.connect:
            raise UserError(f"sites.{point.site.name}.connect differs between points: one sweep reaches a site one way")
    for group in group_points(list(points)):
        if group.first.site.connect.method != "local":
            script(group, folder, folder, "check")


def check_accounts(points: Sequence[Point]) -> None:
    for point in points:
        if point.reachable and _lacks_account(point.site):
            raise UserError(f"{point.site.name} needs an account: {_account_hint(point.site)}")


def script(group: Group, folder: Path, code: Path, sweep_id: str) -> str:
    site = group.first.site
    if site.connect.method == "ssh":  # as it will be rendered there
        folder = Path(client.root_of(site, sweep_id))
        code = folder / CODE / code.name
    jobs = folder / JOBS / group.name
    return render(
        group, command=job_command(group, jobs), folder=jobs, code=code, job_name=job_name(group.name, sweep_id)
    )


def dry_run(points: Sequence[Point], folder: Path, sweep_id: str, taken: int) -> None:
    groups = group_points(list(points), taken=taken)
    code = snapshot.would_be(folder / CODE)
    files: dict[str, Path] = {}
    for group in groups:
        if group.first.site.connect.method == "local":
            continue
        file, text = folder / SCRIPTS / f"{group.name}.sh", script(group, folder, code, sweep_id)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            log.info(f"{error.filename or file}: {error.strerror}, so the scripts were not written")
            break
        files[group.name] = file
    console().print(tables.plan_table(points, starts=_starts(groups, files)))
    for group in groups:
        if group.name in files:
            log.info(f"{pluralize(len(group.points), 'point')}: {files[group.name]}")
    for line in (*costs(points), *site_limits.notes(points, folder)):
        log.info(line)
    for point in {p.site.name: p for p in points}.values():
        site = point.site
        if not point.reachable:
            log.info(f"From here {site.name} is out of reach ({point.why}): a launch would leave a plan file for it")
        if _lacks_account(site):
            log.info(f"{site.name} will want an account: {_account_hint(site)}")
    log.info("Dry run: nothing was submitted.")


def costs(points: Sequence[Point]) -> Iterator[str]:
    """A line per site: what its points cost if all of them run to their time limits, by its own rule."""
    by_site: dict[str, list[Point]] = {}
    for point in points:
        if point.site.connect.method != "local":
            by_site.setdefault(point.site.name, []).append(point)
    for name, theirs in by_site.items():
        known = [point.service_units for point in theirs if point.service_units is not None]
        unit, number = theirs[0].site.charging.unit, pluralize(len(theirs), "point")
        cost = f"at most {sum(known):.1f} {unit}" if known else "cost not known, nor is its charging rule"
        yield f"{name}: {number}, {cost}" + (f" for {len(known)} of them" if 0 < len(known) < len(theirs) else "")


def _starts(groups: Sequence[Group], files: Mapping[str, Path]) -> dict[str, str]:
    """By group when Slurm expects to start it, in words. Only a site whose own commands work here is asked."""
    by_site: dict[str, list[Group]] = {}
    for group in groups:
        if group.name in files and group.first.reachable and group.first.site.connect.method == "slurm":
            by_site.setdefault(repr(group.first.site.connect), []).append(group)
    said: dict[str, str] = dict.fromkeys(files, start_estimate.NOT_KNOWN)
    for theirs in by_site.values():
        answers = start_estimate.starts(theirs[0].first.site, [files[group.name] for group in theirs])
        said |= {
            group.name: answer if isinstance(answer, str) else tables.clock(answer)
            for group, answer in zip(theirs, answers, strict=True)
        }
    return said


def _lacks_account(site: SiteConfig) -> bool:
    return site.connect.method != "local" and site.account.required and not site.account.value


def _account_hint(site: SiteConfig) -> str:
    account = site.account
    return f"sites.{site.name}.account.value=... (pattern {account.pattern}); `{account.how_to_list}` there lists yours"
