"""From placed points to submitted jobs: look before, write down, submit, and wait where asked.

The order is the promise: a point is in the ledger as planned before anything is sent, and every refusal is
written down and told, so that `rerun` can go on from any break. All of it happens under the sweep's lock.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf

from inpaint_bench.core.console import console, pluralize, shell_command
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import CODE, JOBS, SWEEP
from inpaint_bench.core.site import SiteConfig
from inpaint_bench.run.manifest import new_run_id
from launchers.points import site_limits
from launchers.points.group import Group, group_points
from launchers.points.point import Point
from launchers.points.repetitions import Order
from launchers.remote import client, plan_file
from launchers.slurm import arrays
from launchers.slurm.job import HydraState, PointJob
from launchers.slurm.local_executor import LocalCall, run_all
from launchers.status import budget, tables
from launchers.status.waiting import wait
from launchers.sweep import launch_context, private_dirs, run_dir_facts, snapshot
from launchers.sweep.launch_context import Surroundings
from launchers.sweep.ledger import Ledger, job_name

from . import dry_run as preview

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
    capped: bool = False  # whoever asks for these points has held them against the budget
    sweep: dict[str, Any] | None = None  # content of a new sweep.json; None: the sweep exists
    waited: bool = field(default=False, init=False)  # set by `send`: it stayed until all that was sent had ended


def new_sweep(
    sweep_id: str | None = None,
    overrides: list[str] | None = None,
    order: Order | None = None,
    around: Surroundings | None = None,
) -> dict[str, Any]:
    """`overrides`: the sweep as it was typed, from which with `order` its points can be expanded again, `around` where
    it was."""
    fresh = f"s{time.strftime('%y%m%d', time.gmtime())}{secrets.token_hex(3)}"
    return {
        "sweep_id": sweep_id or fresh,
        "created_unix": round(time.time(), 3),
        "command": sys.argv,
        "overrides": overrides or [],
        "order": order.record() if order else None,
        "surroundings": (around or launch_context.here()).record(),
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
        points = _apart(choose(), folder)
        if not points:
            return []
        _check(points, ledger, sending)
        sweep_id = (sending.sweep or ledger.sweep)["sweep_id"]
        preview.dry_run(points, folder, sweep_id, _arrays_so_far(ledger))
        return [_sentinel(point, "dry run") for point in points]
    with ledger.locked():
        if sending.sweep and (folder / SWEEP).exists():
            raise UserError(f"{folder} holds a sweep already: choose another hydra.sweep.dir, or `rerun` that one")
        points = _apart(choose(), folder)
        if not points:
            return []
        _check(points, ledger, sending)
        preview.check_accounts(points)
        client.connect(points)
        if sending.sweep:
            ledger.create(**sending.sweep)
        sites = {p.site.name: p.site for p in points}
        ledger.know([entry(p) for p in points], {name: content(site) for name, site in sites.items()})
        _write_plans(points, ledger)
        groups = group_points([p for p in points if p.reachable], taken=_arrays_so_far(ledger))
        console().print(tables.plan_table(points))
        for line in (*preview.costs(points), *site_limits.notes(points, folder)):
            log.info(line)
        code = snapshot.take(folder / CODE)
        for group in groups:
            _plan(group, ledger)
        there = [g for g in groups if g.first.site.connect.method != "local"]
        by_ssh = [g for g in there if g.first.site.connect.method == "ssh"]
        hydra = HydraState.now(sending.hydra_context, sending.task_function)
        refused, unheard = arrays.submit([g for g in there if g not in by_ssh], ledger, hydra, code)
        for missing, silent in _submit_by_ssh(by_ssh, ledger, code):
            refused, unheard = refused + missing, unheard or silent
        here = sorted((p for g in groups if g not in there for p in g.points), key=lambda p: p.num)
        results = _run_here(here, ledger, hydra, code)
    away = sum(not p.reachable for p in points)
    if away:
        log.info(f"{len(points) - away} of {len(points)} points sent, {away} wait in plan files in {folder}")
    if groups and (sending.wait or not there):
        sending.waited = True
        wait(ledger, {p.num for g in groups for p in g.points})
    elif groups:
        log.info(f"How it stands: {shell_command('status', folder)}")
    if refused:
        which = f"{refused} of {pluralize(len(points), 'point')} {'was' if refused == 1 else 'were'} refused"
        more = f", or no word of {'it' if refused == 1 else 'them'} came back" if unheard else ""
        raise PointsFailedError(which + more)
    return [results.get(p.num) or _sentinel(p, p.group or "plan") for p in points]


def _check(points: Sequence[Point], ledger: Ledger, sending: Sending) -> None:
    """Raises UserError for what must not be submitted."""
    sweep = sending.sweep or ledger.sweep
    if not sending.dry_run and any(point.bench.dry_run for point in points):
        raise UserError("dry_run: what was asked for as a dry run is not submitted; --dry-run shows it")
    preview.check(points, sending.folder, Surroundings.recorded(sweep.get("surroundings")))
    begun = sending.sweep is None or (not sending.dry_run and (sending.folder / SWEEP).is_file())  # found again
    if not sending.capped:
        budget.check(points, points[0].bench.budget, ledger if begun else None)


def entry(point: Point) -> dict[str, Any]:
    return {
        "point": point.num,
        "overrides": point.overrides,
        "gpu": point.bench.gpu.name,
        "batch": point.bench.batch,
        "site": point.site.name,
        "time_min": point.starts * point.request.time_min,
        "service_units": point.service_units,
    }


def content(site: SiteConfig) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(site), resolve=True)


def _arrays_so_far(ledger: Ledger) -> int:
    """Numbers of arrays that are taken, also those of which only a folder of pickles is left."""
    records = ledger.points() if (ledger.folder / SWEEP).is_file() else {}
    names = {a.group for record in records.values() for a in record.attempts} | set(run_dir_facts.groups(ledger.folder))
    names.discard(run_dir_facts.UNKNOWN)
    numbers = [int(name.split("-")[0]) for name in names if name.split("-")[0].isdecimal()]
    return max([len(names), *(number + 1 for number in numbers)])


def _apart(points: list[Point], folder: Path) -> list[Point]:
    """Each point as an attempt whose directory is free, whatever is known of earlier ones."""
    for point in points:
        while (folder / point.subdir).exists():
            point.attempt += 1
    return points


def _write_plans(points: list[Point], ledger: Ledger) -> None:
    apart: dict[str, list[Point]] = {}
    for point in points:
        if not point.reachable:
            apart.setdefault(point.site.name, []).append(point)
    for site, theirs in apart.items():
        path = plan_file.add_points(ledger.folder, site, ledger.sweep, theirs)
        ledger.append("elsewhere", points=[p.num for p in theirs], plan=path.name)
        method = theirs[0].site.connect.method
        if method == "bundle":
            path = plan_file.pack(path, snapshot.take(ledger.folder / CODE))
        carry = f"Carry {path} there and run: {plan_file.launch_command(path.name)}"
        again = f"They wait in {path}; once it answers: {shell_command('rerun', ledger.folder)}"
        log.info(
            f"{pluralize(len(theirs), 'point')} for {site}, which is out of reach ({theirs[0].why}). "
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
        job_name=job_name(group.name, sweep_id),
        site=group.first.site.name,
        partition=group.first.request.partition,
        points=[[p.num, p.attempt, p.run_id] for p in group.points],
        asked=[entry(p) for p in group.points],
    )


def _submit_by_ssh(groups: list[Group], ledger: Ledger, code: Path) -> list[tuple[int, bool]]:
    """Each site's groups over its connection, and what `remote.submit` returns of them."""
    by_site: dict[str, list[Group]] = {}
    for group in groups:
        by_site.setdefault(group.first.site.name, []).append(group)
    for site, theirs in by_site.items():  # what waited for the connection is not to be carried there as well
        plan_file.remove_points(ledger.folder, site, {p.num for g in theirs for p in g.points})
    return [client.submit(theirs, ledger, code) for theirs in by_site.values()]


def _run_here(points: list[Point], ledger: Ledger, hydra: HydraState, code: Path) -> dict[int, JobReturn]:
    if not points:
        return {}
    jobs = [PointJob.of(p, hydra, f"{p.group}_{p.num}") for p in points]
    calls = [LocalCall(call=job, time_min=p.request.time_min) for p, job in zip(points, jobs, strict=True)]
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

    folder = private_dirs.make(ledger.folder / JOBS / points[0].group)
    run_all(calls, folder=folder, code=code, started=started, ended=ended, wanted=wanted)
    return {p.num: c.result for p, c in zip(points, calls, strict=True) if isinstance(c.result, JobReturn)}


def _sentinel(point: Point, where: str) -> JobReturn:
    result = JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED)
    result.return_value = Submitted(point=point.num, where=where)
    return result
