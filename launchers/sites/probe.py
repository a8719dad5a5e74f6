"""The job of `doctor site --probe`: one GPU for a minute, with the script template of every other job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.schema import CODE, JOBS
from inpaint_bench.core.site import SiteConfig
from inpaint_bench.run.node_probe import NodeProbe
from launchers.points.compose import Composer
from launchers.points.group import group_points
from launchers.slurm import query
from launchers.slurm import submit as slurm
from launchers.submit import dry_run
from launchers.sweep import private_dirs, snapshot
from launchers.sweep.launch_context import Surroundings

TIME_MIN = 5  # it takes about one; a cold file system may need longer for PyTorch alone
NAME = "probe"
RESULT = "probe.json"  # what the job found
ASKED = "asked.json"  # which job was sent where
LOOK_S = 2.0  # a file is looked for; Slurm is asked once in the site's limits.poll_s
LATE_S = 20.0  # a shared file system may show a file some seconds after the job that wrote it has ended
LOG_LINES = 12


@dataclass(frozen=True, kw_only=True)
class Probe:
    folder: Path
    site: str
    job_id: str

    @property
    def found(self) -> dict[str, Any] | None:
        """What the job wrote; None before it did. Raises UserError where that is damaged."""
        try:
            found = read_json(self.folder / RESULT)
        except ValueError as error:
            raise UserError(str(error)) from None
        return found if isinstance(found, dict) else None

    @property
    def log(self) -> str:
        """The last lines that the job printed."""
        logs = sorted((self.folder / JOBS / NAME).glob("*_log.*"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LOG_LINES:])


def submit(compose: Composer, site: SiteConfig, overrides: Sequence[str]) -> Probe:
    """One job at a site, in a new folder below `out`. Raises UserError where it cannot be or sbatch refuses it.

    On the first GPU of the site file, unless an override names another.
    """
    asked = [f"time_min={TIME_MIN}", *overrides, f"site={site.name}"]
    if not any(one.startswith("gpu=") for one in overrides):
        asked.insert(0, f"gpu={next(iter(site.gpus))}")
    point = compose(0, asked)
    if not point.reachable or point.site.connect.method != "slurm":
        raise UserError(f"{site.name}: a probe is submitted on its own login node ({point.why})")
    root = Path(point.bench.out, "doctor").absolute()
    folder = root / f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{site.name}"
    dry_run.check([point], folder, Surroundings())
    dry_run.check_accounts([point])
    (group,) = group_points([point])
    jobs = private_dirs.make(folder / JOBS / NAME)
    storage = point.site.storage
    looks = {"storage.scratch": storage.scratch, "storage.node_tmp": storage.node_tmp}
    job_id = slurm.submit(
        group,
        [NodeProbe(out=folder / RESULT, folders=looks)],
        folder=jobs,
        code=snapshot.take(root / CODE),
        job_name=_job_name(folder),
    )
    replace_json(folder / ASKED, {"site": site.name, "job_id": f"{job_id}_0"})
    return Probe(folder=folder, site=site.name, job_id=f"{job_id}_0")


def _job_name(folder: Path) -> str:
    return f"inpaint-doctor-{folder.name}"


def opened(folder: Path) -> Probe:
    """A probe that was sent before. Raises UserError where the folder is none."""
    try:
        asked: Any = read_json(folder / ASKED)
        return Probe(folder=folder, site=str(asked["site"]), job_id=str(asked["job_id"]))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder}: not the folder of a probe; `doctor site --probe` prints its name") from None


def wait(probe: Probe, site: SiteConfig, until: float) -> tuple[bool, str]:
    """Whether the job is over, and how it stands. `until`: time.monotonic()."""
    asked = time.monotonic()
    state, ended = "waits to be started", None
    while probe.found is None:
        now = time.monotonic()
        if ended is not None and now > ended + LATE_S:
            return True, f"ended as {state} without a word"
        if now > until:
            return ended is not None, state
        if ended is None and now > asked + site.limits.poll_s:
            asked = now
            word = query.ask(site, {probe.job_id: _job_name(probe.folder)}).words.get(probe.job_id)
            if word is not None and word.state is not None:
                state = f"{word.state} {word.detail}".strip()
                ended = now if word.ended else None
        time.sleep(LOOK_S)
    return True, "has written what it found"
