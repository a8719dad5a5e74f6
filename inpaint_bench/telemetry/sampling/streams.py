"""What is read at which rate, and how one read becomes a row of the contract's tables.

Fast lane: power, energy counter, utilisation. Slow lane: the rest. A value that was not given is null and
the row's `nulls` says why; it is never zero. GPM lane: what only Hopper and later count, as means over the
whole interval. Process lists and PCIe throughput stay out: they take milliseconds under the driver's lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from inpaint_bench.core import schema as contract
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.nvml.api import NOT_IN_CAPTURE, Handle, Nvml, NvmlError

LOST: Final = frozenset({15, 16})  # this GPU is gone
BROKEN: Final = frozenset({1, 17, 999})  # NVML as a whole may have to be opened anew
FATAL: Final = 18  # the driver was replaced under us
_ABSENT: Final = frozenset({3, 13, 26, NOT_IN_CAPTURE})  # believed after PROBES reads in a row from the start
PROBES: Final = 3

_REASONS: Final = {
    3: Null.NOT_SUPPORTED,
    4: Null.NO_PERMISSION,
    13: Null.DRIVER_TOO_OLD,
    15: Null.GPU_LOST,
    16: Null.GPU_LOST,
    26: Null.NOT_SUPPORTED,  # a feature that the driver has removed
    NOT_IN_CAPTURE: Null.NOT_IN_CAPTURE,
}


def null_reason(code: int) -> Null:
    """Why a value is null, from NVML's return code."""
    return _REASONS.get(code, Null.ERROR)


@dataclass(frozen=True)
class Field:
    """A column fed by a field id. Scope 0: GPU, 2: memory. `scale`: from NVML's unit to the column's."""

    column: str
    field_id: int
    scope: int = 0
    scale: float = 1


@dataclass(frozen=True)
class Call:
    """Columns fed by one NVML call."""

    columns: tuple[str, ...]
    read: Callable[[Nvml, Handle], Sequence[float]]


@dataclass(frozen=True)
class Lane:
    name: str
    table: str
    fields: tuple[Field, ...]
    calls: tuple[Call, ...]
    metrics: tuple[Field, ...] = ()  # GPM; field_id is the metric's

    @property
    def schema(self) -> pa.Schema:
        return contract.SCHEMAS[self.table]


def _memory_mib(nvml: Nvml, handle: Handle) -> Sequence[float]:
    return [amount / 2**20 for amount in nvml.memory(handle)]


FAST: Final = Lane(
    "fast",
    "samples_fast",
    (
        # nvmlDeviceGetPowerUsage is an average on some cards and a 25-ms window on others: not used.
        Field("power_instant_w", 186, 0, 1e-3),
        Field("power_avg1s_w", 185, 0, 1e-3),
        Field("energy_mj", 83),
    ),
    (Call(("gpu_util_pct", "mem_active_pct"), lambda nvml, handle: nvml.utilization(handle)),),
)

SLOW: Final = Lane(
    "slow",
    "samples_slow",
    (
        Field("power_mem_avg_w", 185, 2, 1e-3),
        Field("temp_mem_c", 82),
        Field("throttle_power_cap_ns", 74),
        Field("throttle_sw_thermal_ns", 269),
        Field("throttle_hw_thermal_ns", 270),
        Field("throttle_power_brake_ns", 271),
    ),
    (
        Call(("sm_clock_mhz",), lambda nvml, handle: (nvml.sm_clock_mhz(handle),)),
        Call(("mem_clock_mhz",), lambda nvml, handle: (nvml.mem_clock_mhz(handle),)),
        Call(("throttle_reasons",), lambda nvml, handle: (nvml.throttle_reasons(handle),)),
        Call(("temp_gpu_c",), lambda nvml, handle: (nvml.temperature_c(handle),)),
        Call(("vram_total_mib", "vram_reserved_mib", "vram_used_mib", "vram_free_mib"), _memory_mib),
    ),
)

GPM: Final = Lane(
    "gpm",
    "samples_gpm",
    (),
    (),
    (
        Field("sm_active_pct", 2),
        Field("sm_occupancy_pct", 3),
        Field("tensor_active_pct", 5),
        Field("dram_active_pct", 10),
        Field("pcie_tx_mib_s", 20),
        Field("pcie_rx_mib_s", 21),
        Field("nvlink_tx_mib_s", 61),
        Field("nvlink_rx_mib_s", 60),
    ),
)
WINDOW: Final = "window_ms"  # the GPM lane's column of its own
GPM_MAX_HZ: Final = 5.0  # more than 100 ms between two samples

