"""NVML through NVIDIA's binding, nvidia-ml-py (module pynvml): names, codes and errors, and the driver of this machine.

GPUs are opened by UUID only: NVML's indices change between reboots, need not match CUDA's, and are renumbered under
device cgroups. Every failure is an `NvmlError` with NVML's return code.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import pynvml

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import CounterWindow, DriverError, Fault, Handle, Value, Xid

# The deprecated PyPI project "pynvml" installs a package that shadows NVIDIA's module of the same name.
if not hasattr(pynvml, "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN"):  # since 12.575
    raise UserError(f"{pynvml.__file__} is not nvidia-ml-py 12.575 or newer; pip uninstall pynvml, then install that")

NOT_IN_CAPTURE: Final = -1  # our own code: replay has no recording of this call
_ERROR_NAMES: Final = {
    code: name.removeprefix("NVML_ERROR_").lower().replace("_", " ")
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
} | {NOT_IN_CAPTURE: "not in capture"}

_NULL_REASONS: Final = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: Null.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: Null.NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Null.DRIVER_TOO_OLD,
    pynvml.NVML_ERROR_GPU_IS_LOST: Null.GPU_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Null.GPU_LOST,
    pynvml.NVML_ERROR_DEPRECATED: Null.NOT_SUPPORTED,  # the driver has removed the feature
    NOT_IN_CAPTURE: Null.NOT_IN_CAPTURE,
}

_FAULTS: Final = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Fault.NO_DRIVER,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Fault.NO_DRIVER,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Fault.DRIVER_REPLACED,
    pynvml.NVML_ERROR_UNINITIALIZED: Fault.BROKEN,
    # A container runtime withdrew the device (nvidia-container-toolkit, issue 48).
    pynvml.NVML_ERROR_OPERATING_SYSTEM: Fault.BROKEN,
    pynvml.NVML_ERROR_UNKNOWN: Fault.BROKEN,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: Fault.UNKNOWN_GPU,
    pynvml.NVML_ERROR_NOT_FOUND: Fault.UNKNOWN_GPU,
}

# Reading -> field id and scope.
FIELDS: Final = {
    # Not nvmlDeviceGetPowerUsage: it is a 1-s average on some cards and a 25-ms window on others.
    "power_instant_mw": (pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_GPU),
    "power_avg1s_mw": (pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_POWER_SCOPE_GPU),
    "energy_mj": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0),
    "power_mem_avg_mw": (pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_POWER_SCOPE_MEMORY),
    "temp_mem_c": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),
    "throttle_power_cap_ns": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP, 0),
    "throttle_sw_thermal_ns": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, 0),
    "throttle_hw_thermal_ns": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, 0),
    "throttle_power_brake_ns": (pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, 0),
    "pcie_replays": (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0),
    "recovery_action": (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
}

# Performance counter -> GPM metric.
METRICS: Final = {
    "sm_active_pct": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_pct": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_active_pct": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram_active_pct": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "pcie_tx_mib_s": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_rx_mib_s": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_tx_mib_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_rx_mib_s": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}


def error_text(code: int) -> str:
    """Return NVML's name of a return code, such as "not supported (NVML code 3)"."""
    return f"{_ERROR_NAMES.get(code, 'NVML error')} (NVML code {code})"


def null_reason(code: int) -> Null:
    """Return why a value is null, from the return code of its call."""
    return _NULL_REASONS.get(code, Null.ERROR)


class NvmlError(DriverError):
    """A call failed with NVML's return code `code`."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(call, error_text(code), null_reason(code), code, _FAULTS.get(code))


def nvml_value(code: int, value: Any, call: str, latency_us: int = 0) -> Value:
    """Return a reading from the return code and the value of one element of a field or GPM query."""
    if code != pynvml.NVML_SUCCESS or value is None:
        return Value(None, NvmlError(code or pynvml.NVML_ERROR_UNKNOWN, call), latency_us)
    return Value(value, None, latency_us)


_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)


def gpu_uuid(text: str) -> str:
    """Return a UUID in NVML's form, "GPU-...", which torch prints without the prefix. Raises ValueError."""
    if text.upper().startswith("MIG-"):
        raise ValueError(f"{text}: a MIG slice has no power or utilisation of its own; give a whole GPU")
    match = _UUID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a GPU UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")
    return f"GPU-{match[1].lower()}"


# --- this machine's driver -----------------------------------------------------------------------

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
# Codes after which `_call_first` tries the older name of a function.
_NAME_UNKNOWN: Final = frozenset(
    {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH, pynvml.NVML_ERROR_DEPRECATED}
)
_MIN_GPM_WINDOW_NS: Final = 100_000_000  # NVIDIA asks for more than 100 ms between two samples
_MAX_GPM_WINDOW_NS: Final = 30_000_000_000  # the process was stopped meanwhile
_MEMORY_ERRORS: Final = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)

