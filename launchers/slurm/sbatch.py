"""Submit groups of points as Slurm arrays, one sbatch call each."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import JOBS
from launchers import entry
from launchers.points.point import Group, SubmitOutcome
from launchers.sweep import private_dirs
from launchers.sweep.attempt import AttemptKey
from launchers.sweep.events import Refused, Submitted
from launchers.sweep.ledger import Ledger, job_name

from .environment import replaced_environ, slurm_environment
from .job import HydraState, PointJob
from .script import render
from .submitit_internals import ArrayExecutor

log = logging.getLogger(__name__)

# Slurm's manual asks programs not to call sbatch in a tight loop. Most sweeps have at most ten arrays and are not
# delayed; where every point has another time limit, there are as many arrays as points.
UNPACED_CALLS = 10  # per site; each later call follows a pause of limits.submit_pause_s

# slurm_strerror's wording, and EAGAIN, after which sbatch itself has retried for minutes
_NO_ANSWER = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|in standby mode|"
    "Resource temporarily unavailable|Message (send|receive) failure|Communication (connection|shutdown) failure|"
    "Unexpected message received|Insane message length|Header lengths are longer|Connection (refused|reset|timed out)|"
    "Broken pipe|Transport endpoint|sbatch printed no job id"
)
_REFUSED = re.compile("[Bb]atch job submission failed: ")  # sbatch may print more before it, also a site's own text


class UnansweredError(UserError):
    """Slurm gave sbatch no answer: it may have accepted the array, and the next call would fare no better."""


class RefusedError(UserError):
    """The array does not exist: slurmctld refused it, or sbatch was not called."""


def job_command(group: Group, folder: Path) -> str:
    """Return the shell command of every array task: it checks the job folder and runs the point pickled there."""
    container = group.site.environment.container
    return entry.command(container.python if container.image else group.site.python or sys.executable, folder)


def submit_groups(groups: Sequence[Group], ledger: Ledger, hydra: HydraState, code: Path) -> SubmitOutcome:
    """Submit each group as an array, and record what became of it.

    A refused array does not stop the others. After one that Slurm did not answer for, which it may have accepted, the
    other arrays of that site are not tried.
    """
    calls: Counter[str] = Counter()
    silent_sites: set[str] = set()
    outcome = SubmitOutcome()
    sweep_id = ledger.sweep.sweep_id
    for group in groups:
        site = group.site
        if site.name in silent_sites:
            # Refused for certain, since sbatch is not even called: `rerun` may submit its points.
            message = f"{site.name}: {group.name} was not submitted, as Slurm did not answer before"
            _record_refusal(group, RefusedError(message), ledger, outcome)
            continue
        if calls[site.name] >= UNPACED_CALLS:
            time.sleep(site.limits.submit_pause_s)
        calls[site.name] += 1
        try:
            array = submit_array(
                group,
                [PointJob.of(p, hydra, f"{group.name}_{task}") for task, p in enumerate(group.points)],
                folder=private_dirs.make(ledger.folder / JOBS / group.name),
                code=code,
                job_name=job_name(group.name, sweep_id),
            )
        except UserError as error:
            _record_refusal(group, error, ledger, outcome)
            if isinstance(error, UnansweredError):
                silent_sites.add(site.name)
            continue
        # Before the next call: so at most one array is ever in Slurm without its id in the ledger.
        try:
            ledger.append(Submitted(group=group.name, job_id=f"{array}_%a", attempts=_attempts(group)))
        except OSError as error:
            raise UserError(
                f"{site.name}: array {array} was submitted, and that could not be recorded ({error.filename}: "
                f"{error.strerror}). `status` and `rerun` find it by its name; later arrays were not submitted"
            ) from None
        log.info(f"{site.name}: array {array} with {_point_count(group)} in {group.request.partition}")
    return outcome


def _record_refusal(group: Group, error: UserError, ledger: Ledger, outcome: SubmitOutcome) -> None:
    """Write into ledger, outcome and log that a group was not accepted as far as is known."""
    certain, unanswered = isinstance(error, RefusedError), isinstance(error, UnansweredError)
    ledger.append(Refused(group=group.name, attempts=_attempts(group), message=str(error), certain=certain))
    outcome.not_accepted += len(group.points)
    outcome.unanswered |= unanswered
    advice = f"`rerun` with corrected overrides submits its {_point_count(group)}."
    if unanswered:
        advice = "Slurm may have accepted it nevertheless: `status` and `rerun` search for it by name."
    log.error(f"{error}. {advice}")


def _attempts(group: Group) -> list[AttemptKey]:
    return [(point.num, point.attempt) for point in group.points]


def _point_count(group: Group) -> str:
    return pluralize(len(group.points), "point")


def submit_array(group: Group, jobs: Sequence[Callable[[], Any]], *, folder: Path, code: Path, job_name: str) -> str:
    """Submit one array with a job per task, and return its id. `folder` takes pickles, script and logs.

    Raises UnansweredError, RefusedError with sbatch's own message, and UserError where it is not certain whether Slurm
    accepted the array, for a message that says neither.
    """
    site = group.site
    command = job_command(group, folder)
    executor = ArrayExecutor(
        folder,
        script=render(group, command=command, folder=folder, code=code, job_name=job_name),
        time_min=group.request.time_min,
    )
    with replaced_environ(slurm_environment(site)):
        try:
            tasks = executor.submit_array(jobs)
        except OSError as error:  # a full disk, or there is no sbatch
            raise RefusedError(f"{site.name}: {group.name} could not be submitted: {error}") from None
        except FailedJobError as error:
            raise _submission_error(group, _sbatch_message(error)) from None
    return str(tasks[0].job_id).split("_")[0]


def _submission_error(group: Group, message: str) -> UserError:
    """Return the error that sbatch's message stands for."""
    # Tested first: sbatch reports a lost connection as "Batch job submission failed: ..." too.
    if _NO_ANSWER.search(message):
        return UnansweredError(f"{group.site.name}: Slurm did not answer sbatch of {group.name}: {message}")
    text = f"{group.site.name}: sbatch refused {group.name}: {message}"
    return RefusedError(text) if _REFUSED.search(message) else UserError(text)


def _sbatch_message(error: Exception) -> str:
    lines = [line.removeprefix("sbatch: error: ").strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("subprocess-id"))
