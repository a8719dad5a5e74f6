"""Whose processes compute on a GPU: ours, a co-tenant's, or unknown.

NVML may give process ids of another pid namespace (in containers); such ids prove nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from inpaint_bench.telemetry.report import CoTenant, ProcessReport

_PROC: Final = Path("/proc")
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # inode of /proc/self/ns/pid outside of containers: PROC_PID_INIT_INO
MAX_LISTED: Final = 100  # per GPU; in a week of short jobs, thousands may come and go


@dataclass
class GpuProcesses:
    """What is known of the processes on one GPU, over the run or from one list."""

    checks: int = 0  # lists that NVML gave
    failed: int = 0
    co_tenants: dict[int, str | None] = field(default_factory=dict)  # pid: name
    unknown: set[int] = field(default_factory=set)
    reason: str | None = None  # why the last list was not given
    complete: bool = False  # some list held every process on the GPU

    def report(self) -> ProcessReport:
        """Return the record for telemetry.json, whose verdict is None if NVML gave no list at all."""
        verdict = None
        # One co-tenant proves itself; `alone` takes a complete list without any unknown id.
        if self.checks:
            verdict = "co_tenant" if self.co_tenants else "alone" if self.complete and not self.unknown else "unknown"
        return ProcessReport(
            verdict=verdict,
            reason=None if verdict else self.reason,
            checks=self.checks,
            failed=self.failed,
            num_co_tenants=len(self.co_tenants),
            co_tenants=[CoTenant(pid, name) for pid, name in list(self.co_tenants.items())[:MAX_LISTED]],
            num_unknown=len(self.unknown),
            unknown_pids=sorted(self.unknown)[:MAX_LISTED],
        )


def classify(
    pids: Iterable[int], worker: int, proc: Path = _PROC, in_initial_namespace: bool | None = None
) -> GpuProcesses:
    """Return what a list of process ids tells; ours are the worker and its descendants.

    Inside a container's pid namespace, ids mean something only if one of them is ours; an id without an entry in /proc
    then belongs elsewhere. The list is not complete even so: NVIDIA's open kernel modules leave out processes without
    an id in the caller's namespace (gpuGetProcWithObject). In the initial namespace, such an id has ended, or /proc
    hides the processes of other users (hidepid).
    """
    listed = set(pids)
    if in_initial_namespace is None:
        in_initial_namespace = _in_initial_namespace()
    own = {pid for pid in listed if is_descendant(pid, worker, proc)}
    others = listed - own
    # None of ours is listed, though we compute there: the ids are those of another namespace.
    if not in_initial_namespace and not own:
        return GpuProcesses(unknown=others)
    co_tenants: dict[int, str | None] = {}
    unknown = set()
    for pid in sorted(others):
        if (proc / str(pid)).exists():
            co_tenants[pid] = _name(pid, proc)
        elif not in_initial_namespace or pid == 0:
            unknown.add(pid)
        # Alive, but hidden from /proc by hidepid. An id that is not alive has ended since NVML listed it.
        elif _is_alive(pid):
            co_tenants[pid] = None
    return GpuProcesses(co_tenants=co_tenants, unknown=unknown, complete=in_initial_namespace)


def is_descendant(pid: int, worker: int, proc: Path = _PROC) -> bool:
    """Return whether a process is the worker or was started by it."""
    visited: set[int] = set()
    # From parent to parent. /proc is read entry by entry, so a reused id could lead round in a circle.
    while pid > 1 and pid not in visited:
        if pid == worker:
            return True
        visited.add(pid)
        try:
            # The name, in parentheses, may itself hold spaces and parentheses.
            stat = (proc / str(pid) / "stat").read_text(errors="replace")
            pid = int(stat.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == worker


def _name(pid: int, proc: Path) -> str | None:
    try:
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False
    return True


def _in_initial_namespace() -> bool:
    return (_PROC / "self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
