"""Submit groups of points as Slurm arrays, one sbatch call each."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import JOBS
from inpaint_bench.core.site import SiteConfig
from launchers import entry
from launchers.points.point import Group
from launchers.sweep import private_dirs
from launchers.sweep.events import Refused, Submitted
from launchers.sweep.ledger import Ledger, job_name

from .environment import replaced_environ, slurm_environment
from .job import HydraState, PointJob
from .script import render
from .submitit_internals import ArrayExecutor

log = logging.getLogger(__name__)

# Slurm's manual asks programs to keep their calls few. Most sweeps are some ten arrays and wait for nothing; points
# with a time limit of their own each are as many arrays as points.
UNPACED_CALLS = 10  # to a site; further ones are limits.submit_pause_s apart

# slurm_strerror's wording, and EAGAIN, after which sbatch itself has retried for minutes
_NO_ANSWER = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|in standby mode|"
    "Resource temporarily unavailable|Message (send|receive) failure|Communication (connection|shutdown) failure|"
    "Unexpected message received|Insane message length|Header lengths are longer|Connection (refused|reset|timed out)|"
    "Broken pipe|Transport endpoint"
)
_REFUSED = re.compile("[Bb]atch job submission failed: ")  # sbatch may print more before it, also a site's own text


ESTIMATE_TIMEOUT_S = 20.0
MAX_ESTIMATES = 20  # per site and command: its controller computes every estimate
UNKNOWN = "not known"
_START = re.compile(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


class UnansweredError(UserError):
    """Slurm gave sbatch no answer: it may have accepted the array, and the next call would fare no better."""


class RefusedError(UserError):
    """The array does not exist: slurmctld refused it, or sbatch was not called."""


@dataclass(kw_only=True)
class Outcome:
    """How many points of a submission were not accepted as far as is known."""

    not_accepted: int = 0
    unanswered: bool = False  # Slurm, or a site, gave no answer for some of them


def job_command(group: Group, folder: Path) -> str:
    """Return the shell command of one array task: it checks the folder and loads the point's pickle from it."""
    return entry.command(group.site.python or sys.executable, folder)


def submit_groups(groups: Sequence[Group], ledger: Ledger, hydra: HydraState, code: Path) -> Outcome:
    """Submit each group as an array, and record what became of it.

    A refused array does not stop the others. After one that Slurm did not answer for, which it may have accepted, the
    other arrays of that site are not tried.
    """
    calls: Counter[str] = Counter()
    silent_sites: set[str] = set()
    outcome = Outcome()
    sweep_id = ledger.sweep.sweep_id
    for group in groups:
        site = group.site
        attempts = [(point.num, point.attempt) for point in group.points]
        points = pluralize(len(attempts), "point")
        try:
            if site.name in silent_sites:
                raise RefusedError(f"{site.name}: {group.name} was not submitted, as Slurm did not answer before")
            if calls[site.name] >= UNPACED_CALLS:
                time.sleep(site.limits.submit_pause_s)
            calls[site.name] += 1
            array = submit_array(
                group,
                [PointJob.of(p, hydra, f"{group.name}_{task}") for task, p in enumerate(group.points)],
                folder=private_dirs.make(ledger.folder / JOBS / group.name),
                code=code,
                job_name=job_name(group.name, sweep_id),
            )
        except UserError as error:
            outcome.not_accepted += len(attempts)
            certain = isinstance(error, RefusedError)
            ledger.append(Refused(group=group.name, attempts=attempts, message=str(error), certain=certain))
            advice = f"`rerun` with corrected overrides submits its {points}."
            if isinstance(error, UnansweredError):
                silent_sites.add(site.name)
                outcome.unanswered = True
                advice = "Slurm may have accepted it nevertheless: `status` and `rerun` search for it by name."
            log.error(f"{error}. {advice}")
            continue
        ledger.append(Submitted(group=group.name, job_id=f"{array}_%a", attempts=attempts))
        log.info(f"{site.name}: array {array} with {points} in {group.request.partition}")
    return outcome


def submit_array(group: Group, jobs: Sequence[Callable[[], Any]], *, folder: Path, code: Path, job_name: str) -> str:
    """Submit one array with a job per task, and return its id. `folder` takes pickles, script and logs.

    Raises UnansweredError, RefusedError with sbatch's own message, and UserError where it is not certain whether Slurm
    accepted the array: on a full disk, and for a message that says neither.
    """
    site = group.site
    command = job_command(group, folder)
    executor = ArrayExecutor(
        folder,
        command=command,
        script=render(group, command=command, folder=folder, code=code, job_name=job_name),
        time_min=group.request.time_min,
    )
    with replaced_environ(slurm_environment(site)), redirect_stderr(io.StringIO()):  # submitit prints what it raises
        try:
            tasks = executor.submit_array(jobs)
        except OSError as error:
            raise UserError(f"{site.name}: {group.name} could not be submitted: {error}") from None
        except FailedJobError as error:
            message = _sbatch_message(error)
            if _NO_ANSWER.search(message):
                raise UnansweredError(f"{site.name}: Slurm did not answer sbatch of {group.name}: {message}") from None
            kind = RefusedError if _REFUSED.search(message) else UserError
            raise kind(f"{site.name}: sbatch refused {group.name}: {message}") from None
    return str(tasks[0].job_id).split("_")[0]


def _sbatch_message(error: Exception) -> str:
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("subprocess-id"))


def estimate_starts(site: SiteConfig, scripts: Sequence[Path]) -> list[float | str]:
    """Return when Slurm would start each script: Unix seconds, or why there are none. `--test-only` submits nothing.

    The time is that of an array's first task, if nothing is submitted before it.
    """
    estimates: list[float | str] = []
    for script in scripts[:MAX_ESTIMATES]:
        estimate = _estimate_start(site, script)
        if estimate is None:  # a controller that is down or busy is not queried again
            break
        estimates.append(estimate)
    return estimates + [UNKNOWN] * (len(scripts) - len(estimates))


def _estimate_start(site: SiteConfig, script: Path) -> float | str | None:
    """Return the estimate for one script; None where Slurm does not answer."""
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", str(script)],
            env=slurm_environment(site),
            capture_output=True,
            text=True,
            timeout=ESTIMATE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if match := _START.search(done.stderr):
        return datetime.fromisoformat(match[1]).timestamp()
    if done.returncode == 0:
        return UNKNOWN
    lines = done.stderr.strip().splitlines()
    return f"refused: {re.sub(r'^.*?(error|failure): ', '', lines[-1])}" if lines else "refused"
