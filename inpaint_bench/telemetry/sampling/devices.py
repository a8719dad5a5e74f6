"""The GPUs that a sidecar samples: opened by UUID, described once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.driver import Driver, DriverError, Fault, Handle
from inpaint_bench.telemetry.report import DeviceReport, GpuHealth, XidReport

from .co_tenants import GpuProcesses
from .streams import MIB, STREAMS, StreamReader

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
