"""Wait until the points of a command have ended."""

import logging
import time
from collections.abc import Sequence

from inpaint_bench.core.console import console, pluralize, sanitize
from inpaint_bench.core.errors import PointsFailedError
from inpaint_bench.core.schema import PointState, Reason
from launchers.sweep.ledger import Ledger

from .forecast import sweep_end
from .survey import PointStatus, poll_sweep, sites_of, slowest_site
from .tables import clock, points_table

log = logging.getLogger(__name__)

LOCAL_POLL_S = 2.0  # if no Slurm is polled
MOST_TOLD = 4  # running points that a line tells one by one


def wait(ledger: Ledger, nums: set[int]) -> None:
    """Poll until the points have ended, logging every change of state; then print their table.

    All sites are polled together, as often as the slowest allows (`limits.poll_s`). Raises PointsFailedError if a
    point did not complete, unless this machine cannot run it (a lever without its library or GPU).
    """
    site = slowest_site(sites_of(ledger).values())
    states: dict[int, PointState] = {}
    while True:
        sweep = poll_sweep(ledger)
        points = [point for point in sweep.points if point.record.num in nums]
        for point in points:
            num, last = point.record.num, point.record.last
            if states.get(num) != point.state:
                job_id, queue = (last.job_id, last.queue) if last else (None, point.record.site)
                message = f"point {num} on {queue} ({job_id}): {point.state} {point.message}"
                log.info(sanitize(message.rstrip()))
            states[num] = point.state
        if not any(point.is_open for point in points):
            break
        if line := progress_line(points):
            log.info(line)
        time.sleep(site.limits.poll_s if site else LOCAL_POLL_S)
    console().print(points_table(points, sweep.sites))
    incomplete = [point for point in points if point.state is not PointState.COMPLETED]
    unavailable = [point for point in incomplete if point.reason is Reason.UNAVAILABLE]
    if unavailable:
        verb, reasons = "is" if len(unavailable) == 1 else "are", dict.fromkeys(point.message for point in unavailable)
        share = f"{len(unavailable)} of {pluralize(len(points), 'point')}"
        log.info(sanitize(f"{share} {verb} unavailable here: {'; '.join(reasons)}"))
    if failed := len(incomplete) - len(unavailable):
        raise PointsFailedError(
            f"{failed} of {pluralize(len(points), 'point')} did not complete; "
            "`rerun --dry-run` shows which it would resubmit"
        )


def progress_line(points: Sequence[PointStatus]) -> str:
    """Return how far the running points are: counts, each point's step and pace, and when all end; empty if none runs.

    More than a few running points are only counted.
    """
    running = [point for point in points if point.state is PointState.RUNNING]
    if not running:
        return ""
    parts = [f"{len(running)} running", f"{sum(point.is_open for point in points) - len(running)} waiting"]
    for point in running if len(running) <= MOST_TOLD else ():
        if (manifest := point.artifacts.manifest) and (progress := manifest.progress):
            steps = f"step {progress.step} of {progress.steps_total or '?'}"
            parts.append(f"point {point.record.num}: {steps}{manifest.pace}")
    end_unix, basis = sweep_end(points)
    if end_unix is not None:
        parts.append(f"all end {'by' if basis == 'at the latest' else 'at about'} {clock(end_unix)}")
    return sanitize("; ".join(parts))
