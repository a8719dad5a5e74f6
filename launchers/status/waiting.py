"""Wait until the points of a command have ended."""

from __future__ import annotations

import logging
import time

from inpaint_bench.core.console import console, pluralize, sanitize
from inpaint_bench.core.errors import PointsFailedError
from inpaint_bench.core.schema import PointState, Reason
from launchers.sweep.ledger import Ledger

from .forecast import forecast_points
from .survey import poll_sweep, sites_of, slowest_site
from .tables import points_table

log = logging.getLogger(__name__)

LOCAL_POLL_S = 2.0  # if no Slurm is polled


def wait(ledger: Ledger, nums: set[int]) -> None:
    """Poll until the points have ended, logging every change of state; then print their table.

    All sites are polled together, as often as the slowest allows (`limits.poll_s`). Raises PointsFailedError if a
    point did not complete, unless this machine cannot run it (a lever without its library or GPU).
    """
    site = slowest_site(sites_of(ledger).values())
    states: dict[int, PointState] = {}
    while True:
        points = [point for point in poll_sweep(ledger).points if point.record.num in nums]
        for point in points:
            num, last = point.record.num, point.record.last
            if states.get(num) != point.state:
                job_id = last.job_id if last else None
                message = f"point {num} on {point.record.site} ({job_id}): {point.state} {point.message}"
                log.info(sanitize(message.rstrip()))
            states[num] = point.state
        if not any(point.is_open for point in points):
            break
        time.sleep(site.limits.poll_s if site else LOCAL_POLL_S)
    console().print(points_table(points, forecast_points(points)))
    incomplete = [point for point in points if point.state is not PointState.COMPLETED]
    unavailable = [point for point in incomplete if point.reason is Reason.UNAVAILABLE]
    if unavailable:
        verb, reasons = "is" if len(unavailable) == 1 else "are", dict.fromkeys(point.message for point in unavailable)
        share = f"{len(unavailable)} of {pluralize(len(points), 'point')}"
        log.info(sanitize(f"{share} {verb} unavailable here: {'; '.join(reasons)}"))
    if failed := len(incomplete) - len(unavailable):
        raise PointsFailedError(
            f"{failed} of {pluralize(len(points), 'point')} did not complete; `rerun` shows which it would resubmit"
        )
