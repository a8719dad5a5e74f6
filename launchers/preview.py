"""Before anything is submitted: what must hold, and on a dry run what would be sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.config import SiteConfig
from inpaint_bench.contract import CODE
from inpaint_bench.errors import UserError
from inpaint_bench.terminal import console

from . import remote, show, snapshot
from .group import Group, group_points
from .place import check_budget
from .point import Point
from .render import render
from .slurm import job_command

log = logging.getLogger(__name__)

JOBS = "jobs"  # submitit's pickles and logs, a folder per array
SCRIPTS = "sbatch"  # what a dry run leaves


def check(points: Sequence[Point], folder: Path, budget: float | None) -> None:
    """Raises UserError for what sbatch, or nobody, would find out later."""
    for sign in "%\\":
        if sign in str(folder):
            raise UserError(f"{folder}: Slurm reads {sign} in a path as a pattern; choose another hydra.sweep.dir")
    check_budget(points, budget)
    first: dict[str, Point] = {}
    for point in points:
        if point.site.reach != first.setdefault(point.site.name, point).site.reach:
            raise UserError(f"sites.{point.site.name}.reach differs between points: one sweep reaches a site one way")
    for group in group_points(list(points)):
        if group.first.site.reach.method != "local":
            script(group, folder, folder, "check")


def check_accounts(points: Sequence[Point]) -> None:
    for point in points:
        if point.reachable and _lacks_account(point.site):
            raise UserError(f"{point.site.name} needs an account: {_account_hint(point.site)}")


def script(group: Group, folder: Path, code: Path, sweep_id: str) -> str:
    site = group.first.site
    if site.reach.method == "ssh":  # as it will be rendered there
        folder = Path(remote.root_of(site, sweep_id))
        code = folder / CODE / code.name
    jobs = folder / JOBS / group.name
    return render(
        group, command=job_command(group, jobs), folder=jobs, code=code, job_name=job_name(group.name, sweep_id)
    )


def job_name(group: str, sweep_id: str) -> str:
    """Unique on the cluster, so that no tool that selects by name takes one sweep for another."""
    return f"inpaint-{sweep_id}-{group}"


def dry_run(points: Sequence[Point], folder: Path, sweep_id: str, taken: int) -> None:
    groups = group_points(list(points), taken=taken)
    console().print(show.plan_table(points))
    code = snapshot.would_be(folder / CODE)
    for group in groups:
        if group.first.site.reach.method == "local":
            continue
        file = folder / SCRIPTS / f"{group.name}.sh"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script(group, folder, code, sweep_id), encoding="utf-8")
        log.info(f"{show.count(len(group.points), 'point')}: {file}")
    for point in {p.site.name: p for p in points}.values():
        site = point.site
        if not point.reachable:
            log.info(f"From here {site.name} is out of reach ({point.why}): a launch would leave a plan file for it")
        if _lacks_account(site):
            log.info(f"{site.name} will want an account: {_account_hint(site)}")
    known = [p.service_units for p in points if p.service_units is not None]
    cost = f"at most {sum(known):.1f} SU for {len(known)} of {len(points)} points" if known else "cost not known"
    log.info(f"Dry run: nothing was submitted; {cost}.")


def _lacks_account(site: SiteConfig) -> bool:
    return site.reach.method != "local" and site.account.required and not site.account.value


def _account_hint(site: SiteConfig) -> str:
    account = site.account
    return f"sites.{site.name}.account.value=... (pattern {account.pattern}); `{account.how_to_list}` there lists yours"
