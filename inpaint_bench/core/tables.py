"""Arrow schemas of the tables that a run writes.

Column names carry their unit. A value that the hardware did not give is null, and the row's ``nulls`` column holds the
reason; it is never zero and never another metric under this name.
"""

from typing import Final

import pyarrow as pa

from .kernels import METRICS
from .schema import KERNEL_COUNTERS, KERNEL_RULES, KERNEL_TIMES, SCHEMA_VERSION, results_table
from .workloads import Result, result_columns, results

_DICT = pa.dictionary(pa.int32(), pa.string())


def _table(*columns: tuple[str, pa.DataType, bool]) -> pa.Schema:
    """Return the Arrow schema of a table, which begins with run_id."""
    fields = [pa.field("run_id", _DICT, nullable=False)]
    fields += [pa.field(name, kind, nullable=nullable) for name, kind, nullable in columns]
    return pa.schema(fields, metadata={b"schema_version": str(SCHEMA_VERSION).encode()})


def _readings(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType, bool]]:
    return [(name, kind, True) for name in names]


_SAMPLE_HEAD = (
    ("gpu_uuid", _DICT, False),
    ("source", _DICT, False),  # nvml | replay:<capture>; older runs may have samples_gpm of dcgm:<host:port>
    ("tick_seq", pa.uint32(), False),
    ("t_mono_ns", pa.int64(), False),  # CLOCK_MONOTONIC at the middle of the read
    ("t_unix_ns", pa.int64(), False),
    ("read_us", pa.float32(), False),  # how long the read took
)
_NULLS = ("nulls", _DICT, True)  # "column=reason;column=reason"; null if no value is missing

# 10 Hz. gpu_util_pct: share of time with at least one kernel running; mem_active_pct: share of time memory
# was read or written (neither bandwidth nor VRAM).
SAMPLES_FAST: Final = _table(
    *_SAMPLE_HEAD,
    *_readings(pa.float32(), "power_instant_w", "power_avg1s_w"),
    *_readings(pa.uint64(), "energy_mj"),  # cumulative since the driver was loaded; 1 Hz, at first in every row
    *_readings(pa.float32(), "gpu_util_pct", "mem_active_pct"),
    _NULLS,
)

# 1 Hz. Throttle counters are cumulative; VRAM "used" excludes "reserved" (memory info v2).
SAMPLES_SLOW: Final = _table(
    *_SAMPLE_HEAD,
    *_readings(pa.uint32(), "sm_clock_mhz", "mem_clock_mhz"),
    *_readings(pa.uint64(), "throttle_reasons", "throttle_power_cap_ns"),
    *_readings(pa.uint64(), "throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_power_brake_ns"),
    *_readings(pa.float32(), "temp_gpu_c", "temp_mem_c", "power_mem_avg_w"),
    *_readings(pa.float32(), "vram_total_mib", "vram_reserved_mib", "vram_used_mib", "vram_free_mib"),
    _NULLS,
)

# 1 Hz, Hopper and later only (GPM). A value is the mean over the `window_ms` before the row's time; the first read has
# no window and so no row. sm_active_pct: share of SMs with an active warp; sm_occupancy_pct: active warps per maximum;
# tensor_active_pct: share of time with a tensor operation; dram_active_pct: share of peak bandwidth.
SAMPLES_GPM: Final = _table(
    *_SAMPLE_HEAD,
    *_readings(pa.float32(), "window_ms"),
    *_readings(pa.float32(), "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct"),
    *_readings(pa.float32(), "pcie_tx_mib_s", "pcie_rx_mib_s"),  # tx: from the GPU
    *_readings(pa.float32(), "nvlink_tx_mib_s", "nvlink_rx_mib_s"),  # all links
    _NULLS,
)

# At the ticks of samples_slow, a row per node: the processor packages (RAPL), without memory. Unlike a GPU they are
# shared by all jobs of the node.
SAMPLES_CPU: Final = _table(
    *_SAMPLE_HEAD[1:],
    *_readings(pa.uint64(), "energy_uj"),  # energy of all packages, since the first row
    ("whole_node", pa.bool_(), False),  # whether the job holds every CPU of the node
    _NULLS,
)

