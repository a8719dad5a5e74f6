"""What `real`, which calls the driver, and `replay`, which plays a capture file, have in common.

GPUs are opened by UUID only: NVML's indices change between reboots, need not match CUDA's, and are renumbered under
device cgroups. Every failure is an `NvmlError` with NVML's return code.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import pynvml

from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import Null

# The deprecated PyPI project "pynvml" installs a package that shadows NVIDIA's module of the same name.
if not hasattr(pynvml, "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN"):  # since 12.575
    raise UserError(f"{pynvml.__file__} is not nvidia-ml-py 12.575 or newer; pip uninstall pynvml, then install that")

# Reading a GPU more often than every 50 ms is known to give spurious NOT_SUPPORTED and zeros (zeus, issue 186), which
# an H200 did not in 600 polls 5 ms apart. Less than 50 ms: at 20 Hz a late tick could otherwise never be made up for,
# the delays of all ticks would add up, and one in 220 was lost.
MIN_INTERVAL_NS: Final = 40_000_000
NOT_IN_CAPTURE: Final = -1  # our own code: replay has no recording of this call
OUT_OF_RANGE: Final = -2  # the same: the call gave what no card can measure
# The driver or the card will not offer the call later either.
NEVER_SUPPORTED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_DEPRECATED,
        NOT_IN_CAPTURE,
    }
)

_ERROR_NAMES: Final = {
    code: name.removeprefix("NVML_ERROR_").lower().replace("_", " ")
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
} | {NOT_IN_CAPTURE: "not in capture", OUT_OF_RANGE: "out of range"}

_NULL_REASONS: Final = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: Null.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: Null.NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: Null.DRIVER_TOO_OLD,
    pynvml.NVML_ERROR_GPU_IS_LOST: Null.GPU_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Null.GPU_LOST,
    pynvml.NVML_ERROR_DEPRECATED: Null.NOT_SUPPORTED,  # the driver has removed the feature
    NOT_IN_CAPTURE: Null.NOT_IN_CAPTURE,
    OUT_OF_RANGE: Null.OUT_OF_RANGE,
}

Handle = Any  # an open device, as the implementation represents it


def error_text(code: int) -> str:
    """Return NVML's name of a return code, such as "not supported (NVML code 3)"."""
    return f"{_ERROR_NAMES.get(code, 'NVML error')} (NVML code {code})"


def null_reason(code: int) -> Null:
    """Return why a value is null, from the return code of its call."""
    return _NULL_REASONS.get(code, Null.ERROR)


class NvmlError(Exception):
    """A call failed with NVML's return code `code`."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: {error_text(code)}")
        self.code = code


class FieldValue(NamedTuple):
    """One element of a field or GPM query: its own return code, and its value if that is 0."""

    code: int
    value: float | None
    latency_us: int = 0  # as the driver reports it


class GpmWindow(NamedTuple):
    """Means over the time since the previous read, one per requested metric."""

    window_ms: float
    metrics: list[FieldValue]


class Xid(NamedTuple):
    """An error that the driver reported; uuid is None if the GPU no longer gives its UUID."""

    uuid: str | None
    number: int


_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)


def gpu_uuid(text: str) -> str:
    """Return a UUID in NVML's form, "GPU-...", which torch prints without the prefix. Raises ValueError."""
    if text.upper().startswith("MIG-"):
        raise ValueError(f"{text}: a MIG slice has no power or utilisation of its own; give a whole GPU")
    match = _UUID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a GPU UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")
    return f"GPU-{match[1].lower()}"
