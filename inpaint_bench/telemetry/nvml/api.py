"""The narrow edge to NVML: what the sidecar may ask of a GPU. `binding` asks a real one, `replay` a recording.

Devices are found by UUID only. Indices change between reboots, need not match CUDA's, and are renumbered
under device cgroups. Every failure is one exception class that carries NVML's return code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

MIN_GAP_NS: Final = 50_000_000  # below 50 ms NVML gives spurious NOT_SUPPORTED and zeros (zeus#186)
NOT_IN_CAPTURE: Final = -1  # our own code, never NVML's: replay has no recording of this call

CODES: Final = {
    NOT_IN_CAPTURE: "not in capture",
    1: "uninitialized",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "driver not loaded",
    12: "library not found",
    13: "function not found",
    15: "GPU is lost",
    16: "reset required",
    17: "blocked by the operating system",
    18: "library and driver versions differ",
    26: "deprecated",
    999: "unknown",
}

Handle = Any  # an adapter's own name for an open device


class NvmlError(Exception):
    """A call failed with NVML's return code `code`."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: {CODES.get(code, 'NVML error')} (NVML code {code})")
        self.code = code
        self.call = call


class FieldValue(NamedTuple):
    """One element of a field query: its own return code, and its value where that is 0."""

    code: int
    value: float | None
    latency_us: int = 0


class Utilization(NamedTuple):
    gpu_pct: int  # share of time with at least one kernel running
    memory_pct: int  # share of time memory was read or written; not bandwidth, not VRAM


class MemoryInfo(NamedTuple):
    """Bytes, memory info v2: used does not contain reserved."""

    total: int
    reserved: int
    used: int
    free: int


class EccErrors(NamedTuple):
    """Total memory errors. Corrected ones cost nothing but are a sign."""

    corrected: int
    uncorrected: int


class RemappedRows(NamedTuple):
    corrected: int  # rows remapped because of correctable errors
    uncorrected: int
    pending: int  # 1: takes effect at the next reset
    failed: int  # 1: no spare row was left


class GpmWindow(NamedTuple):
    """Means over the time since the last read, one per metric asked for, each with its own return code."""

    window_ms: float
    metrics: list[FieldValue]


class Xid(NamedTuple):
    uuid: str | None  # None: the GPU no longer gives its name
    number: int


class Nvml(Protocol):
    """What is asked of a GPU. Every method may raise NvmlError; none returns a stand-in value."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def driver_version(self) -> str: ...
    def nvml_version(self) -> str: ...
    def uuids(self) -> list[str]: ...
    def device(self, uuid: str) -> Handle: ...
    def uuid(self, handle: Handle) -> str: ...
    def name(self, handle: Handle) -> str: ...
    def pci_bus_id(self, handle: Handle) -> str: ...
    def minor(self, handle: Handle) -> int: ...
    def vbios(self, handle: Handle) -> str: ...
    def power_limit_mw(self, handle: Handle) -> int: ...
    def persistence_mode(self, handle: Handle) -> int: ...
    def ecc_mode(self, handle: Handle) -> int: ...
    def mig_mode(self, handle: Handle) -> int: ...
    def max_sm_clock_mhz(self, handle: Handle) -> int: ...
    def fields(self, handle: Handle, ids: Sequence[tuple[int, int]]) -> list[FieldValue]: ...
    def utilization(self, handle: Handle) -> Utilization: ...
    def total_energy_mj(self, handle: Handle) -> int: ...
    def sm_clock_mhz(self, handle: Handle) -> int: ...
    def mem_clock_mhz(self, handle: Handle) -> int: ...
    def throttle_reasons(self, handle: Handle) -> int: ...
    def temperature_c(self, handle: Handle) -> int: ...
    def memory(self, handle: Handle) -> MemoryInfo: ...
    def gpm(self, handle: Handle, ids: Sequence[int]) -> GpmWindow | None: ...
    def ecc_volatile(self, handle: Handle) -> EccErrors: ...
    def ecc_aggregate(self, handle: Handle) -> EccErrors: ...
    def remapped_rows(self, handle: Handle) -> RemappedRows: ...
    def compute_processes(self, handle: Handle) -> list[int]: ...
    def event_set(self) -> Any: ...
    def watch_xids(self, events: Any, handle: Handle) -> None: ...
    def next_xid(self, events: Any, timeout_ms: int) -> Xid | None: ...
    def free_events(self, events: Any) -> None: ...


_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)


def gpu_uuid(text: str) -> str:
    """NVML's "GPU-..." of a UUID that torch prints without prefix. ValueError on anything else."""
    if text.upper().startswith("MIG-"):
        raise ValueError(f"{text}: a MIG slice has no power or utilisation of its own; give a whole GPU")
    match = _UUID.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r}: not a GPU's UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")
    return f"GPU-{match[1].lower()}"
