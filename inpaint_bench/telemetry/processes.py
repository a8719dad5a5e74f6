"""Who else computes on our GPUs: a thread that asks at the start and every 30 s, and once more at the end.

A process list takes milliseconds under the driver's lock, so it is never asked for in a sampling lane.
NVML may give process ids of another pid namespace (containers): then nothing is claimed of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .gate import Gate
from .lanes import null_reason
from .nvml import Nvml, NvmlError

if TYPE_CHECKING:
    from .devices import Device

EVERY_S: Final = 30.0
_JOIN_S: Final = 0.2
_INITIAL_NAMESPACE: Final = 0xEFFFFFFC  # inode of /proc/self/ns/pid outside of every container: PROC_PID_INIT_INO
_PROC: Final = Path("/proc")


@dataclass
class Processes:
    """What is known of the processes on one GPU, over the run."""

    checks: int = 0  # lists that NVML gave
    failed: int = 0
    strangers: dict[int, str | None] = field(default_factory=dict)  # pid -> name
    unknown: set[int] = field(default_factory=set)
    reason: str | None = None  # why the last list was not given
    trusted: bool = False  # a list was given whose ids are those of our namespace

    @property
    def verdict(self) -> str | None:
        """alone | co_tenant | unknown; None where NVML gave no list at all."""
        if self.strangers:
            return "co_tenant"
        if not self.checks:
            return None
        return "alone" if self.trusted and not self.unknown else "unknown"

    def account(self) -> dict[str, Any]:
        """For telemetry.json. A check may have missed a process that came and went between two."""
        return {
            "verdict": self.verdict,
            "reason": self.reason if self.verdict is None else None,
            "checks": self.checks,
            "failed": self.failed,
            "co_tenants": [{"pid": pid, "name": name} for pid, name in list(self.strangers.items())],
            "unknown_pids": sorted(self.unknown),
        }


@dataclass(frozen=True)
class Sorted:
    """One list of process ids, told apart."""

    ours: frozenset[int]
    strangers: dict[int, str | None]
    unknown: frozenset[int]
    trusted: bool


def tell_apart(pids: Iterable[int], worker: int, proc: Path = _PROC, outside: bool | None = None) -> Sorted:
    """Ours are the worker and its descendants. `outside`: we are in no container's pid namespace.

    Inside one, ids can be trusted only where one of them is ours, and an id that is not in /proc then belongs
    elsewhere. Outside, an id that is not in /proc has ended, or /proc hides other users' processes.
    """
    if outside is None:
        outside = _outside()
    seen = frozenset(pids)
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
    return Sorted(ours, strangers, frozenset(unknown), trusted=True)


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


class ProcessWatch:
    """`report(kind, detail, gpu_uuid)` hears `co_tenant` once per process and GPU. Ends with `stop`."""

    def __init__(
        self,
        nvml: Nvml,
        devices: Sequence[Device],
        worker: int,
        gate: Gate,
        report: Callable[[str, str, str | None], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._nvml = nvml
        self._devices = devices
        self._worker = worker
        self._gate = gate
        self._report = report
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """End the thread and look a last time; False where NVML still holds the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            return False
        self.check()
        return True

    def check(self) -> None:
        """One look at every GPU that is left. Never raises NvmlError."""
        for device in self._devices:
            if device.lost:
                continue
            known = device.processes
            try:
                with self._gate.calling():
                    pids = self._nvml.compute_processes(device.handle)
            except NvmlError as error:
                known.failed += 1
                known.reason = null_reason(error.code).value
                continue
            found = tell_apart(pids, self._worker)
            known.checks += 1
            known.trusted |= found.trusted
            known.unknown |= found.unknown
            for pid, name in found.strangers.items():
                if pid not in known.strangers:
                    known.strangers[pid] = name
                    self._report("co_tenant", f"pid {pid} {name or 'of unknown name'}", device.uuid)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self.check()
            due_s = max(due_s + self._every_s, time.monotonic())
