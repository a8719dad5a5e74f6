"""Points for a site that this machine does not reach: a plan file, which a person copies there."""

import sys
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from inpaint_bench.core import console
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.core.files import read_plain, replace_bytes
from inpaint_bench.core.schema import PLAN_PATTERN
from launchers.points.point import Point
from launchers.sweep.attempt import Name, Number
from launchers.sweep.sweep_record import LaunchContext, RunOrder, SweepRecord

MAX_DEPTH = 20  # a value of `order` is a few levels deep; libyaml overruns the stack at some ten thousand


class PlannedPoint(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A point under the number that it has in the sweep."""

    num: Number
    overrides: list[str]
    attempt: Number = 1
    run_id: Name | None = None  # None: the machine that submits it makes one


class Plan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Points to be submitted by another machine."""

    sweep_id: Name
    site: Name
    order: RunOrder | None = None
    launch_context: LaunchContext = LaunchContext()
    points: Annotated[list[PlannedPoint], msgspec.Meta(min_length=1)]


def make_plan(sweep: SweepRecord, site: str, points: Iterable[Point]) -> Plan:
    """Return a plan with points of a sweep."""
    planned = []
    for point in points:
        # The other machine does not have the earlier runs that a time limit was computed from.
        limit = [f"time_min={point.request.time_min}"] if point.limit_basis else []
        overrides, run_id = [*point.overrides, *limit], point.run_id or None
        planned.append(PlannedPoint(num=point.num, overrides=overrides, attempt=point.attempt, run_id=run_id))
    context = msgspec.structs.replace(sweep.launch_context, working_dir=None)  # a path of this machine
    return Plan(sweep_id=sweep.sweep_id, site=site, order=sweep.order, launch_context=context, points=planned)


def add_points(folder: Path, site: str, sweep: SweepRecord, points: Iterable[Point]) -> Path:
    """Add points to the plan file of a site, or replace them in it, and return its path."""
    path = folder / PLAN_PATTERN.format(site=site)
    plan = make_plan(sweep, site, points)
    # Points of earlier commands stay in the plan; one that is planned again is replaced.
    by_num = {point.num: point for point in [*(read(path).points if path.exists() else []), *plan.points]}
    plan.points = [by_num[num] for num in sorted(by_num)]
    _write(path, plan)
    return path


def remove_points(folder: Path, site: str, nums: Collection[int]) -> None:
    """Remove points from the plan file of a site; without points it is deleted."""
    path = folder / PLAN_PATTERN.format(site=site)
    if not path.exists():
        return
    plan = read(path)
    plan.points = [point for point in plan.points if point.num not in nums]
    if plan.points:
        _write(path, plan)
    else:
        path.unlink()


def read(path: Path) -> Plan:
    """Read a plan file, or standard input for "-". Raises UserError."""
    try:
        content = sys.stdin.buffer.read() if path == Path("-") else read_plain(path, follow_links=True)
        _check_nesting(content)
        plan = msgspec.yaml.decode(content, type=Plan)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        advice = "--plan takes plan.SITE.yaml of a sweep directory, and site=NAME chooses a site"
        raise UserError(f"{path}: not a plan file ({console.sanitize(first_line(error))}); {advice}") from None
    if twice := [num for num, count in Counter(point.num for point in plan.points).items() if count > 1]:
        raise UserError(f"{path}: duplicate point {twice[0]}; keep one of them")
    return plan


def _check_nesting(content: bytes) -> None:
    """Raise ValueError for deep nesting, and for aliases, with which a small file stands for billions of values."""
    depth = 0
    for event in yaml.parse(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            raise ValueError("nested too deeply, or with an alias")


def _write(path: Path, plan: Plan) -> None:
    comment = f"# Points of sweep {plan.sweep_id} to be submitted at {plan.site}: {launch_command(path.name)}\n"
    replace_bytes(path, comment.encode() + msgspec.yaml.encode(plan))


def launch_command(path: str | Path) -> str:
    """Return the command that submits a plan."""
    return console.shell_command("launch", "--plan", path)


def advice(path: Path, site: str) -> str:
    """Return how the points of a plan file run at its site, and how their results come back."""
    return (
        f"Copy {path} and this commit to {site} and run there: {launch_command(path.name)}; afterwards rsync its sweep "
        "directory here and merge both"
    )
