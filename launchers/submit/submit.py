"""From placed points, or those of a plan, to submitted jobs: check, record, submit, and wait if requested.

A plan was carried to this machine by a person, or sent over ssh by another machine.

The order of the steps makes a sweep crash safe. A point is in the ledger as planned before sbatch is called, and every
refusal is recorded, so `rerun` can continue from any interruption. All of it happens under the sweep's lock.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
from omegaconf import DictConfig

from inpaint_bench.core.composed_file import find_secret, holds_secret
from inpaint_bench.core.config import doubts
from inpaint_bench.core.config.site import CONNECTIONS
from inpaint_bench.core.config.user_file import user_overrides
from inpaint_bench.core.console import console, echo_json, output, pluralize, share, shell_command
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.files import check_can_be_made
from inpaint_bench.core.schema import CODE, SWEEP, PointState
from inpaint_bench.run.manifest import new_run_id
from launchers.points.blocks import assign_blocks
from launchers.points.compose import Composer, composer
from launchers.points.point import Group, Point, SubmitOutcome, by_site, group_points
from launchers.remote import client, plan_file
from launchers.remote.plan_file import Plan, PlannedPoint
from launchers.slurm.environment import shell_conf
from launchers.slurm.local_executor import run_points
from launchers.slurm.sbatch import submit_groups
from launchers.status import tables
from launchers.status.cost import check_budget, cost_lines
from launchers.status.survey import PointStatus, poll_sweep
from launchers.status.waiting import wait
from launchers.sweep import private_dirs, snapshot
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Deferred, Planned
from launchers.sweep.ledger import Ledger, job_name
from launchers.sweep.sweep_record import SweepRecord, check_path, check_unused, save_multirun

from .checks import check_packages, check_points, check_queue, missing_accounts, preview
from .estimates import Estimate, estimate, leave_out, limit_problems

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Submission:
    """One command that submits points into a sweep directory."""

    folder: Path
    wait_for_jobs: bool = False
    preview_only: bool = False
    enforce_budget: bool = True
    new_sweep: SweepRecord | None = None  # None: the sweep exists
    multirun: DictConfig | None = None  # Hydra's own record, written with that of a sweep whose id is new
    waited: bool = field(default=False, init=False)  # set by `run`: it returned after all jobs had ended

    def run(self, choose_points: Callable[[Ledger], list[Point]]) -> list[Point]:
        """Submit the points that `choose_points` returns, and return them.

        It is called under the lock, so what it has seen still holds.

        Raises UserError if nothing was submitted, and PointsFailedError if points were refused or, after
        waiting, did not complete.
        """
        check_path(self.folder)
        ledger = Ledger(self.folder)
        if self.preview_only:
            if self.new_sweep:
                check_unused(self.folder)
            else:
                ledger.check_complete()
            return self._preview(choose_points(ledger), ledger)
        check_can_be_made(self.folder)
        log.info(f"sweep directory: {self.folder}")
        with ledger.lock():
            # Under the lock: if two launches use one folder, the second must find what the first has written.
            if self.new_sweep:
                check_unused(self.folder)
            else:
                ledger.check_complete()
            points = self._checked(choose_points(ledger), ledger)[0]
            if not points:
                return []
            for message in missing_accounts([point for point in points if point.reachable]):
                raise UserError(message)
            self._protect(points, ledger)
            # Before the record: points of a site that does not answer become unreachable and get a plan file.
            client.connect(points)
            if self.multirun is None:  # else no job can have the id yet
                check_queue(points, ledger, self._sweep(ledger).sweep_id)
            # From here on the sweep exists: `rerun` submits whatever this command does not get to.
            self._record_sweep(points, ledger)
            _defer_unreachable(points, ledger)
            # Numbers of groups continue those of earlier commands, because a group names folder and job.
            groups = group_points([p for p in points if p.reachable], first_number=_next_group_number(ledger))
            console().print(*tables.plan_tables(points))
            for line in cost_lines(points):
                log.info(line)
            outcomes = self._submit(groups, ledger)
        # The lock is free again: waiting for queued jobs may take days.
        self._conclude(points, groups, outcomes, ledger)
        return points

    def _submit(self, groups: Sequence[Group], ledger: Ledger) -> list[SubmitOutcome]:
        """Submit the groups to their sites. Returns an outcome per way to reach them."""
        code = snapshot.take(self.folder / CODE)
        # All groups are planned before the first is submitted: a kill leaves no job that the ledger cannot name.
        for group in groups:
            _record_planned(group, ledger, code)
        outcomes = [submit_groups(_reached_by(groups, "slurm"), ledger, code)]
        for site, members in by_site(_reached_by(groups, "ssh")).items():
            # points that waited for the connection must not be carried there as well
            nums = {point.num for group in members for point in group.points}
            plan_file.remove_points(ledger.folder, site, nums)
            outcomes.append(client.submit(members, ledger, code))
        # Points on this machine come last: they run now, and the queued ones wait meanwhile.
        run_points(_reached_by(groups, "local"), ledger, code)
        return outcomes

    def _conclude(
        self, points: Sequence[Point], groups: Sequence[Group], outcomes: Sequence[SubmitOutcome], ledger: Ledger
    ) -> None:
        """Report what was submitted, wait if requested, and raise PointsFailedError for points not accepted."""
        if deferred := sum(not point.reachable for point in points):
            submitted = f"{share(len(points) - deferred, len(points), 'point')} submitted"
            log.info(f"{submitted}, {deferred} in plan files in {self.folder}")
            for message in missing_accounts([point for point in points if not point.reachable]):
                log.info(f"{message}; it can also stand in the site's file there")
        # Local points have ended by now: waiting for them costs nothing and prints their table.
        all_local = all(not group.site.connection.has_slurm for group in groups)
        if groups and (self.wait_for_jobs or all_local):
            self.waited = True
            wait(ledger, {point.num for group in groups for point in group.points})
        elif groups:
            log.info(f"To see their state: {shell_command('status', self.folder)}")
        if not_accepted := sum(outcome.not_accepted for outcome in outcomes):
            unanswered = ", or no answer came" if any(outcome.unanswered for outcome in outcomes) else ""
            total = pluralize(len(points), "point")
            raise PointsFailedError(f"{not_accepted} of {total} not accepted{unanswered}; `status` shows why")

    def _preview(self, points: list[Point], ledger: Ledger) -> list[Point]:
        points, estimates, left_out = self._checked(points, ledger)
        if points or output.as_json:
            number = 0 if self.new_sweep else _next_group_number(ledger)
            preview(points, self.folder, self._sweep(ledger).sweep_id, number, estimates, left_out)
        return points

    def _sweep(self, ledger: Ledger) -> SweepRecord:
        """Return the record of the sweep, also of one that is not written yet."""
        return self.new_sweep or ledger.sweep

    def _checked(self, points: list[Point], ledger: Ledger) -> tuple[list[Point], dict[int, Estimate], list[str]]:
        """Return the points that fit their cards, what each will likely need, and what was left out.

        Raises UserError for what must not be submitted.
        """
        if not points:
            return [], {}, []
        if not self.preview_only and any(point.bench.dry_run for point in points):
            raise UserError("dry_run: points of a dry run are not submitted; use --dry-run to see them")
        estimates, total = estimate(points), len(points)
        points, left_out = leave_out(points, estimates)
        for sentence in left_out:
            log.warning(f"left out: {sentence}")
        if left_out:
            count = f"{total - len(points)} of {pluralize(total, 'point')}"
            log.warning(f"{count} left out; memory_check=false submits them all the same")
        for sentence in limit_problems(points, estimates):
            log.warning(sentence)
        for point in points:
            if point.likely_min is None:  # else earlier runs of the point tell it
                point.likely_min = estimates[point.num].shown[1]
        assign_blocks(points, repeated=self._sweep(ledger).order is not None)
        check_points(points, self.folder, self._sweep(ledger).launch_context, is_new=self.new_sweep is not None)
        if not self.preview_only:
            check_packages(points)
        if self.enforce_budget:  # else the machine that launched has done both
            for warning in doubts.warnings((point.num, point.bench, point.site) for point in points):
                log.warning(warning)
            check_budget(points, points[0].bench.budget, None if self.new_sweep else ledger)
        return points, estimates, left_out

    def _protect(self, points: Sequence[Point], ledger: Ledger) -> None:
        """Raise UserError for a secret that others could read, or that would be written to the file of a point."""
        sweep = self._sweep(ledger)
        lines = [*sweep.overrides, *sweep.launch_context.hydra_overrides]
        for point in points:
            lines += point.overrides
        for line in lines:
            if "environment" not in line and not holds_secret(line) and (key := find_secret([line])):
                remedy = f"{line.partition('=')[0]}='${{oc.env:NAME}}'"
                raise UserError(f"{key} looks like a secret: name a variable that the job has, such as {remedy}")
        for site in {id(point.site): point.site for point in points}.values():
            lines += [f"{key}={value}" for key, value in site.environment.variables.items()]
            lines += site.environment.setup
        if key := find_secret(lines):
            private_dirs.check(self.folder.resolve(), 0o077)
            log.info(f"{key} looks like a secret: only you can read {self.folder}")

    def _record_sweep(self, points: Sequence[Point], ledger: Ledger) -> None:
        """Write `sweep.json` with every point, and Hydra's own record of a new sweep."""
        if self.multirun is not None:  # only now: the folder is locked and holds no other sweep
            save_multirun(self.multirun, self.folder)
        sweep = self._sweep(ledger)
        # Recorded points stay as they were launched: what a rerun changes is in its `planned` events.
        recorded = {point.point for point in sweep.points}
        sweep.points += [point.requested() for point in points if point.num not in recorded]
        sweep.sites |= {point.site.name: asdict(point.site) for point in points}
        sweep.write(self.folder)


