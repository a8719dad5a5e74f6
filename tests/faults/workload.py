"""A workload with a fault in the first start of its first attempt: `workload.name` says which."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.workloads import Facts
from tests.run.support import TinyTraining

STEP_S = 0.25
AFTER_S = 8.0  # of good steps: longer than the interval of the journal
JUMP_S = 8


def build(config: BenchConfig, device: torch.device) -> Faulty:
    """Return the workload."""
    return Faulty(config)


def mark(name: str) -> Path:
    """Return the file of the sweep that is written at the fault, with the wall clock in ns."""
    folder = Path(sys.argv[1]).parent / "marks"  # beside the points, of which the job was given the folder
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}"


class Faulty(TinyTraining):
    """A tiny training that runs a fault once, after some seconds."""

    def __init__(self, config: BenchConfig) -> None:
        super().__init__(config)
        self.facts = Facts(precision="fp32")  # a run that does not tell it is not valid
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
    """Request more memory than this process may have, as under a limit of the batch system."""
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
    """Set the wall clock forward for this process only."""
    true_s, true_ns = time.time, time.time_ns
    vars(time).update(time=lambda: true_s() + JUMP_S, time_ns=lambda: true_ns() + JUMP_S * 10**9)


def _disk_full() -> None:
    """Fill the file system of the run to the last byte."""
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
    pids = []
    for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"inpaint_bench.telemetry" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(int(pid))
    return pids


FAULTS: dict[str, Callable[[], None]] = {
    "app_error": _app_error,
    "oom_gpu": _oom_gpu,
    "oom_host": _oom_host,
    "sidecar_killed": _sidecar_killed,
    "killed": _killed,
    "disk_full": _disk_full,
    "clock_jump": _clock_jump,
}
