"""From placed points to submitted jobs: look before, write down, submit, and wait where asked.

The order is the promise: a point is in the ledger as planned before anything is sent, and every refusal is
written down and told, so that `rerun` can go on from any break.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf, open_dict, read_write

from inpaint_bench.config import SiteConfig
from inpaint_bench.contract import CODE, PointState
from inpaint_bench.errors import PointsFailedError, UserError
from inpaint_bench.manifest import new_run_id
from inpaint_bench.terminal import console

from . import plans, show, snapshot
from .group import Group, group_points
from .job import PointJob
from .ledger import Ledger
from .local import LocalCall, run_all
from .place import check_budget
from .point import Point
from .render import render
from .watch import OPEN, look

log = logging.getLogger(__name__)

JOBS = "jobs"  # submitit's pickles and logs, a folder per array
SCRIPTS = "sbatch"  # what a dry run leaves
WAIT_S = (2.0, 60.0)  # first and longest pause between two looks at Slurm


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
    budget: float | None = None


def send(points: list[Point], sending: Sending, *, sweep: dict[str, Any] | None) -> list[JobReturn]:
    """Submit `points` into the sweep at `sending.folder`; `sweep` None: it exists already.

    Raises UserError before anything was submitted, PointsFailedError after waiting.
    """
    check_budget(points, sending.budget)
    if sending.dry_run:
        return _dry_run(points, sending)
    _check_accounts(points)
    ledger = Ledger(sending.folder)
    with ledger.locked():
        if sweep is not None:
            ledger.create(**sweep)
        ledger.know([_entry(p) for p in points], {p.site.name: _content(p.site) for p in points})
        _write_plans(points, ledger)
        groups = group_points([p for p in points if p.reachable], taken=_arrays_so_far(ledger))
        code = sending.folder / CODE / snapshot.take(sending.folder / CODE)
        for group in groups:
            _plan(group, ledger, sending.folder)
        for group in groups:
            if group.first.site.reach.method == "slurm":
                _submit_array(group, ledger, sending, code)
    console().print(show.plan_table(points))
    local = [g for g in groups if g.first.site.reach.method == "local"]
    results = _run_here([p for g in local for p in g.points], ledger, sending, code)
    if groups and (sending.wait or len(local) == len(groups)):
        _wait(ledger, {p.num for g in groups for p in g.points})
    elif groups:
        log.info(f"How it stands: python -m inpaint_bench.status {sending.folder}")
    return [results.get(p.num) or _sentinel(p, p.group or "plan") for p in points]


def _dry_run(points: list[Point], sending: Sending) -> list[JobReturn]:
    groups = group_points(points)
    console().print(show.plan_table(points))
    folder = sending.folder / SCRIPTS
    for group in groups:
        if group.first.site.reach.method != "slurm":
            continue
        from .slurm import job_command

        jobs = sending.folder / JOBS / group.name
        code = sending.folder / CODE / "<snapshot>"
        text = render(group, command=job_command(group, jobs), folder=jobs, code=code, job_name=_job_name(group, "dry"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{group.name}.sh").write_text(text, encoding="utf-8")
        log.info(f"{len(group.points)} points: {folder / f'{group.name}.sh'}")
    for point in {p.site.name: p for p in points}.values():
        site = point.site
        if not point.reachable:
            log.info(f"From here {site.name} is out of reach ({point.why}): a launch would leave a plan file for it")
        if site.account.required and not site.account.value and site.reach.method == "slurm":
            log.info(f"{site.name} will want an account: {_account_hint(site)}")
    total = [p.service_units for p in points if p.service_units is not None]
    log.info(f"At most {sum(total):.1f} SU where the rule is known. Dry run: nothing was submitted.")
    return [_sentinel(point, "dry run") for point in points]


def _check_accounts(points: list[Point]) -> None:
    for point in points:
        account = point.site.account
        if point.reachable and point.site.reach.method == "slurm" and account.required and not account.value:
            raise UserError(f"{point.site.name} needs an account: {_account_hint(point.site)}")


def _account_hint(site: SiteConfig) -> str:
    account = site.account
    return f"sites.{site.name}.account.value=... (pattern {account.pattern}); `{account.how_to_list}` lists yours"


def _entry(point: Point) -> dict[str, Any]:
    return {
        "point": point.num,
        "overrides": point.overrides,
        "gpu": point.bench.gpu.name,
        "batch": point.bench.batch,
        "site": point.site.name,
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
        path = plans.write(ledger.folder, site, ledger.sweep["sweep_id"], theirs)
        ledger.append("elsewhere", points=[p.num for p in theirs], plan=path.name)
        log.info(
            f"{len(theirs)} points wait for {site} ({theirs[0].why}). "
            f"Carry {path} there and run: {plans.command(path.name)}"
        )


def _plan(group: Group, ledger: Ledger, folder: Path) -> None:
    """Complete the configuration of the group's points and write them down as planned."""
    sweep_id = ledger.sweep["sweep_id"]
    for point in group.points:
        point.run_id = new_run_id()
        config = point.config
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)
            config.hydra.sweep.subdir = point.subdir
            config.site = OmegaConf.structured(point.site)
            config.identity.run_id = point.run_id
            config.identity.sweep_id = sweep_id
            config.identity.point = point.num
            config.identity.attempt = point.attempt
    ledger.append(
        "planned",
        group=group.name,
        site=group.first.site.name,
        partition=group.first.request.partition,
        points=[[p.num, p.attempt, p.run_id] for p in group.points],
    )


