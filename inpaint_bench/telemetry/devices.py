"""The GPUs a sidecar watches: found by UUID, described once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inpaint_bench.telemetry.nvml.api import Handle, Nvml, NvmlError
from inpaint_bench.telemetry.sampling.streams import LANES, Reader, null_reason
from inpaint_bench.telemetry.sources.co_tenants import Processes


@dataclass
class Xids:
    """What was heard of one GPU's errors (Xids), over the run."""

    numbers: Counter[int] = field(default_factory=Counter)
    listened: bool = False
    reason: str | None = "not_started"

    def account(self) -> dict[str, Any]:
        """For telemetry.json. count: null where nobody listened; reason: why nobody does, or no longer."""
        return {
            "count": self.numbers.total() if self.listened else None,
            "reason": self.reason,
            "numbers": {str(number): count for number, count in sorted(self.numbers.items())},
        }


@dataclass
class Device:
    uuid: str
    handle: Handle
    facts: dict[str, Any]
    readers: dict[str, Reader] = field(default_factory=lambda: {lane.name: Reader(lane) for lane in LANES})
    power_limit_w: float | None = None  # the enforced limit when it was last looked at
    lost: bool = False
    health: dict[str, Any] = field(default_factory=lambda: {"start": None, "end": None})
    processes: Processes = field(default_factory=Processes)
    xids: Xids = field(default_factory=Xids)


def open_devices(nvml: Nvml, uuids: Sequence[str]) -> list[Device]:
    """Every GPU asked for. Raises NvmlError; ValueError for one that is not here or in MIG slices."""
    devices = []
    for uuid in uuids:
        handle = open_device(nvml, uuid)
        facts = describe(nvml, handle)
        if facts["mig_mode"]:
            raise ValueError(f"{uuid} is in MIG mode: its power and utilisation belong to no single job")
        devices.append(Device(uuid, handle, facts, power_limit_w=facts["power_limit_w"]))
    return devices


def open_device(nvml: Nvml, uuid: str) -> Handle:
    """Handle of a GPU whose UUID was checked. Raises ValueError where NVML does not list it."""
    try:
        handle = nvml.device(uuid)
    except NvmlError as error:
        if error.code not in (2, 6):
            raise
        raise ValueError(f"{uuid} is not here; NVML lists {', '.join(nvml.uuids()) or 'no GPU'}") from None
    if (answered := nvml.uuid(handle)) != uuid:
        raise ValueError(f"{uuid} was asked for and {answered} answered")
    return handle


def describe(nvml: Nvml, handle: Handle) -> dict[str, Any]:
    """What does not change while a run lasts; null where not given, with the reasons under `nulls`.

    power_limit_w is the enforced limit, memory_mib the total with what the driver reserves.
    """
    nulls: dict[str, str] = {}

    def ask(name: str, read: Callable[[Handle], Any]) -> Any:
        try:
            return read(handle)
        except NvmlError as error:
            nulls[name] = null_reason(error.code).value
            return None

    limit_mw = ask("power_limit_w", nvml.power_limit_mw)
    memory = ask("memory_mib", nvml.memory)
    return {
        "uuid": nvml.uuid(handle),
        "name": ask("name", nvml.name),
        "pci_bus_id": ask("pci_bus_id", nvml.pci_bus_id),
        "minor": ask("minor", nvml.minor),
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "memory_mib": None if memory is None else round(memory.total / 2**20),
        "max_sm_clock_mhz": ask("max_sm_clock_mhz", nvml.max_sm_clock_mhz),
        "persistence_mode": ask("persistence_mode", nvml.persistence_mode),
        "ecc_mode": ask("ecc_mode", nvml.ecc_mode),
        "mig_mode": ask("mig_mode", nvml.mig_mode),
        "vbios": ask("vbios", nvml.vbios),
        "energy_start_mj": ask("energy_start_mj", nvml.total_energy_mj),
        "nulls": nulls,
    }
