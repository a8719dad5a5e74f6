"""`site=soonest`: of the sites that have a GPU and can be reached, the one whose Slurm would start its jobs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.errors import UserError
from launchers.points.point import Point, group_points
from launchers.remote import client
from launchers.slurm import starts
from launchers.slurm.query import NOT_ASKED
from launchers.slurm.starts import Start
from launchers.status.tables import duration

from .checks import missing_accounts, script_of


def soonest(points: Sequence[Point], problems: Mapping[str, str]) -> tuple[str, str]:
    """Return the site of the point that starts first, and in words what each site says.

    Equal ones are in the order of `site=auto`. A site that gives no time is taken only if none does. Raises UserError
    if every site refuses the point.
    """
    answers = {point.site.name: _ask(point, alone=len(points) == 1) for point in points}
    first = min(answers, key=lambda name: answers[name].rank)
    said = {name: _words(start) for name, start in answers.items()} | dict(problems)
    text = "; ".join(f"{name}: {words}" for name, words in said.items())
    if answers[first].refused:
        gpu = points[0].bench.gpu.name
        raise UserError(f"site=soonest: no site takes gpu={gpu} now ({text}); site={first} submits there all the same")
    return first, text


def _ask(point: Point, *, alone: bool) -> Start:
    """Ask with the script of a job that runs this point alone."""
    site = point.site
    if not point.reachable:
        return Start(reason=f"cannot be reached ({point.reachability.reason})")
    if not site.connection.has_slurm:
        return Start(wait_s=0.0)
    if missing := missing_accounts([point]):
        return Start(refused=True, reason=missing[0])
    if alone:
        return Start(reason=NOT_ASKED)
    (group,) = group_points([point])
    try:
        script = script_of(group, Path.cwd(), Path.cwd(), "check")
    except UserError as error:
        return Start(refused=True, reason=str(error))
    return (client.ask_start if site.connection.over_ssh else starts.ask)(site, script)


def _words(start: Start) -> str:
    if start.wait_s is None:
        return str(start)
    return f"in {duration(start.wait_s)}" if start.wait_s >= 60 else "now"
