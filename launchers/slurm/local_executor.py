"""Jobs on this machine, without Slurm: submitit's local executor, one job at a time per GPU."""

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.attempt_state import RunArtifacts
from inpaint_bench.core.console import shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import JOBS
from inpaint_bench.core.signals import Terminated, defer_signals, terminable
from inpaint_bench.run import progress_log
from launchers import entry
from launchers.points import point_file
from launchers.points.point import Group, Point
from launchers.sweep import private_dirs
from launchers.sweep.events import Submitted
from launchers.sweep.ledger import Ledger

from .environment import job_environment, python_path, replaced_environ

log = logging.getLogger(__name__)

POLL_S = 0.2
SAVE_TIMEOUT_S = 900.0  # for the checkpoint of a job that is stopped: 10 GB for SD 1.5, on a slow disk
QUIT_TIMEOUT_S = 15.0  # for jobs that save nothing any more


def visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, else every GPU's UUID; empty without NVIDIA's driver."""
    from inpaint_bench.telemetry.driver import DriverError
    from inpaint_bench.telemetry.nvml.real import RealNvml
    from inpaint_bench.telemetry.visible_gpus import entries

    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return entries(visible)
    try:
        with RealNvml() as nvml:
            return nvml.uuids()  # because CUDA may number the GPUs in another order than NVML
    except DriverError:
        return []


@dataclass(kw_only=True)
class _Running:
    """A point whose job runs now."""

    point: Point
    position: str  # in the list of points, as logged
    job: Any  # submitit's
    slots: list[str]  # that it occupies
    started_s: float


@terminable((signal.SIGTERM,))
def run_points(groups: Sequence[Group], ledger: Ledger, code: Path) -> None:
    """Run the points of the groups on this machine.

    On Ctrl-C and SIGTERM the running jobs are told to end and waited for, and the others never start.
    """
    # One list over all groups: they share the GPUs of this machine, and run in order of point numbers.
    points = sorted((point for group in groups for point in group.points), key=lambda point: point.num)
    if not points:
        return
    # Hydra and submitit only if something runs.
    from submitit.local.local import LocalExecutor

    gpus = visible_gpus()
    for point in points:
        if gpus and point.bench.gpus > len(gpus):
            raise UserError(f"gpus={point.bench.gpus}: this machine has {len(gpus)} GPUs for jobs")
    # A slot is a GPU. Without one there is one slot: CPU runs beside each other would disturb their timing.
    slots = gpus or [""]
    environment = job_environment() | {"PYTHONPATH": python_path(code), "PYTHONSAFEPATH": "1"}
    folder = private_dirs.make(ledger.folder / JOBS / points[0].group)
    waiting, unstarted = list(points), list(points)
    running: list[_Running] = []
    logged_s = time.monotonic()
    try:
        while waiting or running:
            while waiting:
                free = [slot for slot in slots if not any(slot in other.slots for other in running)]
                needed = waiting[0].bench.gpus if gpus else 1
                # In their order: a job of many GPUs waits for them, and those behind it wait too.
                if len(free) < needed:
                    break
                index, point, taken = len(points) - len(waiting), waiting.pop(0), free[:needed]
                # `cancel` in another process writes only to the ledger about a job that has not started.
                last = ledger.points()[point.num].last
                if last is None or last.cancelled:
                    continue
                # a folder per job: job ids are process ids here, and an old result of that id would be taken
                executor = LocalExecutor(private_dirs.make(folder / f"task-{index}"))
                # A terminal sends Ctrl-C to the shell and to submitit's controller too, which would kill the job within
                # a second; the job itself receives it all the same. submitit hides all GPUs from a job that requests
                # none; `setup` runs after that.
                setup = ["trap '' INT", f"export CUDA_VISIBLE_DEVICES={shlex.quote(','.join(taken))}"]
                executor.update_parameters(timeout_min=point.request.time_min, setup=setup)
                file = point_file.write(point, ledger.folder, f"{point.group}_{point.num}")
                # Else a job that was started in this moment would be in no list.
                with defer_signals():
                    with replaced_environ(environment):
                        job = executor.submit(entry.run, file)
                    position = f"[{index + 1}/{len(points)}]"
                    started_s = time.monotonic()
                    running.append(_Running(point=point, position=position, job=job, slots=taken, started_s=started_s))
                    unstarted.remove(point)
                    job_id = f"pid:{job.job_id}@{machine()}"
                    ledger.append(Submitted(group=point.group, job_id=job_id, attempts=[(point.num, point.attempt)]))
                    overrides = " ".join(point.overrides)
                    log.info(f"{position} point {point.num} on {point.site.name}: {overrides}")
            time.sleep(POLL_S)
            if time.monotonic() - logged_s >= progress_log.INTERVAL_S:
                logged_s = time.monotonic()
                for each in running:
                    manifest = RunArtifacts.read(ledger.folder / each.point.subdir).manifest
                    log.info(f"{each.position} {progress_log.describe(manifest)}")
            for each in [each for each in running if each.job.done()]:
                running.remove(each)
                outcome = "FAILED"
                with contextlib.suppress(Exception):  # the manifest and the log have it
                    each.job.result()
                    outcome = "done"
                log.info(f"{each.position} {outcome} after {time.monotonic() - each.started_s:.1f} s")
    except BaseException as error:
        # Ctrl-C, SIGTERM, or a full disk: no job may outlive this command unnoticed.
        for each in running:
            stop(int(each.job.job_id))
        try:
            _await_end(running, SAVE_TIMEOUT_S)
        except KeyboardInterrupt:
            # The jobs have received this second one too, and quit.
            _await_end(running, QUIT_TIMEOUT_S)
        if isinstance(error, KeyboardInterrupt | Terminated):
            _log_interrupted([each.point for each in running], unstarted, ledger)
        raise


def _log_interrupted(stopped: Sequence[Point], unstarted: Sequence[Point], ledger: Ledger) -> None:
    """Log what became of the points that a signal has stopped or kept from starting, and how to go on with them."""
    for point in stopped:
        manifest = RunArtifacts.read(ledger.folder / point.subdir).manifest
        log.info(f"point {point.num}: {(manifest and manifest.message) or 'stopped before its first step'}")
    if unstarted:
        nums = ", ".join(str(point.num) for point in unstarted)
        log.info(f"{'point' if len(unstarted) == 1 else 'points'} {nums} did not start")
    log.info(f"To go on with all of them: {shell_command('rerun', ledger.folder)}")


def _await_end(running: Sequence[_Running], timeout_s: float) -> None:
    """Wait for jobs that were told to end, but not for ever: one may hang."""
    deadline = time.monotonic() + timeout_s
    while any(not each.job.done() for each in running) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def machine() -> str:
    """Return the host and the namespace of process ids: a container has its own, and may share the host's name."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}-{re.sub(r'[^0-9]', '', str(Path('/proc/self/ns/pid').readlink()))}"
    return socket.gethostname()


def process_id(job_id: str) -> int | None:
    """Return the process id in a local job's id; None if the job is on another machine."""
    pid, _, host = job_id.removeprefix("pid:").partition("@")
    return int(pid) if host in (machine(), socket.gethostname()) else None  # earlier versions wrote the host alone


def is_alive(pid: int) -> bool:
    """Return whether a process that submitit started has this id; the command line tells it from a reused id."""
    try:
        return b"submitit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def stop(pid: int) -> None:
    """Tell a local job to end; it writes its manifest first.

    The process is the shell of `setup`. submitit's controller below it passes SIGTERM on to the job; a signal to the
    shell would end only the shell.
    """
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGTERM)
