"""Whose the processes on a GPU are: ours, another's, or not to be told.

NVML may give process ids of another pid namespace (containers): then nothing is claimed of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_INITIAL_NAMESPACE: Final = 0xEFFFFFFC  # inode of /proc/self/ns/pid outside of every container: PROC_PID_INIT_INO
_PROC: Final = Path("/proc")
MOST_NAMED: Final = 100  # per GPU; jobs of seconds that come and go are thousands in a week
OURS, FOREIGN, UNKNOWN = "ours", "foreign", "unknown"  # all that a capture keeps of a process
# What replay gives for these words where NVML gives a process id: no process has such an id.
REPLAYED: Final = {OURS: -1, FOREIGN: -2, UNKNOWN: -3}


@dataclass
class Processes:
    """What is known of the processes on one GPU, over the run."""

    checks: int = 0  # lists that NVML gave
    failed: int = 0
    strangers: dict[int, str | None] = field(default_factory=dict)  # pid -> name
    unknown: set[int] = field(default_factory=set)
    reason: str | None = None  # why the last list was not given
    trusted: bool = False  # a list was given that holds whoever is there

    @property
    def verdict(self) -> str | None:
        """alone | co_tenant | unknown; None where NVML gave no list at all."""
        if self.strangers:
            return "co_tenant"
        if not self.checks:
            return None
        return "alone" if self.trusted and not self.unknown else "unknown"

    def account(self) -> dict[str, Any]:
        """For telemetry.json. A check may have missed a process that came and went between two.

        The lists hold 100 each at most.
        """
        return {
            "verdict": self.verdict,
            "reason": self.reason if self.verdict is None else None,
            "checks": self.checks,
            "failed": self.failed,
            "num_co_tenants": len(self.strangers),
            "co_tenants": [{"pid": pid, "name": name} for pid, name in list(self.strangers.items())[:MOST_NAMED]],
            "num_unknown": len(self.unknown),
            "unknown_pids": sorted(self.unknown)[:MOST_NAMED],
        }


@dataclass(frozen=True)
class Sorted:
    """One list of process ids, told apart."""

    ours: frozenset[int]
    strangers: dict[int, str | None]
    unknown: frozenset[int]
    trusted: bool  # who is not in it is not on the GPU


def tell_apart(pids: Iterable[int], worker: int, proc: Path = _PROC, outside: bool | None = None) -> Sorted:
    """Ours are the worker and its descendants. `outside`: we are in no container's pid namespace.

    Inside one, ids can be believed only where one of them is ours, and an id that is not in /proc then belongs
    elsewhere. The list is not trusted even then: NVIDIA's open kernel modules leave out whoever has no id in the
    caller's namespace (gpuGetProcWithObject), so that a list without strangers says nothing of other containers.
    Outside, an id that is not in /proc has ended, or /proc hides other users' processes.
    """
    if outside is None:
        outside = _outside()
    seen = frozenset(pids)
    if seen & frozenset(REPLAYED.values()):
        return _replayed(seen)
    ours = frozenset(pid for pid in seen if _descends(pid, worker, proc))
    rest = seen - ours
    if not outside and not ours:
        return Sorted(ours, {}, rest, trusted=False)
    strangers: dict[int, str | None] = {}
    unknown = set()
    for pid in sorted(rest):
        if (proc / str(pid)).exists():
            strangers[pid] = _name(pid, proc)
        elif not outside or pid == 0:
            unknown.add(pid)
        elif _exists(pid):
            strangers[pid] = None
    return Sorted(ours, strangers, frozenset(unknown), trusted=outside)


def _replayed(seen: frozenset[int]) -> Sorted:
    """As it was told apart when it was recorded. This machine's /proc knows nothing of those processes."""
    strangers: dict[int, str | None] = {pid: "in the capture" for pid in seen if pid == REPLAYED[FOREIGN]}
    unknown = seen - {REPLAYED[OURS]} - strangers.keys()
    return Sorted(seen & {REPLAYED[OURS]}, strangers, unknown, trusted=not unknown)


def _descends(pid: int, worker: int, proc: Path) -> bool:
    walked: set[int] = set()
    while pid > 1 and pid not in walked:
        if pid == worker:
            return True
        walked.add(pid)
        try:
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


def _exists(pid: int) -> bool:
    """Whether a process that /proc does not show is alive: another user's, under hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _outside() -> bool:
    try:
        return (_PROC / "self/ns/pid").stat().st_ino == _INITIAL_NAMESPACE
    except OSError:
        return False
