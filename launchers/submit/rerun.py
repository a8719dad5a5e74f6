"""Submit points a second time: what a sweep still lacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import console, pluralize, sanitize
from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.schema import PointState, Reason
from launchers.points.compose import Composer, composer
from launchers.points.point import Point
from launchers.remote import plan_file
from launchers.status.survey import PointStatus, poll_sweep, sites_of
from launchers.sweep.ledger import Ledger
from launchers.sweep.private_dirs import check_own
from launchers.sweep.sweep_record import FORMAT_VERSION

from .rerun_policy import check_changes, decide, decisions_table, merge_overrides
from .submit import Submission

log = logging.getLogger(__name__)

# Slurm may carry out a request whose sender is gone or has timed out (MessageTimeout: 10 s by default). An sbatch that
# outlived the command that was killed holds the sweep's lock.
CONFIRM_S = 60.0


def rerun(
    folder: Path,
    *,
    only: frozenset[Reason] | None,
    changes: Sequence[str] = (),
    dry_run: bool,
    wait: bool,
) -> None:
    """Submit what failed or was never submitted, each point as a new attempt.

    The policies (`rerun.<reason>`) decide which points, and with what changes; `only` names reasons instead. Points are
    composed from the configuration files as they are now, so a corrected site file takes effect, with the overrides of
    the launch and `changes`. Points in a plan file are left to the machine that runs it. Raises PointsFailedError for
    points whose state is unknown, which are left alone, UserError, and what `Submission.run` raises.
    """
    unknown: list[PointStatus] = []

    def choose_points(ledger: Ledger, compose: Composer) -> list[Point]:
        sites = sites_of(ledger)
        points = _poll(ledger, sites)
        # In place: the list is read after the points were submitted.
        unknown[:] = [point for point in points if point.state is PointState.UNKNOWN]
        # A plan file is carried to its site; those for a site over ssh are tried again instead.
        plans = {p.record.num: p.record.plan for p in points if not sites[p.record.site].connection.over_ssh}
        if only is None or Reason.NEVER_STARTED in only:
            for plan in sorted({plan for plan in plans.values() if plan}):
                log.info(f"{plan} is left alone: its points run elsewhere ({plan_file.launch_command(plan)})")
        decisions = decide([p for p in points if not plans.get(p.record.num)], compose, only=only, changes=changes)
        if changes and not decisions:  # so that a wrong override is reported although nothing is submitted
            compose(0, merge_overrides(ledger.sweep.points[0].overrides or [], changes))
        if decisions:
            console().print(decisions_table(decisions))
        return [decision.point for decision in decisions if decision.point is not None]

    check_changes(changes)
    advice = "launch your own to submit its points"
    submitted = submit_again(folder, choose_points, advice=advice, dry_run=dry_run, wait=wait)[0]
    if unknown:
        messages = "; ".join(dict.fromkeys(point.message for point in unknown))
        prefix = "" if submitted else "nothing was submitted: "
        count = f"the state of {pluralize(len(unknown), 'point')} is unknown"
        raise PointsFailedError(sanitize(f"{prefix}{count} ({messages}); rerun once it is known"))
    if not submitted:
        log.info("Nothing to submit.")


def submit_again(
    folder: Path,
    choose_points: Callable[[Ledger, Composer], list[Point]],
    *,
    advice: str,
    dry_run: bool,
    wait: bool,
) -> tuple[bool, bool]:
    """Submit what `choose_points` returns for an existing sweep, composed as at its launch.

    Returns whether there were points, and whether they were waited for. `choose_points` is called under the sweep's
    lock, except in a dry run: what it has seen still holds when points are submitted.
    `advice` is for the sweep of another user. Raises UserError, and what `Submission.run` raises.
    """
    ledger = Ledger.open(folder.absolute())
    check_own(ledger.folder, advice)
    if ledger.sweep.format_version < FORMAT_VERSION:
        raise UserError(
            f"{folder}: was launched by an earlier version; finish this sweep with the version that launched it"
        )
    with composer(ledger.sweep.launch_context) as compose:
        submission = Submission(
            folder=ledger.folder,
            wait_for_jobs=wait,
            preview_only=dry_run,
        )
        points = submission.run(lambda ledger: choose_points(ledger, compose))
    return bool(points), submission.waited


def _poll(ledger: Ledger, sites: Mapping[str, SiteConfig]) -> list[PointStatus]:
    """Return the status of every point. With the lock held, all that was submitted is in it."""
    points = poll_sweep(ledger).points
    last = [point.record.last for point in points if point.record.last]
    # Their sbatch call has no recorded end, and Slurm does not list the array.
    if not ledger.holds_lock or not any(a.is_unconfirmed and sites[a.site].connection.submits_here for a in last):
        return points
    wait_s = min(CONFIRM_S, CONFIRM_S - ledger.age_s())
    if wait_s <= 0:
        return points
    log.info(f"Waits {wait_s:.0f} s: Slurm may not list yet what an interrupted command submitted.")
    time.sleep(wait_s)
    return poll_sweep(ledger).points
