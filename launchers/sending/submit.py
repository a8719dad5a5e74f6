"""From placed points to submitted jobs: look before, write down, submit, and wait where asked.

The order is the promise: a point is in the ledger as planned before anything is sent, and every refusal is
written down and told, so that `rerun` can go on from any break. All of it happens under the sweep's lock.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf

from inpaint_bench.contract import CODE, JOBS, SWEEP
from inpaint_bench.errors import PointsFailedError, UserError
from inpaint_bench.manifest import new_run_id
from inpaint_bench.site_config import SiteConfig
from inpaint_bench.terminal import console, count

from ..away import plans, remote
from ..jobs import slurm
from ..jobs.job import HydraState, PointJob
from ..jobs.local import LocalCall, run_all
from ..points import limits
from ..points.group import Group, group_points
from ..points.point import Point
from ..points.repetition import Order
from ..record import private, snapshot
from ..record.ledger import Ledger
from ..standing import show
from ..standing.waiting import wait
from . import preview

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """Stands for a return value that nobody waited for."""

    point: int
    where: str


@dataclass(kw_only=True)
class Sending:
    """What is the same for all points of one command."""

    folder: Path
    hydra_context: HydraContext
    task_function: TaskFunction
    wait: bool = False
    dry_run: bool = False
    sweep: dict[str, Any] | None = None  # content of a new sweep.json; None: the sweep exists
    waited: bool = field(default=False, init=False)  # set by `send`: it stayed until all that was sent had ended


def new_sweep(
    sweep_id: str | None = None, overrides: list[str] | None = None, order: Order | None = None
) -> dict[str, Any]:
    """`overrides`: the sweep as it was typed, from which with `order` its points can be expanded again."""
    fresh = f"s{time.strftime('%y%m%d', time.gmtime())}{secrets.token_hex(3)}"
    return {
        "sweep_id": sweep_id or fresh,
        "created_unix": round(time.time(), 3),
        "command": sys.argv,
        "overrides": overrides or [],
        "order": order.record() if order else None,
    }


def send(choose: Callable[[], list[Point]], sending: Sending) -> list[JobReturn]:
    """Submit what `choose` returns; it is called under the lock, so what it saw is still true.

    Raises UserError before anything was submitted, PointsFailedError where sbatch refused or, after waiting,
    a point did not complete.
    """
    folder = sending.folder
    ledger = Ledger(folder)
    log.info(f"sweep directory: {folder}")
    if sending.dry_run:
        points = choose()
        if not points:
            return []
        preview.check(points, folder, points[0].bench.budget)
        sweep_id = (sending.sweep or ledger.sweep)["sweep_id"]
        preview.dry_run(points, folder, sweep_id, 0 if sending.sweep else _arrays_so_far(ledger))
        return [_sentinel(point, "dry run") for point in points]
    with ledger.locked():
        if sending.sweep and (folder / SWEEP).exists():
            raise UserError(f"{folder} holds a sweep already: choose another hydra.sweep.dir, or `rerun` that one")
        points = choose()
        if not points:
            return []
        preview.check(points, folder, points[0].bench.budget)
        preview.check_accounts(points)
        remote.connect(points)
        if sending.sweep:
            ledger.create(**sending.sweep)
        sites = {p.site.name: p.site for p in points}
        ledger.know([_entry(p) for p in points], {name: _content(site) for name, site in sites.items()})
        _write_plans(points, ledger)
        groups = group_points([p for p in points if p.reachable], taken=_arrays_so_far(ledger))
        console().print(show.plan_table(points))
        for line in (*preview.costs(points), *limits.notes(points)):
            log.info(line)
        code = snapshot.take(folder / CODE)
        for group in groups:
            _plan(group, ledger)
        there = [g for g in groups if g.first.site.reach.method != "local"]
        by_ssh = [g for g in there if g.first.site.reach.method == "ssh"]
        refused = sum(len(g.points) for g in there if g not in by_ssh and not _submit_array(g, ledger, sending, code))
        refused += _submit_by_ssh(by_ssh, ledger, code)
        here = sorted((p for g in groups if g not in there for p in g.points), key=lambda p: p.num)
        results = _run_here(here, ledger, sending, code)
    away = sum(not p.reachable for p in points)
    if away:
        log.info(f"{len(points) - away} of {len(points)} points sent, {away} wait in plan files in {folder}")
    if groups and (sending.wait or not there):
        sending.waited = True
        wait(ledger, {p.num for g in groups for p in g.points})
    elif groups:
        log.info(f"How it stands: python -m inpaint_bench.status {folder}")
    if refused:
        how = "were refused, or no word of them came back" if by_ssh else "were refused"
        raise PointsFailedError(f"{refused} of {len(points)} points {how}")
    return [results.get(p.num) or _sentinel(p, p.group or "plan") for p in points]


def _entry(point: Point) -> dict[str, Any]:
    return {
        "point": point.num,
        "overrides": point.overrides,
        "gpu": point.bench.gpu.name,
        "batch": point.bench.batch,
        "site": point.site.name,
        "time_min": point.request.time_min,
        "service_units": point.service_units,
    }


def _content(site: SiteConfig) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(site), resolve=True)


def _arrays_so_far(ledger: Ledger) -> int:
    return len({a.group for record in ledger.points().values() for a in record.attempts})


def _write_plans(points: list[Point], ledger: Ledger) -> None:
    apart: dict[str, list[Point]] = {}
    for point in points:
        if not point.reachable:
            apart.setdefault(point.site.name, []).append(point)
    for site, theirs in apart.items():
        path = plans.write(ledger.folder, site, ledger.sweep, theirs)
        ledger.append("elsewhere", points=[p.num for p in theirs], plan=path.name)
        method = theirs[0].site.reach.method
        if method == "bundle":
            path = plans.pack(path, snapshot.take(ledger.folder / CODE))
        carry = f"Carry {path} there and run: {plans.command(path.name)}"
        again = f"They wait in {path}; once it answers: python -m inpaint_bench.rerun {ledger.folder}"
        log.info(
            f"{count(len(theirs), 'point')} for {site}, which is out of reach ({theirs[0].why}). "
            f"{again if method == 'ssh' else carry}"
        )


def _plan(group: Group, ledger: Ledger) -> None:
    """Complete the configuration of the group's points and write them down as planned."""
    sweep_id = ledger.sweep["sweep_id"]
    for point in group.points:
        point.run_id = point.run_id or new_run_id()
        point.composed = point.composed.edited(
            {
                "hydra.sweep.dir": str(ledger.folder),
                "hydra.sweep.subdir": point.subdir,
                "site": point.site,
                "identity.run_id": point.run_id,
                "identity.sweep_id": sweep_id,
                "identity.point": point.num,
                "identity.attempt": point.attempt,
            }
        )
    ledger.append(
        "planned",
        group=group.name,
        job_name=preview.job_name(group.name, sweep_id),
        site=group.first.site.name,
        partition=group.first.request.partition,
        points=[[p.num, p.attempt, p.run_id] for p in group.points],
        asked=[_entry(p) for p in group.points],
    )