def _reached_by(groups: Sequence[Group], method: str) -> list[Group]:
    return [group for group in groups if group.site.connection == CONNECTIONS[method]]


def _next_group_number(ledger: Ledger) -> int:
    numbers = (event.group.partition("-")[0] for event in ledger.events(Planned))
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _defer_unreachable(points: Sequence[Point], ledger: Ledger) -> None:
    """Write plan files with the points of sites that this machine cannot submit to."""
    for site, members in by_site(point for point in points if not point.reachable).items():
        path = plan_file.add_points(ledger.folder, site, ledger.sweep, members)
        ledger.append(Deferred(points=[point.num for point in members], plan=path.name))
        if members[0].site.connection.over_ssh:
            advice = f"They wait in {path}; once it answers: {shell_command('rerun', ledger.folder)}"
        else:
            advice = plan_file.advice(path, site)
        reason = members[0].reachability.reason
        log.info(f"{pluralize(len(members), 'point')} for {site}, which cannot be reached ({reason}). {advice}")


def _record_planned(group: Group, ledger: Ledger, code: Path) -> None:
    """Complete the configurations of the group's points, and write that they are about to be submitted."""
    sweep_id = ledger.sweep.sweep_id
    planned = []
    for task, point in ((task, point) for task, members in enumerate(group.tasks) for point in members):
        # At a site over ssh, the machine that launched has chosen the id.
        point.run_id = point.run_id or new_run_id()
        point.composed = point.composed.with_edits(
            {
                "hydra.sweep.dir": str(ledger.folder),
                "hydra.sweep.subdir": point.subdir,
                "site": point.site,
                "identity.run_id": point.run_id,
                "identity.sweep_id": sweep_id,
                "identity.point": point.num,
                "identity.attempt": point.attempt,
                "identity.code": str(code),
            }
        )
        block = task if group.in_blocks else None
        planned.append(
            msgspec.structs.replace(point.requested(), attempt=point.attempt, run_id=point.run_id, block=block)
        )
    ledger.append(
        Planned(
            group=group.name,
            job_name=job_name(group.name, sweep_id),
            site=group.site.name,
            partition=group.request.partition,
            slurm_conf=shell_conf(group.site),
            attempts=planned,
        )
    )


