"""`cancel`: stop the queued and running jobs of a sweep, and record it.

A command that is still submitting from the sweep is not stopped; its jobs are cancelled when it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import echo, echo_json, output, pluralize
from inpaint_bench.core.errors import UserError
from launchers.remote import client
from launchers.slurm import local_executor
from launchers.status.survey import by_queue, cancel_in_slurm, poll_sweep, sites_of
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import BUSY, RERUN_REFUSES, BusyError, Ledger
from launchers.sweep.private_dirs import check_own

BUSY_TIMEOUT_S = 60.0  # for a command that is still submitting


def run_cancel(sweep: Path, *, as_json: bool) -> None:
    """Cancel what is queued or running. Raises UserError with the reasons if something could not be cancelled."""
    output.as_json = as_json
    ledger = Ledger.open(sweep)
    check_own(sweep, "only that user can cancel its jobs")
    locked = ledger.is_locked()  # before Slurm is queried, which then knows what was submitted in the meantime
    number, problems = _cancel_open_points(ledger)
    if locked:
        echo(f"Another command {BUSY}; waiting for it, {BUSY_TIMEOUT_S:g} s at most.", error=as_json)
        try:
            with ledger.lock(timeout_s=BUSY_TIMEOUT_S):
                # The other command has ended: what it submitted in the meantime is cancelled too.
                more, problems = _cancel_open_points(ledger)
                number += more
        except BusyError:
            problems.append(f"another command {BUSY}, and has not ended: cancel again when it has")
    notes: list[str] = []
    records = ledger.points(notes).values()
    if any(RERUN_REFUSES in note for note in notes):
        problems.append(
            f"{sweep}: its ledger lacks attempts, whose jobs were not looked for; `squeue --me` lists yours"
        )
    for plan, waiting in sorted(Counter(record.plan for record in records if record.plan).items()):
        # The plan may have been carried away and submitted there, which nothing here can know.
        echo(
            f"{sweep / plan}: its {pluralize(waiting, 'point')} were not submitted from here, so there is nothing to "
            "cancel here; delete the file to keep them from being submitted, and cancel where a copy of it was.",
            error=as_json,
        )
    if as_json:
        echo_json({"problems": problems})
    if problems:
        raise UserError("; ".join(problems))
    if not number:
        echo("Nothing is queued or running.", error=as_json)


def _cancel_open_points(ledger: Ledger) -> tuple[int, list[str]]:
    """Cancel every point that is known to be open. Returns how many, and why others were not cancelled."""
    attempts = [point.record.last for point in poll_sweep(ledger).points if point.is_open and point.record.last]
    total, problems = 0, []
    for name, (site, members) in by_queue(sites_of(ledger), attempts).items():
        number, messages = _cancel_at(site, ledger, members)
        problems += [f"{name}: {message.removeprefix(f'{site.name}: ')}" for message in messages]
        total += number
        if number:
            echo(f"{name}: {pluralize(number, 'point')} cancelled", error=output.as_json)
    return total, problems


def _cancel_at(site: SiteConfig, ledger: Ledger, attempts: Sequence[Attempt]) -> tuple[int, list[str]]:
    if site.connection.submits_here:
        return cancel_in_slurm(site, ledger, attempts)
    if site.connection.over_ssh and (problem := client.cancel(site, ledger, timeout_s=BUSY_TIMEOUT_S)):
        return 0, [problem]
    if not site.connection.is_polled and site.connection.has_slurm:
        return 0, ["its points were submitted there from a plan file; cancel them there"]
    # Recorded before processes are stopped: a point that waits for its turn on this machine then never starts.
    ledger.append(Cancelled(attempts=[attempt.key for attempt in attempts]))
    problems = []
    for job_id in (attempt.job_id for attempt in attempts if attempt.job_id and attempt.job_id.startswith("pid:")):
        if (pid := local_executor.process_id(job_id)) is not None:
            local_executor.stop(pid)
        else:
            problems.append(f"{job_id} runs on another machine: cancel it there")
    return len(attempts) - len(problems), problems