# Name in capture files and in this project -> how NVML is asked. Tuples are in the order of the columns they feed.
QUERIES: Final[Mapping[str, Callable[[Handle], Any]]] = {
    "name": lambda gpu: call("nvmlDeviceGetName", gpu),
    "pci_bus_id": lambda gpu: call("nvmlDeviceGetPciInfo", gpu).busId,
    "minor": lambda gpu: call("nvmlDeviceGetMinorNumber", gpu),
    "vbios": lambda gpu: call("nvmlDeviceGetVbiosVersion", gpu),
    "power_limit_mw": lambda gpu: call("nvmlDeviceGetEnforcedPowerLimit", gpu),
    "persistence_mode": lambda gpu: call("nvmlDeviceGetPersistenceMode", gpu),
    "ecc_mode": lambda gpu: call("nvmlDeviceGetEccMode", gpu)[0],
    "mig_mode": lambda gpu: call("nvmlDeviceGetMigMode", gpu)[0],
    "max_sm_clock_mhz": lambda gpu: call("nvmlDeviceGetMaxClockInfo", gpu, pynvml.NVML_CLOCK_SM),
    "total_energy_mj": lambda gpu: call("nvmlDeviceGetTotalEnergyConsumption", gpu),
    # Share of time with at least one kernel running, and with memory traffic: neither bandwidth nor VRAM.
    "utilization": lambda gpu: _members(call("nvmlDeviceGetUtilizationRates", gpu), "gpu", "memory"),
    "sm_clock_mhz": lambda gpu: call("nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_SM),
    "mem_clock_mhz": lambda gpu: call("nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_MEM),
    "throttle_reasons": lambda gpu: _call_first(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), gpu
    ),
    "temperature_c": lambda gpu: _call_first(
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), gpu, pynvml.NVML_TEMPERATURE_GPU
    ),
    # Bytes. In version 2 `used` excludes `reserved`.
    "memory": lambda gpu: _members(
        call("nvmlDeviceGetMemoryInfo", gpu, pynvml.nvmlMemory_v2), "total", "reserved", "used", "free"
    ),
    # Corrected and uncorrected errors since the driver was loaded, and over the card's life.
    "ecc_volatile": lambda gpu: _ecc_errors(gpu, pynvml.NVML_VOLATILE_ECC),
    "ecc_aggregate": lambda gpu: _ecc_errors(gpu, pynvml.NVML_AGGREGATE_ECC),
    "remapped_rows": lambda gpu: tuple(map(int, call("nvmlDeviceGetRemappedRows", gpu))),
}


class _GpmReader:
    """GPM of one GPU, the performance counters of Hopper and later: two samples, and the means between them.

    The buffers are swapped after every read, so that the windows follow each other without a gap. A failed read costs
    no more than its own window. Raises NvmlError if the card has no GPM.
    """

    def __init__(self, handle: Handle) -> None:
        if not call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
            raise NvmlError(pynvml.NVML_ERROR_NOT_SUPPORTED, "nvmlGpmQueryDeviceSupport")
        self._older, self._newer = call("nvmlGpmSampleAlloc"), call("nvmlGpmSampleAlloc")
        self._newer_ns: int | None = None  # when the newer sample was taken

    def read(self, handle: Handle, metrics: Sequence[int]) -> CounterWindow | None:
        """Return the metrics since the last read; None on the first, too early or too late read. Raises NvmlError."""
        now_ns = time.monotonic_ns()
        window_ns = None if self._newer_ns is None else now_ns - self._newer_ns
        if window_ns is not None and window_ns <= _MIN_GPM_WINDOW_NS:
            return None
        # Into the older buffer, which becomes the newer one: if the metrics fail below, the next window starts here.
        call("nvmlGpmSampleGet", handle, self._older)
        self._older, self._newer, self._newer_ns = self._newer, self._older, now_ns
        # A window across a pause would be the mean of a time for which nothing else was sampled.
        if window_ns is None or window_ns > _MAX_GPM_WINDOW_NS:
            return None
        query = pynvml.c_nvmlGpmMetricsGet_t()
        query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(metrics)
        query.sample1, query.sample2 = self._older, self._newer
        for index, metric in enumerate(metrics):
            query.metrics[index].metricId = metric
        call("nvmlGpmMetricsGet", query)
        return CounterWindow(window_ns / 1e6, [_gpm_value(query.metrics[index]) for index in range(len(metrics))])

    def free(self) -> None:
        """Free the buffers; to be called before NVML is closed."""
        for buffer in (self._older, self._newer):
            with contextlib.suppress(NvmlError):
                call("nvmlGpmSampleFree", buffer)


