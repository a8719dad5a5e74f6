"""The job of `doctor site --probe`: one GPU for a minute, with the template and sbatch call of every other job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import CODE, JOBS
from inpaint_bench.run.node_probe import NodeFindings, NodeProbe
from launchers.points.compose import Composer
from launchers.points.point import group_points
from launchers.slurm import query, sbatch
from launchers.submit import checks
from launchers.sweep import private_dirs, snapshot
from launchers.sweep.sweep_record import LaunchContext

TIME_LIMIT_MIN = 5  # it takes about one; importing PyTorch from a cold file system may take longer
JOB_FOLDER = "probe"
RESULT = "probe.json"  # written by the job
SUBMITTED = "submitted.json"  # which job was submitted where
CHECK_RESULT_S = 2.0  # only the file is looked for so often; Slurm is queried once per limits.poll_s
# A shared file system may show a file some seconds after the job that wrote it has ended.
FILE_DELAY_S = 20.0
LOG_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A submitted probe job."""

    folder: Path
    site: str
    job_id: str

    @property
    def result(self) -> NodeFindings | None:
        """Return what the job wrote; None before that. Raises UserError if the file is damaged."""
        try:
            return read_record(self.folder / RESULT, NodeFindings)
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def log_tail(self) -> str:
        """Return the last lines that the job printed."""
        logs = sorted((self.folder / JOBS / JOB_FOLDER).glob("*_log.*"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LOG_LINES:])


def submit(compose: Composer, site: SiteConfig, overrides: Sequence[str]) -> Probe:
    """Submit a probe job, with its files in a new folder below `out`.

    Requests the first GPU of the site file unless an override names another. Raises UserError if the job cannot be
    submitted from here or sbatch refuses it.
    """
    # Later overrides win: the user may set another time limit, but not another site.
    requested = [f"time_min={TIME_LIMIT_MIN}", *overrides, f"site={site.name}"]
    if not any(override.startswith("gpu=") for override in overrides):
        requested.insert(0, f"gpu={next(iter(site.gpus))}")
    point = compose(0, requested)
    if not point.reachable or point.site.connect.method != "slurm":
        reason = point.reachability.reason
        raise UserError(f"{site.name}: a probe can only be submitted on its own login node ({reason})")
    root = Path(point.bench.out, "doctor").absolute()
    folder = root / f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{site.name}"
    checks.check_points([point], folder, LaunchContext())
    checks.check_accounts([point])
    (group,) = group_points([point])
    storage = {f"storage.{key}": getattr(point.site.storage, key) for key in ("scratch", "node_tmp")}
    array_id = sbatch.submit_array(
        group,
        [NodeProbe(out=folder / RESULT, folders=storage)],
        folder=private_dirs.make(folder / JOBS / JOB_FOLDER),
        code=snapshot.take(root / CODE),
        job_name=_job_name(folder),
    )
    job_id = f"{array_id}_0"
    replace_json(folder / SUBMITTED, {"site": site.name, "job_id": job_id})
    return Probe(folder=folder, site=site.name, job_id=job_id)


def _job_name(folder: Path) -> str:
    return f"inpaint-doctor-{folder.name}"


def load(folder: Path) -> Probe:
    """Return the probe that was submitted from `folder`. Raises UserError if there is none."""
    try:
        submitted: Any = read_json(folder / SUBMITTED)
        return Probe(folder=folder, site=str(submitted["site"]), job_id=str(submitted["job_id"]))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder}: not the folder of a probe; `doctor site --probe` prints its name") from None


def wait(probe: Probe, site: SiteConfig, deadline: float) -> tuple[bool, str]:
    """Wait for the result; return whether the job has ended, and its state. `deadline` is of time.monotonic()."""
    queried = time.monotonic()
    state, ended = "pending", None
    while probe.result is None:
        now = time.monotonic()
        # A job that has ended may still be without a result, until the file system shows it.
        if ended is not None and now > ended + FILE_DELAY_S:
            return True, f"ended ({state}) without a result"
        if now > deadline:
            return ended is not None, state
        if ended is None and now > queried + site.limits.poll_s:
            queried = now
            scheduler = query.query_jobs(site, {probe.job_id: _job_name(probe.folder)}).states.get(probe.job_id)
            if scheduler is not None and scheduler.state is not None:
                state = f"{scheduler.state} {scheduler.detail}".strip()
                ended = now if scheduler.ended else None
        time.sleep(CHECK_RESULT_S)
    return True, "has written its result"