def _submit_by_ssh(groups: list[Group], ledger: Ledger, code: Path) -> int:
    """Each site's groups over its connection; returns how many points were refused, or may not have arrived."""
    by_site: dict[str, list[Group]] = {}
    for group in groups:
        by_site.setdefault(group.first.site.name, []).append(group)
    for site, theirs in by_site.items():  # what waited for the connection is not to be carried there as well
        plans.forget(ledger.folder, site, {p.num for g in theirs for p in g.points})
    return sum(remote.submit(theirs, ledger, code) for theirs in by_site.values())


def _job(point: Point, hydra: HydraState, job_id: str) -> PointJob:
    return PointJob(hydra=hydra, composed=point.composed.edited({"hydra.job.id": job_id}), raise_failure=True)


def _submit_array(group: Group, ledger: Ledger, sending: Sending, code: Path) -> bool:
    """False where sbatch refused, which is written down and told; other arrays are not stopped by it."""
    pairs = [[p.num, p.attempt] for p in group.points]
    hydra = HydraState.now(sending.hydra_context, sending.task_function)
    try:
        array = slurm.submit(
            group,
            [_job(p, hydra, f"{group.name}_{task}") for task, p in enumerate(group.points)],
            folder=private.make(sending.folder / JOBS / group.name),
            code=code,
            job_name=preview.job_name(group.name, ledger.sweep["sweep_id"]),
        )
    except UserError as error:
        ledger.append("refused", group=group.name, points=pairs, message=str(error))
        log.error(f"{error}. Its {len(pairs)} points are recorded; `rerun`, with what is to change, sends them again.")
        return False
    ledger.append("submitted", group=group.name, job_id=f"{array}_%a", points=pairs)
    first = group.first
    log.info(f"{first.site.name}: array {array} with {count(len(pairs), 'point')} in {first.request.partition}")
    return True


def _run_here(points: list[Point], ledger: Ledger, sending: Sending, code: Path) -> dict[int, JobReturn]:
    if not points:
        return {}
    hydra = HydraState.now(sending.hydra_context, sending.task_function)
    calls = [LocalCall(call=_job(p, hydra, f"{p.group}_{p.num}"), time_min=p.request.time_min) for p in points]
    begun: dict[int, float] = {}

    def wanted(index: int) -> bool:
        last = ledger.points()[points[index].num].last
        return last is not None and not last.cancelled

    def started(index: int, job_id: str) -> None:
        point = points[index]
        begun[index] = time.monotonic()
        ledger.append("submitted", group=point.group, job_id=job_id, points=[[point.num, point.attempt]])
        log.info(f"[{index + 1}/{len(points)}] point {point.num} on {point.site.name}: {' '.join(point.overrides)}")

    def ended(index: int) -> None:
        result = calls[index].result
        how = "done" if isinstance(result, JobReturn) and result.status == JobStatus.COMPLETED else "FAILED"
        log.info(f"[{index + 1}/{len(points)}] {how} after {time.monotonic() - begun[index]:.1f} s")

    folder = private.make(sending.folder / JOBS / points[0].group)
    run_all(calls, folder=folder, code=code, started=started, ended=ended, wanted=wanted)
    return {p.num: c.result for p, c in zip(points, calls, strict=True) if isinstance(c.result, JobReturn)}


def _sentinel(point: Point, where: str) -> JobReturn:
    result = JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED)
    result.return_value = Submitted(point=point.num, where=where)
    return result
