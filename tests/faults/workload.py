"""A workload that goes wrong once: `workload.name` says how, and only the first start of the first attempt does."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from inpaint_bench.core.config import BenchConfig
from tests.run.support import TinyTraining

STEP_S = 0.25
AFTER_S = 8.0  # of good steps: longer than a journal is old
JUMP_S = 8


def build(config: BenchConfig, device: torch.device) -> Faulty:
    return Faulty(config)


def mark(name: str) -> Path:
    """Beside the job's logs: written in the moment of the fault, its content the wall clock in ns."""
    return Path(os.environ["SUBMITIT_FOLDER"], f"{name}.{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}")


class Faulty(TinyTraining):
    def __init__(self, config: BenchConfig) -> None:
        super().__init__(config)
        first = config.identity.attempt == 1 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        self._fault = FAULTS.get(config.workload.name) if first else None
        self._name = config.workload.name
        self._due = time.monotonic() + AFTER_S

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S)
        if self._fault and time.monotonic() > self._due:
            fault, self._fault = self._fault, None
            mark(self._name).write_text(str(time.time_ns()))
            fault()
        return super().step(batch)


def _app_error() -> None:
    raise RuntimeError("the application's own mistake")


def _oom_gpu() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory: simulated")


def _oom_host() -> None:
    """The kernel refuses what this process asks for, as under a limit of the batch system."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    torch.empty(2**32)


def _sidecar_killed() -> None:
    (sidecar,) = _sidecars()
    os.kill(sidecar, signal.SIGKILL)


def _killed() -> None:
    _sidecar_killed()
    os.kill(os.getpid(), signal.SIGKILL)


def _clock_jump() -> None:
    """The wall clock is set forward, as far as this process sees it: the machine's own is not ours to turn."""
    true_s, true_ns = time.time, time.time_ns
    vars(time).update(time=lambda: true_s() + JUMP_S, time_ns=lambda: true_ns() + JUMP_S * 10**9)


def _disk_full() -> None:
    """Not a byte is left where the run writes."""
    with mark("ballast").open("wb", buffering=0) as out:
        size = 2**20
        while size:
            try:
                out.write(b"0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def _sidecars() -> list[int]:
    found = []
    for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"inpaint_bench.telemetry" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


FAULTS: dict[str, Callable[[], None]] = {
    "app_error": _app_error,
    "oom_gpu": _oom_gpu,
    "oom_host": _oom_host,
    "sidecar_killed": _sidecar_killed,
    "killed": _killed,
    "disk_full": _disk_full,
    "clock_jump": _clock_jump,
}
