"""A site without Slurm: this machine, through submitit's local executor, one job at a time per GPU."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn

from launchers import entry
from launchers.sweep import private_dirs

from .environment import leaks, python_path, replaced

POLL_S = 0.2
STOP_S = 30.0


@dataclass(kw_only=True)
class LocalCall:
    """One job to run here; `result` is its JobReturn, or the exception that ended it."""

    call: Callable[[], JobReturn]
    time_min: float
    result: JobReturn | Exception | None = None


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES allows, else every GPU's UUID; empty without NVIDIA's driver."""
    if (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in allowed.split(",") if device]
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def run_all(
    calls: Sequence[LocalCall],
    *,
    folder: Path,
    code: Path | None,
    started: Callable[[int, str], None] = lambda index, job_id: None,
    ended: Callable[[int], None] = lambda index: None,
    wanted: Callable[[int], bool] = lambda index: True,
) -> None:
    """Run every call that is still `wanted` at its turn, filling `result`; `started` and `ended` are told.

    Interrupted by the keyboard, the jobs that run are told to stop and the rest never start.
    """
    from submitit.local.local import LocalExecutor

    class Executor(LocalExecutor):
        @property
        def _submitit_command_str(self) -> str:
            return entry.command(sys.executable, self.folder)

    gpus = visible_gpus()
    slots = list(gpus) or [""]
    environment = {k: v for k, v in os.environ.items() if k not in set(leaks(os.environ))}
    if code is not None:
        environment |= {"PYTHONPATH": python_path(code), "PYTHONSAFEPATH": "1"}
    waiting = list(range(len(calls)))
    running: dict[str, tuple[int, Any]] = {}
    try:
        while waiting or running:
            for slot in slots:
                if slot in running or not waiting:
                    continue
                index = waiting.pop(0)
                if not wanted(index):
                    continue
                # a folder each: job ids are process ids here, and an old pickle of that id would be taken
                executor = Executor(private_dirs.make(folder / f"task-{index}"))
                executor.update_parameters(
                    timeout_min=calls[index].time_min,
                    setup=[f"export CUDA_VISIBLE_DEVICES={shlex.quote(slot)}"],
                )
                with replaced(environment):
                    job = executor.submit(calls[index].call)
                running[slot] = (index, job)
                started(index, f"pid:{job.job_id}@{socket.gethostname()}")
            time.sleep(POLL_S)
            for slot, (index, job) in list(running.items()):
                if job.done():
                    del running[slot]
                    calls[index].result = _result(job)
                    ended(index)
    except BaseException:
        for _, job in running.values():
            stop(int(job.job_id))
        deadline = time.monotonic() + STOP_S
        while any(not job.done() for _, job in running.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        raise


def process_of(job_id: str) -> int | None:
    """The process id in a local job's id; None where it is of another machine."""
    pid, _, host = job_id.removeprefix("pid:").partition("@")
    return int(pid) if host == socket.gethostname() else None


def alive(pid: int) -> bool:
    """A process of that id that submitit started; ids are used again, so its command line is looked at."""
    try:
        return b"submitit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def stop(pid: int) -> None:
    """Ask the job that `started` named to end; it writes its manifest first.

    The process of that id is the shell of `setup`. submitit's controller below it hands SIGTERM on to the
    job; a signal to the shell itself would end there.
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
        value = job.result()
    except Exception as error:
        return error
    assert isinstance(value, JobReturn)
    return value
