"""NVML itself, through `pynvml`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .api import EccErrors, FieldValue, GpmWindow, Handle, MemoryInfo, NvmlError, RemappedRows, Utilization, Xid
from .gpm import Gpm

# valueType of a field -> member of its union
_MEMBER: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
_TEMPERATURE_GPU: Final = 0
_CLOCK_SM, _CLOCK_MEM = 1, 2
_ECC_VOLATILE, _ECC_AGGREGATE = 0, 1  # since the driver was loaded; over the card's life
_XID_EVENT: Final = 0x8
_TIMEOUT: Final = 10


class RealNvml:
    """NVML through `nvidia-ml-py`. Makes no CUDA context and heeds no CUDA_VISIBLE_DEVICES."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise NvmlError(12, "import pynvml (pip install nvidia-ml-py)") from None
        # The PyPI project named pynvml calls itself deprecated and shadows the vendor's binding.
        if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
            raise NvmlError(13, f"{pynvml.__file__} is not nvidia-ml-py (pip uninstall pynvml)")
        self._binding: Any = pynvml
        self._preferred: dict[tuple[str, ...], str] = {}
        self._gpm = Gpm(pynvml, self._call)

    def _call(self, name: str, *args: Any) -> Any:
        function = getattr(self._binding, name, None)
        if function is None:
            raise NvmlError(13, name)
        try:
            return function(*args)
        except self._binding.NVMLError as error:
            raise NvmlError(int(error.value), name) from None

    def _first(self, names: tuple[str, ...], *args: Any) -> Any:
        """The first of several names for one call that binding and driver both know; then always that one."""
        if names in self._preferred:
            return self._call(self._preferred[names], *args)
        for name in names:
            try:
                value = self._call(name, *args)
            except NvmlError as error:
                if error.code not in (13, 25, 26) or name == names[-1]:
                    raise
            else:
                self._preferred[names] = name
                return value
        raise AssertionError("unreachable")

    def open(self) -> None:
        self._call("nvmlInit")

    def close(self) -> None:
        self._gpm.forget()
        self._call("nvmlShutdown")

    def driver_version(self) -> str:
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def nvml_version(self) -> str:
        return _text(self._call("nvmlSystemGetNVMLVersion"))

    def uuids(self) -> list[str]:
        """UUIDs of the GPUs that can be opened; the count may include some that a cgroup forbids."""
        found = []
        for index in range(self._call("nvmlDeviceGetCount")):
            try:
                found.append(self.uuid(self._call("nvmlDeviceGetHandleByIndex", index)))
            except NvmlError:
                continue
        return found

    def device(self, uuid: str) -> Handle:
        return self._call("nvmlDeviceGetHandleByUUID", uuid)

    def uuid(self, handle: Handle) -> str:
        return _text(self._call("nvmlDeviceGetUUID", handle))

    def name(self, handle: Handle) -> str:
        return _text(self._call("nvmlDeviceGetName", handle))

    def pci_bus_id(self, handle: Handle) -> str:
        return _text(self._call("nvmlDeviceGetPciInfo", handle).busId)

    def minor(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetMinorNumber", handle))

    def vbios(self, handle: Handle) -> str:
        return _text(self._call("nvmlDeviceGetVbiosVersion", handle))

    def power_limit_mw(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetEnforcedPowerLimit", handle))

    def persistence_mode(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetPersistenceMode", handle))

    def ecc_mode(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetEccMode", handle)[0])

    def mig_mode(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetMigMode", handle)[0])

    def max_sm_clock_mhz(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM))

    def fields(self, handle: Handle, ids: Sequence[tuple[int, int]]) -> list[FieldValue]:
        """One driver call for all fields. Each element carries its own return code."""
        answer = self._call("nvmlDeviceGetFieldValues", handle, list(ids))
        return [_field_value(element) for element in answer]

    def utilization(self, handle: Handle) -> Utilization:
        rates = self._call("nvmlDeviceGetUtilizationRates", handle)
        return Utilization(int(rates.gpu), int(rates.memory))

    def total_energy_mj(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetTotalEnergyConsumption", handle))

    def sm_clock_mhz(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetClockInfo", handle, _CLOCK_SM))

    def mem_clock_mhz(self, handle: Handle) -> int:
        return int(self._call("nvmlDeviceGetClockInfo", handle, _CLOCK_MEM))

    def throttle_reasons(self, handle: Handle) -> int:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        return int(self._first(names, handle))

    def temperature_c(self, handle: Handle) -> int:
        names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
        return int(self._first(names, handle, _TEMPERATURE_GPU))

    def memory(self, handle: Handle) -> MemoryInfo:
        info = self._call("nvmlDeviceGetMemoryInfo", handle, self._binding.nvmlMemory_v2)
        return MemoryInfo(int(info.total), int(info.reserved), int(info.used), int(info.free))

    def gpm(self, handle: Handle, ids: Sequence[int]) -> GpmWindow | None:
        """Means since the last call; None where there is no window yet. By UUID: a handle may be opened anew."""
        return self._gpm.read(self.uuid(handle), handle, ids)

    def ecc_volatile(self, handle: Handle) -> EccErrors:
        """Since the driver was loaded."""
        return self._ecc(handle, _ECC_VOLATILE)

    def ecc_aggregate(self, handle: Handle) -> EccErrors:
        """Over the card's life, as its memory keeps it."""
        return self._ecc(handle, _ECC_AGGREGATE)

    def _ecc(self, handle: Handle, counter: int) -> EccErrors:
        return EccErrors(*(int(self._call("nvmlDeviceGetTotalEccErrors", handle, kind, counter)) for kind in (0, 1)))

    def remapped_rows(self, handle: Handle) -> RemappedRows:
        return RemappedRows(*map(int, self._call("nvmlDeviceGetRemappedRows", handle)))

    def compute_processes(self, handle: Handle) -> list[int]:
        """Process ids of those with a compute context. Takes milliseconds under the driver's lock."""
        names = tuple("nvmlDeviceGetComputeRunningProcesses" + version for version in ("", "_v2"))
        return [int(process.pid) for process in self._first(names, handle)]

    def event_set(self) -> Any:
        return self._call("nvmlEventSetCreate")

    def watch_xids(self, events: Any, handle: Handle) -> None:
        self._call("nvmlDeviceRegisterEvents", handle, _XID_EVENT, events)

    def next_xid(self, events: Any, timeout_ms: int) -> Xid | None:
        """Wait for an Xid of a registered GPU; None where none came in time. 999: the driver knows no number."""
        try:
            event = self._call("nvmlEventSetWait_v2", events, timeout_ms)
        except NvmlError as error:
            if error.code == _TIMEOUT:
                return None
            raise
        if not int(event.eventType) & _XID_EVENT:
            return None
        try:
            uuid = self.uuid(event.device)
        except NvmlError:  # an Xid may well be the last word of a GPU
            uuid = None
        return Xid(uuid, int(event.eventData))

    def free_events(self, events: Any) -> None:
        self._call("nvmlEventSetFree", events)


def _field_value(element: Any) -> FieldValue:
    """A field's number by its value type; an unknown type is an error, not a guess."""
    code, kind = int(element.nvmlReturn), int(element.valueType)
    if code != 0:
        return FieldValue(code, None, int(element.latencyUsec))
    if not 0 <= kind < len(_MEMBER):
        return FieldValue(999, None, int(element.latencyUsec))
    return FieldValue(0, getattr(element.value, _MEMBER[kind]), int(element.latencyUsec))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