STEPS: Final = _table(
    ("window_id", _DICT, False),
    ("step", pa.uint32(), False),
    ("t_start_mono_ns", pa.int64(), False),  # host clock when the step's data was asked for
    ("t_end_mono_ns", pa.int64(), False),  # host clock when its work was queued (no device sync)
    ("data_wait_ns", pa.int64(), False),
    ("device_ms", pa.float32(), True),  # CUDA events around the step; null on CPU
    ("images", pa.uint32(), False),
    ("loss", pa.float32(), True),
    ("lr", pa.float32(), True),
)

# Kinds written by the sidecar: gpu_lost; nvml_broken (a read gave no value, once per GPU); nvml_fatal (sampling ended);
# storage_failed, storage_recovered; ecc (new errors); co_tenant ("pid N name", once per process, at most 100 per GPU);
# xid (its number, at most 100 per GPU); power_limit ("300 W to 250 W"); check_failed (why processes and power limit
# could not be checked).
EVENTS: Final = _table(
    ("t_mono_ns", pa.int64(), False),
    ("t_unix_ns", pa.int64(), False),
    ("kind", _DICT, False),
    ("gpu_uuid", _DICT, True),
    ("detail", pa.string(), True),
)


# A profiled call of the workload, after the measured windows: a row per kernel, the heaviest first (on a CPU per
# operator), and on a GPU a row of kind "idle" whose launches are the gaps. No speed: the profiler slows a call down.
_KERNEL_TIMES: Final = _table(
    ("call", _DICT, False),  # "CUDA graph replay", "step", ...
    ("measured", pa.bool_(), False),  # whether the windows ran this call, or another way to run the same
    ("kind", _DICT, False),  # a KernelClass or "idle"
    ("detail", _DICT, False),  # algorithm of a convolution, library, kind of copy; may be empty
    ("kernel", _DICT, False),
    ("launches", pa.int64(), False),
    ("ms", pa.float64(), False),
)

# Hardware counters of one launch of a kernel, by Nsight Compute. The units are in core/kernels.py.
_KERNEL_COUNTERS: Final = _table(
    ("call", _DICT, False),
    ("launch", pa.int64(), False),  # in the order of those that were counted
    ("kind", _DICT, False),
    ("detail", _DICT, False),
    ("kernel", _DICT, False),
    ("grid", _DICT, False),  # "(132, 1, 1)"
    ("block", _DICT, False),
    *((name, pa.float64(), True) for name in METRICS),  # null: the chip does not have it
)

# What a rule of Nsight Compute says of a launch in `kernel_counters`. A rule may say several things.
_KERNEL_RULES: Final = _table(
    ("call", _DICT, False),
    ("launch", pa.int64(), False),
    ("section", _DICT, False),  # "MemoryWorkloadAnalysis_Tables"
    ("rule", _DICT, False),  # "SharedMemoryConflicts"
    ("type", _DICT, False),  # as printed: OPT, INF, WRN
    ("scope", _DICT, True),  # global: of the kernel's runtime; local: of the hardware that the rule looks at
    ("speedup_pct", pa.float64(), True),  # null: the rule estimates nothing
    ("text", _DICT, False),
)


def _results(result: type[Result]) -> pa.Schema:
    types: dict[type, pa.DataType] = {str: _DICT, int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    columns = ((name, types[kind], nullable) for name, kind, nullable in result_columns(result))
    return _table(*columns)


SCHEMAS: Final[dict[str, pa.Schema]] = {
    "samples_fast": SAMPLES_FAST,
    "samples_slow": SAMPLES_SLOW,
    "samples_gpm": SAMPLES_GPM,
    "samples_cpu": SAMPLES_CPU,
    "steps": STEPS,
    "events": EVENTS,
    KERNEL_TIMES: _KERNEL_TIMES,
    KERNEL_COUNTERS: _KERNEL_COUNTERS,
    KERNEL_RULES: _KERNEL_RULES,
    **{results_table(name): _results(result) for name, result in results().items()},
}
