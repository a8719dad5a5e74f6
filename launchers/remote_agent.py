"""The agent at a site that is reached over ssh: `python -m launchers.remote_agent VERB ROOT`.

Runs from the code that was sent to the site. Reads a request (JSON) from standard input and writes one reply to
standard output; all other output goes to standard error. Reads and writes only the sweep directory ROOT.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from inpaint_bench.core.errors import PointsFailedError, UserError
from inpaint_bench.core.records import decode_record
from inpaint_bench.core.schema import SWEEP, PointState
from launchers.remote.client import MARKER, CancelRequest, SweepReply
from launchers.remote.plan_file import Plan
from launchers.remote.sync import list_results, reported
from launchers.slurm.query import SlurmReply
from launchers.status.survey import by_queue, cancel_in_slurm, poll_sweep, sites_of
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import Ledger
from launchers.sweep.sweep_record import SweepRecord

if TYPE_CHECKING:
    from launchers.points.point import Point


def submit(folder: Path, plan: Plan) -> list[Attempt]:
    """Submit those points of a plan that this sweep directory does not have yet, and return the outcome of each.

    A request may arrive late or twice: a point is not submitted again if its attempt is recorded, or while an earlier
    attempt is open or complete. Raises UserError if no point was submitted.
    """
    from launchers.points.compose import composer  # Hydra, which the other verbs do not need
    from launchers.submit.submit import Submission

    # The working directory of the launch is a path of another machine.
    context = msgspec.structs.replace(plan.launch_context, working_dir=str(Path.cwd()))
    new_sweep = SweepRecord(sweep_id=plan.sweep_id, order=plan.order, launch_context=context)
    is_new = not (folder / SWEEP).is_file()
    outcomes: dict[str, Attempt] = {}  # by run id
    with composer(context) as compose:

        def choose(ledger: Ledger) -> list[Point]:
            """Compose the points that are to be submitted, under the sweep's lock."""
            statuses = {} if is_new else {p.record.num: p for p in poll_sweep(ledger).points}
            points = []
            for requested in plan.points:
                status, run_id, reason = statuses.get(requested.num), requested.run_id or "", None
                last = status.record.last.attempt if status and status.record.last else 0
                if last >= requested.attempt:
                    reason = f"attempt {last} was submitted before"
                elif status and (status.is_open or status.state is PointState.COMPLETED):
                    reason = f"attempt {last} is {status.state} at the site"
                if reason:
                    outcomes[run_id] = Attempt(point=requested.num, site=plan.site, run_id=run_id, refused=reason)
                else:
                    # This is a machine of the site by definition, whatever its host name.
                    site = [f"site={plan.site}", f"sites.{plan.site}.connect.hostnames=['.*']"]
                    # The site of the plan replaces the launch's choice, such as site=auto.
                    overrides = [override for override in requested.overrides if not override.startswith("site=")]
                    point = compose(requested.num, [*overrides, *site])
                    if not point.reachable:
                        raise UserError(f"{plan.site} cannot be reached from there ({point.reachability.reason})")
                    point.attempt, point.run_id = requested.attempt, run_id
                    points.append(point)
            return points

        submission = Submission(
            folder=folder,
            # The machine that launched has checked the budget of the whole sweep, of which this is a part.
            enforce_budget=False,
            new_sweep=new_sweep if is_new else None,
        )
        with suppress(PointsFailedError):  # the ledger has the reason for each of them
            submission.run(choose)
    # Attempts of an earlier request for the same points count too: its reply may have been lost.
    run_ids = {point.run_id for point in plan.points}
    for attempt in (attempt for record in Ledger(folder).points().values() for attempt in record.attempts):
        if attempt.run_id in run_ids and (attempt.job_id or attempt.refused):
            outcomes[attempt.run_id] = reported(attempt)
    return list(outcomes.values())


def query(folder: Path, with_files: bool | None) -> SweepReply:
    """Return the sources of every attempt's state, or its files; the requesting machine resolves the state."""
    ledger = Ledger(folder)
    submitting = ledger.is_locked()  # before the poll, which then sees all that was submitted by then
    if not (folder / SWEEP).is_file():
        return SweepReply(sweep_id=None, submitting=submitting)
    status = poll_sweep(ledger)
    # All attempts of this folder are at this site. One of its clusters that did not answer counts for all.
    slurm = min(status.replies.values(), key=lambda reply: reply.complete, default=SlurmReply())
    reply = SweepReply(sweep_id=ledger.sweep.sweep_id, submitting=submitting)
    reply.squeue, reply.sacct = slurm.squeue, slurm.sacct
    if with_files:
        records = [point.record for point in status.points]
        list_results(folder, records, {p.record.num for p in status.points if p.is_open}, reply)
    else:
        attempts = [attempt for point in status.points for attempt in point.attempts]
        reply.attempts = [reported(a.attempt, scheduler=a.scheduler, artifacts=a.artifacts) for a in attempts]
    return reply


def cancel(folder: Path, request: CancelRequest) -> list[str]:
    """Cancel attempts and return errors. First waits for a command here that is still submitting, so as to get all."""
    ledger = Ledger.open(folder)
    with ledger.lock(timeout_s=request.timeout_s):
        points = [point for point in poll_sweep(ledger).points if point.is_open]
        attempts = [status.attempt for point in points for status in point.attempts]
        attempts = [attempt for attempt in attempts if attempt.key in request.attempts]
        queues = by_queue(sites_of(ledger), attempts).values()
        return [error for site, members in queues for error in cancel_in_slurm(site, ledger, members)[1]]


VERBS: dict[str, tuple[Any, Any]] = {
    "submit": (submit, Plan),
    "query": (query, bool | None),
    "cancel": (cancel, CancelRequest),
}


def handle(verb: str, folder: Path, request: bytes, out: BinaryIO) -> None:
    """Handle one request; `out` gets the reply after a line that begins with the marker."""
    function, request_type = VERBS[verb]
    reply: dict[str, Any]
    try:
        reply = {"result": function(folder, decode_record(request, request_type))}
    except UserError as error:
        reply = {"error": str(error)}
    except Exception as error:
        # A bug gets no reply, and its traceback is on standard error.
        if type(error).__module__.split(".")[0] not in ("hydra", "omegaconf"):
            raise
        from inpaint_bench.core.hydra_support import explain

        reply = {"error": explain(error)}
    # A login shell may have left a line open.
    out.write(b"\n" + MARKER + msgspec.json.encode(reply) + b"\n")


def main(argv: list[str]) -> None:
    """Handle one request."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # tables and log lines are not part of the reply
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        handle(argv[0], Path(argv[1]), sys.stdin.buffer.read(), out)


if __name__ == "__main__":
    main(sys.argv[1:])
