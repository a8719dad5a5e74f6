"""`status`: how every point of a sweep stands, and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launchers import show
from launchers.ledger import Ledger
from launchers.watch import Standing, look

from .command import parser, run
from .terminal import console


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("status", "Show how every point of a sweep stands, and why.", "runs/2026-11-21/08-30-00-inpaint")
    options.add_argument("sweep", type=Path, help="the folder that `launch -m` printed")
    how = options.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="look again every minute until nothing is open")
    how.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between two looks (60)")
    return run(options, _status, argv)


def _status(options: argparse.Namespace) -> None:
    ledger = Ledger.open(options.sweep)
    while True:
        standings = look(ledger)
        if options.json:
            print(json.dumps([_plain(standing) for standing in standings], indent=1))
        else:
            console().print(show.standings_table(standings))
            print(show.summary(standings))
        if not options.watch or not any(standing.open for standing in standings):
            return
        time.sleep(options.every)


def _plain(standing: Standing) -> dict[str, object]:
    record, last = standing.record, standing.record.last
    return {
        "point": record.num,
        "overrides": record.overrides,
        "site": record.site,
        "attempt": last.attempt if last else None,
        "job_id": last.job_id if last else None,
        "run_id": last.run_id if last else None,
        "state": standing.verdict.state,
        "reason": standing.verdict.reason,
        "message": standing.verdict.message,
    }


if __name__ == "__main__":
    sys.exit(main())
