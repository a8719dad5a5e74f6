"""NVML through NVIDIA's binding, nvidia-ml-py (module pynvml)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pynvml

from .api import FieldValue, GpmWindow, Handle, NvmlError, Xid
from .gpm import GpmReader

# The member of the value union for each value type of a field.
_UNION_MEMBERS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
_NAME_UNKNOWN: Final = frozenset(
    {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, pynvml.NVML_ERROR_DEPRECATED}
)
_MEMORY_ERRORS: Final = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)

Call = Callable[..., Any]  # call(name or names of an NVML function, *arguments)

# Name in capture files and in this project -> how NVML is asked. Tuples are in the order of the columns they feed.
QUERIES: Final[Mapping[str, Callable[[Call, Handle], Any]]] = {
    "name": lambda call, gpu: _text(call("nvmlDeviceGetName", gpu)),
    "pci_bus_id": lambda call, gpu: _text(call("nvmlDeviceGetPciInfo", gpu).busId),
    "minor": lambda call, gpu: call("nvmlDeviceGetMinorNumber", gpu),
    "vbios": lambda call, gpu: _text(call("nvmlDeviceGetVbiosVersion", gpu)),
    "power_limit_mw": lambda call, gpu: call("nvmlDeviceGetEnforcedPowerLimit", gpu),
    "persistence_mode": lambda call, gpu: call("nvmlDeviceGetPersistenceMode", gpu),
    "ecc_mode": lambda call, gpu: call("nvmlDeviceGetEccMode", gpu)[0],
    "mig_mode": lambda call, gpu: call("nvmlDeviceGetMigMode", gpu)[0],
    "max_sm_clock_mhz": lambda call, gpu: call("nvmlDeviceGetMaxClockInfo", gpu, pynvml.NVML_CLOCK_SM),
    "total_energy_mj": lambda call, gpu: call("nvmlDeviceGetTotalEnergyConsumption", gpu),
    # Share of time with at least one kernel running, and with memory traffic: neither bandwidth nor VRAM.
    "utilization": lambda call, gpu: _members(call("nvmlDeviceGetUtilizationRates", gpu), "gpu", "memory"),
    "sm_clock_mhz": lambda call, gpu: call("nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_SM),
    "mem_clock_mhz": lambda call, gpu: call("nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_MEM),
    "throttle_reasons": lambda call, gpu: call(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), gpu
    ),
    "temperature_c": lambda call, gpu: call(
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), gpu, pynvml.NVML_TEMPERATURE_GPU
    ),
    # Bytes. In version 2 `used` excludes `reserved`.
    "memory": lambda call, gpu: _members(
        call("nvmlDeviceGetMemoryInfo", gpu, pynvml.nvmlMemory_v2), "total", "reserved", "used", "free"
    ),
    # Corrected and uncorrected errors since the driver was loaded, and over the card's life.
    "ecc_volatile": lambda call, gpu: _ecc_errors(call, gpu, pynvml.NVML_VOLATILE_ECC),
    "ecc_aggregate": lambda call, gpu: _ecc_errors(call, gpu, pynvml.NVML_AGGREGATE_ECC),
    "remapped_rows": lambda call, gpu: tuple(map(int, call("nvmlDeviceGetRemappedRows", gpu))),
}


class RealNvml:
    """NVML of this machine. Creates no CUDA context and ignores CUDA_VISIBLE_DEVICES."""

    def __init__(self) -> None:
        self._preferred: dict[tuple[str, ...], str] = {}
        self._gpm = GpmReader(self._call)

    def _call(self, names: str | tuple[str, ...], *args: Any) -> Any:
        """Call a function; of several names for one call, the first that both binding and driver know, from then on."""
        if isinstance(names, str):
            return self._call_one(names, *args)
        if names in self._preferred:
            return self._call_one(self._preferred[names], *args)
        for name in names:
            try:
                value = self._call_one(name, *args)
            except NvmlError as error:
                if error.code not in _NAME_UNKNOWN or name == names[-1]:
                    raise
            else:
                self._preferred[names] = name
                return value
        raise AssertionError("unreachable")

    @staticmethod
    def _call_one(name: str, *args: Any) -> Any:
        function = getattr(pynvml, name, None)
        if function is None:
            raise NvmlError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, name)
        try:
            return function(*args)
        except pynvml.NVMLError as error:
            raise NvmlError(int(error.value), name) from None

    def open(self) -> None:
        self._call("nvmlInit")

    def close(self) -> None:
        self._gpm.free()
        self._call("nvmlShutdown")

    def driver_version(self) -> str:
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def nvml_version(self) -> str:
        return _text(self._call("nvmlSystemGetNVMLVersion"))

    def uuids(self) -> list[str]:
        uuids = []
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                uuids.append(self.uuid(self._call("nvmlDeviceGetHandleByIndex", index)))
            except NvmlError:  # the count includes GPUs that a cgroup forbids
                continue
        return uuids

    def device(self, uuid: str) -> Handle:
        return self._call("nvmlDeviceGetHandleByUUID", uuid)

    def uuid(self, handle: Handle) -> str:
        return _text(self._call("nvmlDeviceGetUUID", handle))

    def query(self, handle: Handle, name: str) -> Any:
        return QUERIES[name](self._call, handle)

    def fields(self, handle: Handle, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
        return [_field_value(element) for element in self._call("nvmlDeviceGetFieldValues", handle, list(ids))]

    def gpm(self, handle: Handle, metrics: Sequence[int]) -> GpmWindow | None:
        # Windows are kept by UUID: after NVML was opened anew, the handle is another.
        return self._gpm.read(self.uuid(handle), handle, metrics)

    def compute_processes(self, handle: Handle) -> list[int]:
        names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")
        return [int(process.pid) for process in self._call(names, handle)]

    def event_set(self) -> Any:
        return self._call("nvmlEventSetCreate")

    def watch_xids(self, events: Any, handle: Handle) -> None:
        self._call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, events)

    def next_xid(self, events: Any, timeout_ms: int) -> Xid | None:
        try:
            event = self._call("nvmlEventSetWait_v2", events, timeout_ms)
        except NvmlError as error:
            if error.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        if not int(event.eventType) & pynvml.nvmlEventTypeXidCriticalError:
            return None
        try:
            uuid = self.uuid(event.device)
        except NvmlError:  # an Xid may be the last that is heard of a GPU
            uuid = None
        return Xid(uuid, int(event.eventData))

    def free_events(self, events: Any) -> None:
        self._call("nvmlEventSetFree", events)


def _field_value(element: Any) -> FieldValue:
    """Return a field by its value type; an unknown type is an error."""
    code, latency_us = int(element.nvmlReturn), int(element.latencyUsec)
    member = _UNION_MEMBERS.get(int(element.valueType))
    if code == pynvml.NVML_SUCCESS and member is None:
        code = pynvml.NVML_ERROR_UNKNOWN
    return FieldValue(code, None if code or member is None else getattr(element.value, member), latency_us)


def _ecc_errors(call: Call, handle: Handle, counter: int) -> tuple[int, ...]:
    return tuple(int(call("nvmlDeviceGetTotalEccErrors", handle, kind, counter)) for kind in _MEMORY_ERRORS)


def _members(structure: Any, *names: str) -> tuple[int, ...]:
    return tuple(int(getattr(structure, name)) for name in names)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
