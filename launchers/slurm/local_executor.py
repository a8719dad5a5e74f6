"""Jobs on this machine, without Slurm: submitit's local executor, one job at a time per GPU."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.signals import defer_signals
from launchers.sweep import private_dirs

from .environment import job_environment, python_path, replaced_environ

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

POLL_S = 0.2
SAVE_TIMEOUT_S = 900.0  # for the checkpoint of a job that is stopped: 10 GB for SD 1.5, on a slow disk
QUIT_TIMEOUT_S = 15.0  # for jobs that save nothing any more


@dataclass(kw_only=True)
class LocalJob:
    """A job to run here; `result` is its JobReturn, or the exception that ended it."""

    call: Callable[[], JobReturn]
    time_min: float
    gpus: int = 1
    result: JobReturn | Exception | None = None


def visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, else every GPU's UUID; empty without NVIDIA's driver."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in visible.split(",") if device]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        # UUIDs, because CUDA may number the GPUs in another order than NVML.
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def run_jobs(
    jobs: Sequence[LocalJob],
    *,
    folder: Path,
    code: Path | None,
    should_start: Callable[[int], bool] = lambda index: True,
    on_start: Callable[[int, str], None] = lambda index, job_id: None,
    on_end: Callable[[int], None] = lambda index: None,
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Run the jobs and set their `result`. `should_start` is called right before each; callbacks get the job's index.

    `on_poll` is called every POLL_S while jobs run.

    On Ctrl-C the running jobs are told to end and waited for, and the others never start.
    """
    from .submitit_internals import LocalJobExecutor  # submitit only where something runs

    # A slot is a GPU. Without one there is one slot: CPU runs beside each other would disturb their timing.
    slots = visible_gpus()
    for job in jobs:
        if slots and job.gpus > len(slots):
            raise UserError(f"gpus={job.gpus}: this machine has {len(slots)} GPUs for jobs")
    needed = [job.gpus if slots else 1 for job in jobs]
    slots = slots or [""]
    environment = job_environment()
    if code is not None:
        environment |= {"PYTHONPATH": python_path(code), "PYTHONSAFEPATH": "1"}
    waiting = list(range(len(jobs)))
    running: dict[tuple[str, ...], tuple[int, Any]] = {}  # by the slots that a job occupies
    try:
        while waiting or running:
            while waiting:
                occupied = {slot for taken in running for slot in taken}
                free = tuple(slot for slot in slots if slot not in occupied)
                # In their order: a job of many GPUs waits for them, and those behind it wait too.
                if len(free) < needed[waiting[0]]:
                    break
                index = waiting.pop(0)
                taken = free[: needed[index]]
                if not should_start(index):
                    # Cancelled in the meantime: the next job takes its slots.
                    continue
                # a folder per job: job ids are process ids here, and an old pickle of that id would be taken
                executor = LocalJobExecutor(private_dirs.make(folder / f"task-{index}"))
                # A terminal sends Ctrl-C to the shell and to submitit's controller too, which would kill the job within
                # a second; the job itself receives it all the same. submitit hides all GPUs from a job that requests
                # none; `setup` runs after that.
                setup = ["trap '' INT", f"export CUDA_VISIBLE_DEVICES={shlex.quote(','.join(taken))}"]
                executor.update_parameters(timeout_min=jobs[index].time_min, setup=setup)
                # Else a job that was started in this moment would be in no list.
                with defer_signals():
                    with replaced_environ(environment):
                        job = executor.submit(jobs[index].call)
                    running[taken] = (index, job)
                    on_start(index, f"pid:{job.job_id}@{socket.gethostname()}")
            time.sleep(POLL_S)
            on_poll()
            for taken, (index, job) in list(running.items()):
                if job.done():
                    del running[taken]
                    jobs[index].result = _result(job)
                    on_end(index)
    except BaseException:
        # Ctrl-C, or an error in a callback: no job may outlive this command unnoticed.
        for _, job in running.values():
            stop(int(job.job_id))
        try:
            _await_end([job for _, job in running.values()], SAVE_TIMEOUT_S)
        except KeyboardInterrupt:
            # The jobs have received this second one too, and quit.
            _await_end([job for _, job in running.values()], QUIT_TIMEOUT_S)
        raise


def _await_end(jobs: Sequence[Any], timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds for jobs that were told to end."""
    deadline = time.monotonic() + timeout_s
    while any(not job.done() for job in jobs) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def process_id(job_id: str) -> int | None:
    """Return the process id in a local job's id; None where the job is on another machine."""
    pid, _, host = job_id.removeprefix("pid:").partition("@")
    return int(pid) if host == socket.gethostname() else None


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


def _result(job: Any) -> JobReturn | Exception:
    try:
        result: JobReturn = job.result()
    except Exception as error:
        return error
    return result