# --- plans ---------------------------------------------------------------------------------------


def run_plan(path: Path, *, config_dir: Path | None, dry_run: bool, wait: bool) -> None:
    """Submit the points of a plan file from this machine, under their own numbers.

    Their folder is named after the plan's sweep, so that the same plan is not submitted twice by mistake. `config_dir`
    replaces the --config-dir of the launch, which is a path of the machine that launched. Raises UserError.
    """
    plan, sweep = _read_plan(path, config_dir)
    with composer(sweep.launch_context) as compose:
        own = user_overrides(plan.points[0].overrides)
        points = [_compose_planned(plan, planned, compose, first=own) for planned in plan.points]
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
    (plan, sweep), ledger = _read_plan(path, config_dir), Ledger(folder.absolute())
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
                points.append(point := _compose_planned(plan, planned, compose, last=here))
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


def _read_plan(path: Path, config_dir: Path | None) -> tuple[Plan, SweepRecord]:
    """Return a plan and the record of its sweep, with folders of this machine."""
    plan = plan_file.read(path)
    context = msgspec.structs.replace(plan.launch_context, working_dir=str(Path.cwd()))
    if config_dir is not None:
        context = msgspec.structs.replace(context, config_dirs=(str(config_dir.absolute()),))
    return plan, SweepRecord(sweep_id=plan.sweep_id, order=plan.order, launch_context=context)


def _compose_planned(
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
