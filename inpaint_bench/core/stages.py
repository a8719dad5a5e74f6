"""Where the time of a run goes: seconds by stage, which sum up to the time of its process.

A stage within another one is not counted in the outer one. What no stage covers is `other`.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# In the order of a run. `job start`: modules and srun. `model`: networks, levers, optimizer. `compilation`: the first
# pass and the first step. `window`: validations too. `profile`: also the steps from which levers are read back.
# `closing`: checkpoints and results.
STAGES = (
    *("job start", "imports", "device", "telemetry", "data", "model", "batch search", "parity"),
    *("compilation", "capture", "warm-up", "window", "profile", "closing", "other"),
)

_seconds: dict[str, float] = {}  # empty before `begin`
_stage, _since = "other", time.monotonic()
_used = False  # this process has executed a run


def begin(job_start_unix: str = "") -> None:
    """Begin the record of a run. The first one of a process begins with the process, which has imported until now.

    `job_start_unix`: when Slurm started the job; empty if it is not known, or there is no job.
    """
    global _used, _stage, _since
    _seconds.clear()
    _seconds["imports"] = 0.0 if _used else _process_s()
    if job_start_unix.isdigit() and not _used:
        _seconds["job start"] = max(0.0, time.time() - int(job_start_unix) - _seconds["imports"])
    _used, _stage, _since = True, "other", time.monotonic()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the block in a stage."""
    outer = _enter(name)
    try:
        yield
    finally:
        _enter(outer)


def seconds(started_unix_ns: int) -> dict[str, float] | None:
    """Return the seconds of each stage until now, or None if no run has begun in this process.

    If the run started before this process, as that of a rank did, the time between is `other` too.
    """
    if not _seconds:
        return None
    _enter(_stage)
    before_s = (time.time_ns() - started_unix_ns) / 1e9 - sum(_seconds.values())
    found = {**_seconds, "other": _seconds.get("other", 0.0) + max(0.0, before_s)}
    return {name: round(found[name], 3) for name in STAGES if name in found}


def _enter(name: str) -> str:
    """Go on in another stage, and return the one that ends."""
    global _stage, _since
    now = time.monotonic()
    _seconds[_stage] = _seconds.get(_stage, 0.0) + now - _since
    ended, _stage, _since = _stage, name, now
    return ended


def _process_s() -> float:
    """Return the seconds since this process was started; 0 if the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
