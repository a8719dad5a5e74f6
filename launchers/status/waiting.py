"""Staying until the points of a command have ended."""

from __future__ import annotations

import logging
import time

from inpaint_bench.core.console import console, sanitize
from inpaint_bench.core.errors import PointsFailedError
from inpaint_bench.core.schema import PointState, Reason
from launchers.sweep.ledger import Ledger

from . import tables
from .survey import OPEN_STATES, poll_sweep, sites_of, slowest_site

log = logging.getLogger(__name__)

HERE_S = 2.0  # between two looks where no Slurm is asked


def wait(ledger: Ledger, nums: set[int]) -> None:
    """Tell every change of state, then the table. Raises PointsFailedError.

    All sites are asked together, as seldom as one of them wants (`limits.poll_s`). A point that this machine cannot
    run (a lever without its library or card) is told, but fails nothing.
    """
    site = slowest_site(sites_of(ledger).values())
    pause_s = site.limits.poll_s if site else HERE_S
    seen: dict[int, PointState] = {}
    while True:
        points = [s for s in poll_sweep(ledger).points if s.record.num in nums]
        for point in points:
            num, word, last = point.record.num, point.resolved, point.record.last
            if seen.get(num) != word.state:
                job = last.job_id if last else None
                log.info(sanitize(f"point {num} on {point.record.site} ({job}): {word.state} {word.message}".rstrip()))
            seen[num] = word.state
        if not any(state in OPEN_STATES for state in seen.values()):
            break
        time.sleep(pause_s)
    console().print(tables.standings_table(points))
    open_ends = [s for s in points if s.state is not PointState.COMPLETED]
    unavailable = [s for s in open_ends if s.reason is Reason.UNAVAILABLE]
    if unavailable:
        why = "; ".join(dict.fromkeys(s.message for s in unavailable))
        verb = "is" if len(unavailable) == 1 else "are"
        log.info(sanitize(f"{len(unavailable)} of {len(points)} points {verb} unavailable here: {why}"))
    if failed := len(open_ends) - len(unavailable):
        raise PointsFailedError(f"{failed} of {len(points)} points did not complete; `rerun` says which it sends again")
