"""The GPUs that a sidecar samples: opened by UUID, described once, and whose processes compute on them.

NVML may give process ids of another pid namespace (in containers); such ids prove nothing.
"""

import atexit
import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from inpaint_bench.core.child import is_descendant
from inpaint_bench.core.records import Device
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import Driver, DriverError, Fault, Handle, PowerLimiter
from inpaint_bench.telemetry.report import CoTenant, DeviceReport, GpuHealth, ProcessReport, XidReport

from .streams import MIB, STREAMS, StreamReader

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


_NAMES: Final = "name pci_bus_id minor vbios max_sm_clock_mhz persistence_mode ecc_mode mig_mode"
# Field of records.Device -> query.
_FACTS: Final = {name: name for name in _NAMES.split()} | {
    "power_limit_w": "power_limit_mw",
    "memory_mib": "memory",
    "energy_start_mj": "total_energy_mj",
}


@dataclass
class DeviceState:
    """One GPU, what was read of it so far, and what happened to it."""

    facts: Device
    handle: Handle
    readers: dict[str, StreamReader] = field(default_factory=lambda: {s.name: StreamReader(s) for s in STREAMS})
    power_limit_w: float | None = None  # enforced, at the last check
    lost: bool = False
    health_start: GpuHealth | None = None
    health_end: GpuHealth | None = None
    processes: GpuProcesses = field(default_factory=GpuProcesses)
    xids: XidReport = field(default_factory=lambda: XidReport(reason="not_started"))
    retry_xids: bool = True  # the driver may offer them later

    @property
    def uuid(self) -> str:
        return self.facts.uuid

    def report(self) -> DeviceReport:
        """Return the record for telemetry.json."""
        errors: dict[str, dict[str, int]] = {}
        absent: list[str] = []
        for reader in self.readers.values():
            absent += sorted(reader.absent)
            for (column, code), count in sorted(reader.errors.items()):
                # A sensor that the card lacks is listed as absent, not as an error in each of its first reads.
                if column not in reader.absent:
                    errors.setdefault(column, {})[str(code)] = count
        return DeviceReport(
            **msgspec.structs.asdict(self.facts),
            power_limit_last_w=self.power_limit_w,
            lost=self.lost,
            absent=absent,
            errors=errors,
            health_start=self.health_start,
            health_end=self.health_end,
            processes=self.processes.report(),
            xids=self.xids,
        )


def open_devices(driver: Driver, uuids: Sequence[str]) -> list[DeviceState]:
    """Open and describe GPUs. Raises DriverError; ValueError if a GPU does not exist here or is in MIG mode."""
    devices = []
    for uuid in uuids:
        try:
            handle = driver.device(uuid)
        except DriverError as error:
            if error.fault is not Fault.UNKNOWN_GPU:
                raise
            listed = ", ".join(driver.uuids()) or "none"
            raise ValueError(f"GPU {uuid} does not exist here; NVML lists {listed}") from None
        if (actual := driver.uuid(handle)) != uuid:
            raise ValueError(f"NVML opened GPU {actual} in place of {uuid}")
        facts = describe(driver, handle)
        if facts.mig_mode:
            raise ValueError(f"{uuid} is in MIG mode: its power and utilisation belong to no single job")
        devices.append(DeviceState(facts, handle, power_limit_w=facts.power_limit_w))
    return devices


def describe(driver: Driver, handle: Handle) -> Device:
    """Return what does not change during a run; None if it is not given, with the reasons in `nulls`."""
    facts: dict[str, Any] = {}
    nulls: dict[str, str] = {}
    for name, query in _FACTS.items():
        try:
            facts[name] = driver.query(handle, query)
        except DriverError as error:
            nulls[name] = error.reason.value
    if "power_limit_w" in facts:
        facts["power_limit_w"] /= 1000
    if "memory_mib" in facts:
        facts["memory_mib"] = round(facts["memory_mib"][0] / MIB)  # the total
    return Device(uuid=driver.uuid(handle), **facts, nulls=nulls)


class PowerLimits:
    """Limits that this process has set. After SIGKILL nobody sets them back."""

    def __init__(self, driver: PowerLimiter, uuids: Sequence[str], watts: float) -> None:
        """Set the limit of GPUs. Raises ValueError if a card does not take it or the user may not set it."""
        self._driver = driver
        self._before: list[tuple[Handle, int]] = []  # mW
        atexit.register(self.restore)  # if the sidecar fails to start
        key = f"telemetry.power_limit_w={watts:g}"
        for uuid in uuids:
            handle = driver.device(uuid)
            try:
                before, (least, most) = driver.power_limit_mw(handle), driver.power_limit_range_mw(handle)
                if not least <= 1000 * watts <= most:
                    raise ValueError(f"{key}: {uuid} takes {least / 1000:g} to {most / 1000:g} W")
                driver.set_power_limit_mw(handle, round(1000 * watts))
            except DriverError as error:
                if error.reason is not Null.NO_PERMISSION:
                    raise ValueError(f"{key}: the limit of {uuid} cannot be set ({error})") from None
                raise ValueError(
                    f"{key}: only root may set the power limit of {uuid}; leave the key out, or ask the site to set it"
                ) from None
            self._before.append((handle, before))

    def restore(self) -> None:
        """Set all limits back, while the driver is open."""
        while self._before:
            handle, before = self._before.pop()
            with contextlib.suppress(DriverError):  # a GPU that is lost has no limit
                self._driver.set_power_limit_mw(handle, before)
