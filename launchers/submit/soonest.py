"""`site=soonest`: of the sites that have a GPU and can be reached, the one whose Slurm would start its jobs first."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.errors import UserError
from launchers.points.point import Point, group_points
from launchers.remote import client
from launchers.slurm import starts as slurm_starts
from launchers.slurm.query import NOT_ASKED
from launchers.slurm.starts import Start
from launchers.status.tables import duration

from .checks import missing_accounts, script_of


def soonest(points: Sequence[Point], problems: Mapping[str, str]) -> tuple[str, str]:
    """Return the site of the point that starts first, and in words what each site says.

    Equal ones are in the order of `site=auto`. One that gives no time is taken only if none does, and one that cannot
    be reached if none can: its points wait in a plan file. Raises UserError if every site refuses the point.
    """
    alone = sum(point.reachable for point in points) == 1
    starts = [(point, _ask(point, alone=alone)) for point in points]
    # In whole minutes: sites that start at once are equal.
    rank = [(not point.reachable, s.refused, s.wait_s is None, (s.wait_s or 0) // 60) for point, s in starts]
    best, start = starts[rank.index(min(rank))]
    said = {point.site.name: _words(start) for point, start in starts} | dict(problems)
    text = "; ".join(f"{name}: {words}" for name, words in said.items())
    if start.refused:
        advice = f"site={best.site.name} submits there all the same"
        raise UserError(f"site=soonest: no site takes gpu={best.bench.gpu.name} now ({text}); {advice}")
    return best.site.name, text


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
    try:
        script = script_of(group_points([point])[0], Path.cwd(), Path.cwd(), "check")
    except UserError as error:
        return Start(refused=True, reason=str(error))
    return (client.ask_start if site.connection.over_ssh else slurm_starts.ask)(site, script)


def _words(start: Start) -> str:
    if start.wait_s is None:
        return str(start)
    return f"in {duration(start.wait_s)}" if start.wait_s >= 60 else "now"
