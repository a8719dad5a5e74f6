"""`cancel`: stop what a sweep still has in queue or running, and write it down.

A command that is still submitting from the sweep is not stopped: what it sends is, when it has ended.
"""

from __future__ import annotations

from pathlib import Path

from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import UserError
from launchers.remote import client
from launchers.slurm import local_executor, query
from launchers.status.survey import cancellable, poll_sweep, sites_of
from launchers.sweep.ledger import Attempt, Ledger
from launchers.sweep.lock import BUSY, BusyError

PATIENCE_S = 60.0  # for a command that is still submitting


def run_cancel(sweep: Path) -> None:
    """Cancel every queued or running point of `sweep`. Raises UserError if a point could not be cancelled."""
    ledger = Ledger.open(sweep)
    busy = ledger.busy()  # before the look: what was submitted meanwhile is then seen
    told, complaints = _stop(ledger)
    if busy:
        print(f"Another command {BUSY}; its end is waited for, {PATIENCE_S:g} s at most.", flush=True)
        try:
            with ledger.locked(patience_s=PATIENCE_S):
                later, complaints = _stop(ledger, holding_lock=True)
                told = told or later
        except BusyError:
            complaints.append(f"another command {BUSY}, and has not ended: cancel again when it has")
    if complaints:
        raise UserError(sanitize("; ".join(complaints)))
    if not told:
        print("Nothing is queued or running.")


def _stop(ledger: Ledger, *, holding_lock: bool = False) -> tuple[bool, list[str]]:
    """Tell everything that is known and open to stop: whether there was anything, and what went wrong."""
    by_site: dict[str, list[Attempt]] = {}
    for standing in poll_sweep(ledger, holding_lock=holding_lock).points:
        if standing.is_open and standing.record.last:
            by_site.setdefault(standing.record.site, []).append(standing.record.last)
    sites = sites_of(ledger)
    complaints = []
    told = False
    for site, attempts in by_site.items():
        by_ssh = sites[site].connect.method == "ssh"
        if any(attempt.carried for attempt in attempts):
            complaints.append(f"{site}: its points were carried there; cancel them there")
            continue
        if sites[site].connect.method == "slurm":
            attempts, others = cancellable(sites[site], attempts)
            complaints += [f"{site}: {why}" for why in others]
            if not attempts:  # they ended since, or nobody can tell: that is a complaint
                continue
        told = True
        if by_ssh and (complaint := client.cancel(sites[site], ledger, attempts, timeout_s=PATIENCE_S)):
            complaints.append(complaint)  # what was not cancelled there is not called so here
            continue
        # written first: a job that dies of it is then known to have been cancelled, one that waits here never starts
        ledger.append("cancelled", points=[[a.point, a.attempt] for a in attempts])
        here = [a.job_id for a in attempts if not by_ssh and a.job_id and a.job_id.startswith("pid:")]
        there = [a.job_id for a in attempts if a.job_id and not a.job_id.startswith("pid:")]
        for job_id in here:
            if (pid := local_executor.process_of(job_id)) is not None:
                local_executor.stop(pid)
            else:
                complaints.append(f"{job_id} runs on another machine: cancel it there")
        if there and not by_ssh and (complaint := query.cancel(sites[site], there)):
            complaints.append(f"{site}: {complaint}")
        else:
            print(f"{site}: {pluralize(len(attempts), 'point')} told to stop")
    return told, complaints