class RealNvml:
    """NVML of this machine, as far as the sidecar uses it.

    Every method may raise NvmlError; none returns a substitute value. Creates no CUDA context and ignores
    CUDA_VISIBLE_DEVICES.
    """

    def __init__(self) -> None:
        self._gpm: dict[str, _GpmReader] = {}  # by UUID: after NVML was reopened, the handle is another
        self._events: Any = None  # collects Xids, until NVML is closed

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        call("nvmlInit")

    def close(self) -> None:
        while self._gpm:
            self._gpm.popitem()[1].free()
        if self._events is not None:
            with contextlib.suppress(NvmlError):
                call("nvmlEventSetFree", self._events)
            self._events = None
        call("nvmlShutdown")

    def driver_version(self) -> str:
        return call("nvmlSystemGetDriverVersion")

    def library_version(self) -> str:
        return call("nvmlSystemGetNVMLVersion")

    def uuids(self) -> list[str]:
        """Return the UUIDs of the GPUs that this process may open."""
        uuids = []
        for index in range(call("nvmlDeviceGetCount")):
            try:
                uuids.append(self.uuid(call("nvmlDeviceGetHandleByIndex", index)))
            except NvmlError:  # the count includes GPUs that a cgroup forbids
                continue
        return uuids

    def device(self, uuid: str) -> Handle:
        return call("nvmlDeviceGetHandleByUUID", uuid)

    def uuid(self, handle: Handle) -> str:
        return call("nvmlDeviceGetUUID", handle)

    def query(self, handle: Handle, name: str) -> Any:
        """Return the result of one of QUERIES: a number, a text, or a tuple of numbers."""
        return QUERIES[name](handle)

    def fields(self, handle: Handle, names: Sequence[str]) -> list[Value]:
        """Return the values of FIELDS by one call."""
        elements = call("nvmlDeviceGetFieldValues", handle, [FIELDS[name] for name in names])
        return [_field_value(element) for element in elements]

    def counters(self, handle: Handle, names: Sequence[str]) -> CounterWindow | None:
        """Return METRICS over the time since the last call; None if there is no window yet."""
        uuid = self.uuid(handle)
        if uuid not in self._gpm:
            self._gpm[uuid] = _GpmReader(handle)
        return self._gpm[uuid].read(handle, [METRICS[name] for name in names])

    def compute_processes(self, handle: Handle) -> list[int]:
        """Return the ids of the processes with a compute context. Takes 0.1 to 0.2 ms, at worst 26 ms (H100, H200)."""
        names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2")
        return [int(process.pid) for process in _call_first(names, handle)]

    def power_limit_mw(self, handle: Handle) -> int:
        """Return the limit that root set, or the default."""
        return int(call("nvmlDeviceGetPowerManagementLimit", handle))

    def power_limit_range_mw(self, handle: Handle) -> tuple[int, int]:
        """Return the least and the highest limit that the card takes."""
        least, most = call("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        return int(least), int(most)

    def set_power_limit_mw(self, handle: Handle, limit: int) -> None:
        """Set the limit. Only root may."""
        call("nvmlDeviceSetPowerManagementLimit", handle, limit)

    def watch_xids(self, handle: Handle) -> None:
        """Collect the Xids of a GPU from now on, until NVML is closed."""
        if self._events is None:
            self._events = call("nvmlEventSetCreate")
        call("nvmlDeviceRegisterEvents", handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def next_xid(self) -> Xid | None:
        """Return the next collected Xid, None if there is none. Does not wait."""
        if self._events is None:
            return None
        try:
            # A timeout of 0 does not wait: NVML returns TIMEOUT if no event is queued.
            event = call("nvmlEventSetWait_v2", self._events, 0)
        except NvmlError as error:
            if error.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        if not int(event.eventType) & pynvml.nvmlEventTypeXidCriticalError:
            return None
        try:
            uuid = self.uuid(event.device)
        except NvmlError:  # the GPU may be lost since its Xid
            uuid = None
        return Xid(uuid, int(event.eventData))


def call(name: str, *args: Any) -> Any:
    """Call an NVML function. Raises NvmlError, also if the binding does not know it."""
    function = getattr(pynvml, name, None)
    if function is None:
        raise NvmlError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, name)
    try:
        return function(*args)
    except pynvml.NVMLError as error:
        raise NvmlError(int(error.value), name) from None


def _call_first(names: Sequence[str], *args: Any) -> Any:
    """Call the first of these functions, newest first, that both the binding and the driver know."""
    *newer, oldest = names
    for name in newer:
        try:
            return call(name, *args)
        except NvmlError as error:
            if error.code not in _NAME_UNKNOWN:
                raise
    return call(oldest, *args)


def _field_value(element: Any) -> Value:
    """Return a field by its value type; an unknown type is an error."""
    member = _UNION_MEMBERS.get(int(element.valueType))
    value = getattr(element.value, member) if member else None
    return nvml_value(int(element.nvmlReturn), value, "nvmlDeviceGetFieldValues", int(element.latencyUsec))


def _ecc_errors(handle: Handle, counter: int) -> tuple[int, ...]:
    return tuple(int(call("nvmlDeviceGetTotalEccErrors", handle, kind, counter)) for kind in _MEMORY_ERRORS)


def _members(structure: Any, *names: str) -> tuple[int, ...]:
    return tuple(int(getattr(structure, name)) for name in names)


def _gpm_value(metric: Any) -> Value:
    value = float(metric.value)
    return nvml_value(int(metric.nvmlReturn), value if math.isfinite(value) else None, "nvmlGpmMetricsGet")
