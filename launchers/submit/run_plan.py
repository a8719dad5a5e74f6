"""Submit the points of a plan, which a person carried to this machine or which another machine sends over ssh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from inpaint_bench.core.config.user_file import user_overrides
from inpaint_bench.core.console import echo_json, output
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import SWEEP, PointState
from launchers.points.compose import Composer, composer
from launchers.points.point import Point
from launchers.remote import plan_file
from launchers.remote.plan_file import Plan, PlannedPoint
from launchers.status.survey import PointStatus, poll_sweep
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import SweepRecord

from .submit import Submission


def run_plan(path: Path, *, config_dir: Path | None, dry_run: bool, wait: bool) -> None:
    """Submit the points of a plan file from this machine, under their own numbers.

    Their folder is named after the plan's sweep, so that the same plan is not submitted twice by mistake. `config_dir`
    replaces the --config-dir of the launch, which is a path of the machine that launched. Raises UserError.
    """
    plan, sweep = _read(path, config_dir)
    with composer(sweep.launch_context) as compose:
        own = user_overrides(plan.points[0].overrides)
        points = [_compose(plan, planned, compose, first=own) for planned in plan.points]
        # A plan file is meant for a machine of its site; elsewhere only a dry run makes sense.
        unreachable = [point for point in points if not point.reachable]
        if unreachable and not dry_run:
            raise UserError(f"{path}: {plan.site} cannot be reached from here ({unreachable[0].reachability.reason})")
        folder = Path(points[0].bench.out, f"{plan.sweep_id}-{plan.site}").absolute()
        if (folder / SWEEP).exists() and not dry_run:
            raise UserError(f"{path} was submitted already, into {folder}; `status` and `rerun` take that folder")
        submission = Submission(folder=folder, wait_for_jobs=wait, preview_only=dry_run, new_sweep=sweep)
        submission.run(lambda _: points)


def run_sent_plan(path: Path, folder: Path, *, config_dir: Path | None) -> None:
    """Submit those points of a plan that a sweep directory does not have yet, with the plan's run ids and attempts.

    The plan may arrive late or twice: a point is not submitted again if its attempt is recorded, or while an earlier
    attempt is open or complete. With --json the outcome of each point is printed. Raises UserError if none was
    submitted, PointsFailedError if some were refused.
    """
    (plan, sweep), ledger = _read(path, config_dir), Ledger(folder.absolute())
    # This is a machine of the site by definition, whatever its host name.
    here = [f"sites.{plan.site}.connect.hostnames=['.*']"]
    is_new = not (ledger.folder / SWEEP).is_file()
    refused: list[Attempt] = []
    failed: PointsFailedError | None = None
    with composer(sweep.launch_context) as compose:

        def choose(ledger: Ledger) -> list[Point]:
            """Compose the points that are to be submitted, under the sweep's lock."""
            statuses = {} if is_new else {status.record.num: status for status in poll_sweep(ledger).points}
            points = []
            for planned in plan.points:
                if reason := _submitted_before(planned, statuses.get(planned.num)):
                    run_id = planned.run_id or ""
                    refused.append(Attempt(point=planned.num, site=plan.site, run_id=run_id, refused=reason))
                    continue
                points.append(point := _compose(plan, planned, compose, last=here))
                if not point.reachable:
                    raise UserError(f"{plan.site} cannot be reached from there ({point.reachability.reason})")
            return points

        # The machine that launched has checked the budget of the whole sweep, of which this is a part.
        submission = Submission(folder=ledger.folder, enforce_budget=False, new_sweep=sweep if is_new else None)
        try:
            submission.run(choose)
        except PointsFailedError as error:
            failed = error  # the ledger has the reason for each of them
        except Exception as error:
            # Exit code 2 without a reply means that the whole plan was refused. That is not true any more.
            if _is_planned(plan, ledger):
                raise PointsFailedError(f"{type(error).__name__}: {error}") from error
            raise
    if output.as_json:
        # Attempts of an earlier request for the same points count too: its reply may have been lost.
        recorded = [attempt.reported() for record in ledger.points().values() for attempt in record.attempts]
        outcomes = {attempt.run_id: attempt for attempt in [*refused, *recorded] if attempt.job_id or attempt.refused}
        run_ids = {planned.run_id for planned in plan.points}
        echo_json({"attempts": msgspec.to_builtins([outcomes[run_id] for run_id in outcomes if run_id in run_ids])})
    if failed:
        raise failed


def _is_planned(plan: Plan, ledger: Ledger) -> bool:
    """Return whether sbatch may have been called for a point of the plan."""
    records = ledger.points() if (ledger.folder / SWEEP).exists() else {}
    lasts = ((planned, records[planned.num].last) for planned in plan.points if planned.num in records)
    return any(last is not None and last.attempt >= planned.attempt for planned, last in lasts)


def _read(path: Path, config_dir: Path | None) -> tuple[Plan, SweepRecord]:
    """Return a plan and the record of its sweep, with folders of this machine."""
    plan = plan_file.read(path)
    context = msgspec.structs.replace(plan.launch_context, working_dir=str(Path.cwd()))
    if config_dir is not None:
        context = msgspec.structs.replace(context, config_dirs=(str(config_dir.absolute()),))
    return plan, SweepRecord(sweep_id=plan.sweep_id, order=plan.order, launch_context=context)


def _compose(
    plan: Plan, planned: PlannedPoint, compose: Composer, *, first: Sequence[str] = (), last: Sequence[str] = ()
) -> Point:
    # The site of the plan replaces the launch's choice, such as site=auto.
    overrides = [override for override in planned.overrides if not override.startswith("site=")]
    point = compose(planned.num, [*first, *overrides, f"site={plan.site}", *last])
    point.attempt, point.run_id = planned.attempt, planned.run_id or ""
    return point


def _submitted_before(planned: PlannedPoint, status: PointStatus | None) -> str | None:
    """Return why a point must not be submitted again, if so."""
    if status is None or status.record.last is None:
        return None
    last = status.record.last.attempt
    if last >= planned.attempt:
        return f"attempt {last} was submitted before"
    is_complete = status.state is PointState.COMPLETED
    return f"attempt {last} is {status.state} at the site" if status.is_open or is_complete else None
