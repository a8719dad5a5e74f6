"""What `real`, which calls the driver, and `replay`, which plays a capture file, have in common.

GPUs are opened by UUID only: NVML's indices change between reboots, need not match CUDA's, and are renumbered under
device cgroups. Every failure is an `NvmlError` with NVML's return code.
"""

from __future__ import annotations

import re
from typing import Any, Final

import pynvml

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import DriverError, Fault, Value

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