def _job(point: Point, sending: Sending, job_id: str) -> PointJob:
    with read_write(point.config), open_dict(point.config):
        point.config.hydra.job.id = job_id
    return PointJob(
        hydra_context=sending.hydra_context,
        task_function=sending.task_function,
        config=point.config,
        singletons=Singleton.get_state(),
        raise_failure=True,
    )


def _submit_array(group: Group, ledger: Ledger, sending: Sending, code: Path) -> None:
    from .slurm import submit

    pairs = [[p.num, p.attempt] for p in group.points]
    calls = [_job(p, sending, f"{group.name}_{task}") for task, p in enumerate(group.points)]
    try:
        array = submit(
            group,
            calls,
            folder=_private(sending.folder / JOBS) / group.name,
            code=code,
            job_name=_job_name(group, ledger.sweep["sweep_id"]),
        )
    except UserError as error:
        ledger.append("refused", group=group.name, points=pairs, message=str(error))
        log.error(f"{error}. Its {len(pairs)} points are recorded; `rerun` sends them again.")
        return
    ledger.append("submitted", group=group.name, job_id=f"{array}_%a", points=pairs)
    log.info(f"{group.first.site.name}: array {array} with {len(pairs)} points in {group.first.request.partition}")


def _run_here(points: list[Point], ledger: Ledger, sending: Sending, code: Path) -> dict[int, JobReturn]:
    if not points:
        return {}
    calls = [LocalCall(call=_job(p, sending, f"{p.group}_{p.num}"), time_min=p.request.time_min) for p in points]
    begun: dict[int, float] = {}

    def started(index: int, job_id: str) -> None:
        point = points[index]
        begun[index] = time.monotonic()
        ledger.append("submitted", group=point.group, job_id=job_id, points=[[point.num, point.attempt]])
        log.info(f"[{index + 1}/{len(points)}] point {point.num} on {point.site.name}: {' '.join(point.overrides)}")

    def ended(index: int) -> None:
        result = calls[index].result
        how = "done" if isinstance(result, JobReturn) and result.status == JobStatus.COMPLETED else "FAILED"
        log.info(f"[{index + 1}/{len(points)}] {how} after {time.monotonic() - begun[index]:.1f} s")

    folder = _private(sending.folder / JOBS) / points[0].group
    run_all(calls, folder=folder, code=code, started=started, ended=ended)
    return {p.num: c.result for p, c in zip(points, calls, strict=True) if isinstance(c.result, JobReturn)}


def _wait(ledger: Ledger, nums: set[int]) -> None:
    pause = WAIT_S[0]
    seen: dict[int, PointState] = {}
    while True:
        standings = [s for s in look(ledger) if s.record.num in nums]
        for standing in standings:
            num, state = standing.record.num, standing.verdict.state
            if seen.get(num) != state:
                pause = WAIT_S[0]
                job = standing.record.last.job_id if standing.record.last else ""
                log.info(f"point {num} on {standing.record.site} ({job}): {state} {standing.verdict.message}".rstrip())
            seen[num] = state
        if not any(state in OPEN for state in seen.values()):
            break
        time.sleep(pause)
        pause = min(pause * 1.5, WAIT_S[1])
    console().print(show.standings_table(standings))
    failed = [s for s in standings if s.verdict.state is not PointState.COMPLETED]
    if failed:
        raise PointsFailedError(f"{len(failed)} of {len(standings)} points did not complete; `rerun` sends them again")


def _job_name(group: Group, sweep_id: str) -> str:
    """Unique on the cluster, so that no tool that selects by name takes one sweep for another."""
    return f"inpaint-{sweep_id}-{group.name}"


def new_sweep(sweep_id: str) -> dict[str, Any]:
    return {"sweep_id": sweep_id, "created_unix": round(time.time(), 3), "command": sys.argv}


def new_sweep_id() -> str:
    return f"s{time.strftime('%y%m%d', time.gmtime())}{secrets.token_hex(3)}"


def _private(folder: Path) -> Path:
    """Pickles are executed when they are loaded: nobody else may write here."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _sentinel(point: Point, where: str) -> JobReturn:
    result = JobReturn(overrides=point.overrides, cfg=point.config, status=JobStatus.COMPLETED)
    result.return_value = Submitted(point=point.num, where=where)
    return result
