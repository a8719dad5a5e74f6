"""`cancel`: stop what a sweep still has in queue or running, and write it down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launchers.away import remote
from launchers.jobs import local, scheduler
from launchers.record.ledger import Attempt, Ledger
from launchers.standing.watch import look, nameable, sites_of

from .command import parser, run
from .errors import UserError
from .terminal import count


def main(argv: Sequence[str] | None = None) -> int:
    does = "Cancel every queued or running point of a sweep; what it measured until then is kept."
    options = parser("cancel", does, "runs/2026-11-21/08-30-00-inpaint")
    options.add_argument("sweep", type=Path, help="the folder that `launch -m` printed")
    return run(options, _cancel, argv)


def _cancel(options: argparse.Namespace) -> None:
    ledger = Ledger.open(options.sweep)
    by_site: dict[str, list[Attempt]] = {}
    for standing in look(ledger):
        if standing.open and standing.record.last:
            by_site.setdefault(standing.record.site, []).append(standing.record.last)
    sites = sites_of(ledger)
    complaints = []
    for site, attempts in by_site.items():
        by_ssh = sites[site].reach.method == "ssh"
        if any(attempt.carried for attempt in attempts):
            complaints.append(f"{site}: its points were carried there; cancel them there")
            continue
        if sites[site].reach.method == "slurm":
            attempts, unknown = nameable(attempts)
            complaints += [f"{site}: {unknown}"] if unknown else []
            if not attempts:
                continue
        if by_ssh and (complaint := remote.cancel(sites[site], ledger, attempts)):
            complaints.append(complaint)  # what was not cancelled there is not called so here
            continue
        # written first: a job that dies of it is then known to have been cancelled, one that waits here never starts
        ledger.append("cancelled", points=[[a.point, a.attempt] for a in attempts])
        here = [a.job_id for a in attempts if not by_ssh and a.job_id and a.job_id.startswith("pid:")]
        there = [a.job_id for a in attempts if a.job_id and not a.job_id.startswith("pid:")]
        for job_id in here:
            if (pid := local.process_of(job_id)) is not None:
                local.stop(pid)
            else:
                complaints.append(f"{job_id} runs on another machine: cancel it there")
        if there and not by_ssh and (complaint := scheduler.cancel(sites[site], there)):
            complaints.append(f"{site}: {complaint}")
        else:
            print(f"{site}: {count(len(attempts), 'point')} told to stop")
    if complaints:
        raise UserError("; ".join(complaints))
    if not by_site:
        print("Nothing is queued or running.")


if __name__ == "__main__":
    sys.exit(main())
