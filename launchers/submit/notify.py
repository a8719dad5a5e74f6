"""Submit the job that sends a sweep's webhook: one per site, which starts when the jobs of the sweep there have ended.

Not the last task of the sweep itself: that may time out, be preempted, or be cancelled before it starts. Slurm holds
the job until all arrays have ended, however they did, so nothing waits on the login node.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import expand_path
from inpaint_bench.core.records import read_record, write_record
from launchers.points.input_paths import is_visible
from launchers.points.point import Group, Point, by_site
from launchers.slurm.environment import slurm_environment
from launchers.slurm.processes import run_bounded
from launchers.slurm.query import array_id, jobs_named
from launchers.slurm.script import render_last
from launchers.sweep.events import Submitted
from launchers.sweep.ledger import Ledger, job_name

from .webhook import FOLDER, MODULE, LastJob, read_url, record_of, refuse_url

log = logging.getLogger(__name__)


def check(points: Sequence[Point]) -> None:
    """Raise UserError for a mail or a webhook that could not be sent. A site over ssh checks its own file."""
    if not points:
        return
    notify = points[0].bench.notify
    refuse_url(notify.webhook_file or "")  # whatever the site: launches record their overrides here
    sites = {point.site.name: point.site for point in points if is_visible(point.site, point.reachability)}
    for name, site in sites.items():
        if notify.mail and site.connect.method == "local":
            raise UserError(f"notify.mail={notify.mail}: Slurm sends the mail, and site={name} has none")
        if not notify.webhook_file:
            continue
        read_url(notify.webhook_file)
        if site.connect.method == "slurm" and site.cpu_jobs.own_account and not site.cpu_jobs.account:
            raise UserError(
                f"sites.{name}.cpu_jobs.account is empty, and the job that sends the webhook needs one for CPUs; "
                f"`{site.account.how_to_list}` at {name} lists yours"
            )
        _script(site, Path("sweep"), "check", 0, notify.webhook_file, Path("code"), ["1"])


def submit(groups: Sequence[Group], ledger: Ledger, code: Path) -> None:
    """Submit a job for each site whose arrays Slurm accepted. A failure is logged: the runs do not depend on it."""
    for name, members in by_site(groups).items():
        if not (webhook_file := members[0].points[0].bench.notify.webhook_file):
            continue
        try:
            job_id = _submit(members, ledger, code, webhook_file)
        except (OSError, ValueError, UserError, subprocess.TimeoutExpired) as error:
            log.warning(f"{name}: the job that sends the webhook was not submitted, the others were: {error}")
        else:
            if job_id:
                log.info(f"{name}: job {job_id} sends the webhook when the jobs of this sweep there have ended")


def _submit(groups: Sequence[Group], ledger: Ledger, code: Path, webhook_file: str) -> str | None:
    site, sweep_id, names = groups[0].site, ledger.sweep.sweep_id, {group.name for group in groups}
    arrays = {array_id(event.job_id) for event in ledger.events(Submitted) if event.group in names}
    if not arrays:
        return None
    # After a rerun, those that were submitted before and have not ended.
    jobs, answer = jobs_named(site, job_name("", sweep_id))
    if jobs is None:  # the job that was submitted before waits for them
        raise UserError(f"squeue {answer}, so that arrays that were submitted before are not known")
    arrays |= {array_id(job_id) for job_id, _, active in jobs if active}
    folder = ledger.folder / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    record = record_of(ledger.folder, site.name)
    newest = read_record(record, LastJob)
    number = newest.number + 1 if newest else 1
    script = folder / f"{site.name}-{number}.sh"
    script.write_text(_script(site, ledger.folder, sweep_id, number, webhook_file, code, sorted(arrays)))
    sbatch = ["sbatch", "--parsable", str(script)]
    done = run_bounded(sbatch, env=slurm_environment(site), timeout_s=site.limits.command_timeout_s)
    if done.returncode:
        raise UserError(done.stderr.decode(errors="replace").strip())
    job_id = done.stdout.decode().strip().partition(";")[0]
    write_record(record, LastJob(number=number, job_id=job_id))
    return job_id


def _script(
    site: SiteConfig, folder: Path, sweep_id: str, number: int, webhook_file: str, code: Path, after: Sequence[str]
) -> str:
    # The path and not the URL: scripts and command lines can be read by others.
    arguments = [folder, site.name, number, expand_path(webhook_file).absolute()]
    return render_last(
        site,
        command=shlex.join([site.python or sys.executable, "-m", MODULE, *map(str, arguments)]),
        after=after,
        log=folder / FOLDER / f"{site.name}-{number}.log",
        code=code,
        # Not the beginning of its arrays' names, by which a rerun searches for what was submitted.
        job_name=f"inpaint-webhook-{sweep_id}-{site.name}",
    )
