"""The GPUs that a sidecar samples: opened by UUID, described once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pynvml

from inpaint_bench.core.records import Device
from inpaint_bench.telemetry.nvml import Nvml
from inpaint_bench.telemetry.nvml.api import Handle, NvmlError, null_reason
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


def open_devices(nvml: Nvml, uuids: Sequence[str]) -> list[DeviceState]:
    """Open and describe GPUs. Raises NvmlError; ValueError if a GPU does not exist here or is in MIG mode."""
    devices = []
    for uuid in uuids:
        try:
            handle = nvml.device(uuid)
        except NvmlError as error:
            # Either code means an unknown UUID; any other one is a failure of the driver or the card.
            if error.code not in (pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND):
                raise
            listed = ", ".join(nvml.uuids()) or "none"
            raise ValueError(f"GPU {uuid} does not exist here; NVML lists {listed}") from None
        if (actual := nvml.uuid(handle)) != uuid:
            raise ValueError(f"NVML opened GPU {actual} in place of {uuid}")
        facts = describe(nvml, handle)
        if facts.mig_mode:
            raise ValueError(f"{uuid} is in MIG mode: its power and utilisation belong to no single job")
        devices.append(DeviceState(facts, handle, power_limit_w=facts.power_limit_w))
    return devices


def describe(nvml: Nvml, handle: Handle) -> Device:
    """Return what does not change during a run; None if it is not given, with the reasons in `nulls`."""
    facts: dict[str, Any] = {}
    nulls: dict[str, str] = {}
    for name, query in _FACTS.items():
        try:
            facts[name] = nvml.query(handle, query)
        except NvmlError as error:
            nulls[name] = null_reason(error.code).value
    if "power_limit_w" in facts:
        facts["power_limit_w"] /= 1000
    if "memory_mib" in facts:
        facts["memory_mib"] = round(facts["memory_mib"][0] / MIB)  # the total
    return Device(uuid=nvml.uuid(handle), **facts, nulls=nulls)