LANES: Final = (FAST, SLOW, GPM)

# One number that its column cannot hold would take the rows of a whole journal step with it.
_COUNTERS: Final = frozenset(
    item.column
    for lane in LANES
    for item in lane.fields
    if pa.types.is_unsigned_integer(lane.schema.field(item.column).type)
)
_UNKNOWN: Final = 999


@dataclass
class Reading:
    """One read of one lane on one GPU. A column is in `values` or, with its return code, in `codes`."""

    t_mono_ns: int  # middle of the read
    t_unix_ns: int
    read_us: float
    values: dict[str, float] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    empty: bool = False  # nothing to tell yet, so no row: the first read of a GPM window

    @property
    def nulls(self) -> str | None:
        parts = [f"{column}={null_reason(code).value}" for column, code in sorted(self.codes.items())]
        return ";".join(parts) or None

    def row(self, gpu_uuid: str, source: str, seq: int) -> dict[str, Any]:
        """The table's row, less run_id."""
        head = {"gpu_uuid": gpu_uuid, "source": source, "tick_seq": seq, "nulls": self.nulls}
        times = {"t_mono_ns": self.t_mono_ns, "t_unix_ns": self.t_unix_ns, "read_us": self.read_us}
        return {**head, **times, **self.values}


class Reader:
    """One lane on one GPU. Remembers which sensors the card does not have.

    A sensor is absent when the first three reads all said so; then it is not asked again. A later
    NOT_SUPPORTED is null for that tick, counted, and asked again.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.absent: dict[str, int] = {}
        self.errors: Counter[tuple[str, int]] = Counter()  # (column, code), absent sensors left out
        self._reads = 0
        self._misses: Counter[str] = Counter()

    @property
    def probed(self) -> bool:
        """Whether enough was read to know which sensors are absent."""
        return self._reads >= PROBES

    def read(self, nvml: Nvml, handle: Handle) -> Reading:
        """Ask the GPU. Never raises NvmlError: failures are in the reading."""
        values: dict[str, float] = {}
        codes = dict(self.absent)
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        self._read_fields(nvml, handle, values, codes)
        empty = self._read_metrics(nvml, handle, values, codes)
        for call in self.lane.calls:
            if call.columns[0] in self.absent:
                continue
            try:
                values.update(zip(call.columns, call.read(nvml, handle), strict=True))
            except NvmlError as error:
                codes.update(dict.fromkeys(call.columns, error.code))
        took_ns = time.monotonic_ns() - start_ns
        if not empty:
            self._learn(codes)
        half = took_ns // 2
        return Reading(start_ns + half, unix_ns + half, took_ns / 1000, values, codes, empty)

    def _read_fields(self, nvml: Nvml, handle: Handle, values: dict[str, float], codes: dict[str, int]) -> None:
        wanted = [item for item in self.lane.fields if item.column not in self.absent]
        if not wanted:
            return
        try:
            answers = nvml.fields(handle, [(item.field_id, item.scope) for item in wanted])
        except NvmlError as error:
            codes.update({item.column: error.code for item in wanted})
            return
        for item, answer in zip(wanted, answers, strict=True):
            if answer.code != 0 or answer.value is None:
                codes[item.column] = answer.code
            elif item.column in _COUNTERS and not (answer.value >= 0 and answer.value == int(answer.value)):
                codes[item.column] = _UNKNOWN
            else:
                values[item.column] = answer.value if item.scale == 1 else answer.value * item.scale

    def _read_metrics(self, nvml: Nvml, handle: Handle, values: dict[str, float], codes: dict[str, int]) -> bool:
        """Whether there was no window yet."""
        wanted = [item for item in self.lane.metrics if item.column not in self.absent]
        if not wanted:
            return False
        try:
            window = nvml.gpm(handle, [item.field_id for item in wanted])
        except NvmlError as error:
            codes.update(dict.fromkeys([WINDOW, *(item.column for item in wanted)], error.code))
            return False
        if window is None:
            return True
        values[WINDOW] = window.window_ms
        for item, answer in zip(wanted, window.metrics, strict=True):
            if answer.code == 0 and answer.value is not None:
                values[item.column] = answer.value
            else:
                codes[item.column] = answer.code
        return False

    def _learn(self, codes: dict[str, int]) -> None:
        self._reads += 1
        for column, code in codes.items():
            if column in self.absent:
                continue
            self.errors[column, code] += 1
            if self._reads <= PROBES and code in _ABSENT:
                self._misses[column] += 1
                if self._misses[column] == PROBES:
                    self.absent[column] = code
