"""`cancel`: stop the queued and running jobs of a sweep, and record it.

A command that is still submitting from the sweep is not stopped; what it submits is cancelled when it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import SiteConfig
from launchers.remote import client
from launchers.slurm import local_executor, query
from launchers.status.survey import cancellable, poll_sweep, sites_of
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import Attempt, Ledger
from launchers.sweep.lock import BUSY, BusyError

BUSY_TIMEOUT_S = 60.0  # for a command that is still submitting


def run_cancel(sweep: Path) -> None:
    """Cancel what is queued or running. Raises UserError where something could not be cancelled."""
    ledger = Ledger.open(sweep)
    locked = ledger.is_locked()  # before Slurm is asked, which then knows what was submitted meanwhile
    cancelled, problems = _cancel_open_points(ledger)
    if locked:
        print(f"Another command {BUSY}; waiting for it, {BUSY_TIMEOUT_S:g} s at most.", flush=True)
        try:
            with ledger.lock(timeout_s=BUSY_TIMEOUT_S):
                more, problems = _cancel_open_points(ledger, holding_lock=True)
                cancelled = cancelled or more
        except BusyError:
            problems.append(f"another command {BUSY}, and has not ended: cancel again when it has")
    if problems:
        raise UserError(sanitize("; ".join(problems)))
    if not cancelled:
        print("Nothing is queued or running.")


def _cancel_open_points(ledger: Ledger, *, holding_lock: bool = False) -> tuple[bool, list[str]]:
    """Cancel every point that is known to be open. Returns whether there was any, and what went wrong."""
    by_site: dict[str, list[Attempt]] = {}
    for point in poll_sweep(ledger, holding_lock=holding_lock).points:
        if point.is_open and point.record.last:
            by_site.setdefault(point.record.site, []).append(point.record.last)
    sites = sites_of(ledger)
    problems: list[str] = []
    cancelled = False
    for name, attempts in by_site.items():
        site = sites[name]
        if any(attempt.carried for attempt in attempts):
            problems.append(f"{name}: its points were carried there; cancel them there")
            continue
        if site.connect.method == "slurm":
            attempts, others = cancellable(site, attempts)
            problems += [f"{name}: {problem}" for problem in others]
            if not attempts:
                continue
        cancelled = True
        cancel_at_site = _cancel_over_ssh if site.connect.method == "ssh" else _cancel_here
        if problem := cancel_at_site(site, ledger, attempts):
            problems.append(problem)
        else:
            print(f"{name}: {pluralize(len(attempts), 'point')} cancelled")
    return cancelled, problems


def _cancel_over_ssh(site: SiteConfig, ledger: Ledger, attempts: Sequence[Attempt]) -> str | None:
    """Cancel at the site. Returns what went wrong; then nothing is recorded as cancelled here."""
    problem = client.cancel(site, ledger, attempts, timeout_s=BUSY_TIMEOUT_S)
    if problem is None:
        ledger.append(Cancelled(attempts=[(a.point, a.attempt) for a in attempts]))
    return problem


def _cancel_here(site: SiteConfig, ledger: Ledger, attempts: Sequence[Attempt]) -> str | None:
    """Cancel in the site's Slurm or on this machine. Returns what went wrong."""
    # recorded first: a job that ends is then known to have been cancelled, and a waiting local one never starts
    ledger.append(Cancelled(attempts=[(a.point, a.attempt) for a in attempts]))
    problems = []
    slurm_jobs = []
    for job_id in (attempt.job_id for attempt in attempts if attempt.job_id):
        if not job_id.startswith("pid:"):
            slurm_jobs.append(job_id)
        elif (pid := local_executor.process_id(job_id)) is not None:
            local_executor.stop(pid)
        else:
            problems.append(f"{job_id} runs on another machine: cancel it there")
    if slurm_jobs and (message := query.cancel_jobs(site, slurm_jobs)):
        problems.append(f"{site.name}: {message}")
    return "; ".join(problems) or None
