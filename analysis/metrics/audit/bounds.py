"""Bounds of every physical quantity, by table and column. A value outside of them is a defect of what wrote it."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import polars as pl

from analysis.columns import BOUNDS, FLOAT32, TINY
from analysis.metrics.facts import Facts
from analysis.metrics.facts import number as to_number
from analysis.metrics.gpu_samples import Span
from analysis.units import number
from inpaint_bench.core.config.levers import STORED_BITS
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import Device, Window

from .inputs import Finished

# Over the enforced limit: the readings of 89 H200 runs went up to 1.26 within 25 ms, and to 1.003 in one second.
INSTANT, AVERAGE = 2.0, 1.15
MIN_CLOCK_MHZ = 100  # idle boards run at 135 MHz and more
CLOCK_STEP = 1.02  # NVML rounds to steps of 15 MHz
MAX_PCIE_MIB_S = 130_000  # PCIe 6 x16: 128 GB/s a way
MAX_NVLINK_MIB_S = 900_000  # all links of NVLink 5: 900 GB/s a way
MIB = 2**20
# Bytes of a weight, and of a trained one with masters and moments, by the weights of the recipe; not of its gradient,
# which lies in the pool of a CUDA graph and does not count as allocated there.
BYTES = {"fp32": (4, 12), "half": (2, 12), "bf16_master": (2, 14), "bf16_split": (2, 8), "bf16_stochastic": (2, 6)}
MOMENTS_8BIT = 6  # so many bytes less
# Each of 89 H200 runs used 770 to 860 MiB more than PyTorch had reserved; samples of one a second may miss a peak. No
# run out of 300 used more than 1,680 MiB more; libraries beside PyTorch may.
MIN_USED_SHARE = 0.9
MAX_USED = 2.0, 4096  # times what was reserved, and MiB more
# Means of a run of ours on one GPU, which neither offloads nor exchanges: such runs had 3 to 295 and 5 to 761 MiB/s,
# which are more than these in KiB/s.
MAX_MEAN_PCIE = {"pcie_tx_mib_s": 2500.0, "pcie_rx_mib_s": 5000.0}
UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Share of the time between the CUDA events of the steps, in which the GPU may wait for the host. The 89 runs had 64 to
# 100 %.
MIN_UTIL_SHARE = 0.05
# One of 176,000 readings of the utilisation of H100 cards was 2,619 %.
FEW = 0.1  # share of the readings of a column; more are no accident


class Bound(NamedTuple):
    """Least and largest value; if `of` names a fact of the GPU and it is known, `high` is a multiple of it."""

    low: float
    high: float
    of: str | None = None


PCT, TEMPERATURE = Bound(0, 100), Bound(-20, 130)
COUNT, POSITIVE = Bound(0, math.inf), Bound(TINY, FLOAT32)
MEMORY = Bound(0, 1.01, "memory_mib")
SAMPLES: dict[str, dict[str, Bound]] = {
    "samples_fast": {
        "power_instant_w": Bound(0, INSTANT, "power_limit_w"),
        "power_avg1s_w": Bound(0, AVERAGE, "power_limit_w"),
        "gpu_util_pct": PCT,
        "mem_active_pct": PCT,
        "read_us": Bound(0, FLOAT32),
    },
    "samples_slow": {
        "sm_clock_mhz": Bound(MIN_CLOCK_MHZ, CLOCK_STEP, "max_sm_clock_mhz"),
        "mem_clock_mhz": Bound(1, 50_000),
        "temp_gpu_c": Bound(1, 130),  # above freezing; 0 is what a missing sensor reads
        "temp_mem_c": TEMPERATURE,
        "power_mem_avg_w": Bound(0, AVERAGE, "power_limit_w"),
        "vram_total_mib": Bound(1, 1.01, "memory_mib"),
        "vram_reserved_mib": MEMORY,
        "vram_used_mib": MEMORY,
        "vram_free_mib": MEMORY,
        "read_us": Bound(0, FLOAT32),
    },
    "samples_gpm": {
        "window_ms": Bound(0, 1e7),
        **dict.fromkeys(("sm_active_pct", "sm_occupancy_pct", "tensor_active_pct", "dram_active_pct"), Bound(0, 101)),
        **dict.fromkeys(("pcie_tx_mib_s", "pcie_rx_mib_s"), Bound(0, MAX_PCIE_MIB_S)),
        **dict.fromkeys(("nvlink_tx_mib_s", "nvlink_rx_mib_s"), Bound(0, MAX_NVLINK_MIB_S)),
    },
}
# As NVML defines it.
_PARTS_OF_MEMORY = ("vram_reserved_mib", "vram_used_mib", "vram_free_mib")
_total, _sum = pl.col("vram_total_mib"), pl.sum_horizontal(*_PARTS_OF_MEMORY, ignore_nulls=False)
_is_other_sum = (_sum - _total).abs() > 0.01 * _total
STEPS = {"device_ms": POSITIVE, "data_wait_ns": COUNT, "images": Bound(1, math.inf), "lr": Bound(0, FLOAT32)}
DEVICE = {
    "power_limit_w": Bound(1, 5000),
    "memory_mib": Bound(1, 2**21),
    "max_sm_clock_mhz": Bound(1, 10_000),
}

# Shares of the same time, of which the first is part of the second, and how far in points the sensors may differ: a
# kernel runs (gpu_util) whenever an SM is active, and an SM is active when it holds warps. In 29 runs on H200 cards no
# first one came within 0.7 points. Rows of counters may leave out a part of the window, in which the GPU can be idle:
# in 3.6 s that began with 0.5 s without a kernel, a GPU was busy 71 %, and SMs were active 79 % of the 3.0 s in rows.
PARTS = (
    ("sm_active_pct", "gpu_util_pct", 5.0),
    ("sm_occupancy_pct", "sm_active_pct", 2.0),
    ("tensor_active_pct", "sm_active_pct", 2.0),
)


def without_strays(facts: Facts) -> Facts:
    """Return the facts without the few readings that no card gives, and with a sentence for each column of them."""
    devices: list[Device | None] = [*facts.manifest.devices] or [None]

    def clean(tables: Mapping[str, pl.DataFrame], strays: list[str]) -> dict[str, pl.DataFrame]:
        return {name: _clean(name, rows, devices, strays) for name, rows in tables.items()}

    strays: list[str] = []
    tables = clean(facts.tables, strays)
    # The rows of a node are parts of these tables: what was left out of them is named already.
    nodes = [replace(node, rows=clean(node.rows, [])) for node in facts.nodes]
    return replace(facts, tables=tables, nodes=nodes, strays=strays)


def _clean(table: str, rows: pl.DataFrame, devices: list[Device | None], strays: list[str]) -> pl.DataFrame:
    bounds = SAMPLES.get(table, {})
    other_sum = rows.select(_is_other_sum).to_series() if _PARTS_OF_MEMORY[0] in bounds else None
    for device, (name, bound) in product(devices, bounds.items()):
        own = pl.lit(value=True) if device is None else pl.col("gpu_uuid") == device.uuid
        outside = own & ~pl.col(name).is_between(bound.low, _high(bound, device))
        if name in _PARTS_OF_MEMORY:
            outside |= own & pl.lit(other_sum)
        wrong = rows.filter(outside)[name].drop_nulls()
        if len(wrong) and len(wrong) <= FEW * (known := len(rows.filter(own)[name].drop_nulls())):
            strays.append(f"{table}: left out {len(wrong)} of {known} values of {name}, e.g. {number(wrong[0])}")
            rows = rows.with_columns(pl.when(outside).then(None).otherwise(pl.col(name)).alias(name))
    return rows


def check_samples(facts: Facts) -> Iterator[str]:
    for table, bounds in SAMPLES.items():
        rows = facts.measured_samples[table]
        devices: list[Device | None] = [*facts.manifest.devices]
        for device in devices or [None]:
            own = rows if device is None else rows.filter(pl.col("gpu_uuid") == device.uuid)
            where = table if device is None else f"GPU {device.uuid}: {table}"
            yield from _outside(own, bounds, where, device)


def check_memory(facts: Facts) -> Iterator[str]:
    if wrong := facts.samples["samples_slow"].select(_is_other_sum.sum()).item():
        yield f"samples_slow: in {pluralize(wrong, 'row')} used, free and reserved memory do not add up to the total"


def check_steps(_: Facts, window: Window, __: Span, steps: pl.DataFrame) -> Iterator[str]:
    yield from _outside(steps, STEPS, window.window_id, None)


def _outside(rows: pl.DataFrame, bounds: Mapping[str, Bound], where: str, device: Device | None) -> Iterator[str]:
    for name, bound in bounds.items():
        low, high = bound.low, _high(bound, device)
        # A NaN is above every number; a null is no value.
        values = rows[name].drop_nulls()
        if values.is_empty():  # perhaps of no type
            continue
        if len(outside := values.filter(~values.is_between(low, high))):
            listed = f"{len(outside)} of {len(values)} values of {name}, e.g. {number(outside[0])}"
            yield f"{where}: {listed}, outside {number(low)} to {number(high)}"


def _high(bound: Bound, device: Device | None) -> float:
    if bound.of is None:
        return bound.high
    fact = getattr(device, bound.of) if device is not None else None
    return bound.high * fact if fact else DEVICE[bound.of].high


def check_manifest(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    for device in manifest.devices:
        if not UUID.fullmatch(device.uuid) and not facts.replayed:
            yield f"{device.uuid} is not the UUID of a GPU: GPU- or MIG-, then 32 hexadecimal digits in five groups"
        for name, (low, high, _) in DEVICE.items():
            value = getattr(device, name)
            if value is not None and not low <= value <= high:
                yield f"GPU {device.uuid}: {name} is {number(value)}, outside {number(low)} to {number(high)}"
    if memory := manifest.memory:
        total = max((device.memory_mib or math.inf for device in manifest.devices), default=math.inf)
        sizes = [_least_mib(facts), memory.allocated_peak_mib, memory.reserved_peak_mib, total]
        known = [size for size in sizes if size is not None]
        if known != sorted(known) and not facts.replayed:
            texts = [f"{number(size)} MiB" for size in known]
            yield f"memory of the weights, allocated, reserved and of the GPU do not ascend: {', '.join(texts)}"


def _least_mib(facts: Facts) -> float:
    """Return what stays on the GPU: evaluated networks, or the trained one with its optimizer. 0: ranks divide it."""
    stated, levers = facts.manifest.workload_facts or {}, facts.manifest.levers or []
    parameters, trained = to_number(stated.get("parameters")), to_number(stated.get("parameters_trained"))
    weight, with_moments = BYTES.get(str(stated.get("weights_precision", "fp32")), (1, 1))
    if parameters is None or any(lever.field == "sharding" for lever in levers):
        return 0.0
    stored = [STORED_BITS.get(lever.requested) for lever in levers if lever.field in ("linears", "frozen_storage")]
    frozen = min([weight, *(bits / 8 for bits in stored if bits)])
    if trained is not None:
        with_moments -= MOMENTS_8BIT * any(lever.requested == "adamw_8bit" for lever in levers)
        return (frozen * max(parameters - trained, 0) + with_moments * trained) / MIB
    networks = stated.get("parameters_by_network")
    counts = [to_number(count) or 0 for count in networks.values()] if isinstance(networks, dict) else []
    return (weight * max(sum(counts) - parameters, 0) + frozen * parameters) / MIB


def check_use(run: Finished) -> Iterator[str]:
    facts, row = run.facts, run.row
    if facts.replayed:
        return
    used, reserved = row["vram_used_mib_peak"], row["torch_reserved_peak_mib"]
    # Steps of different work reach their peaks for less than the second between two samples.
    known = used is not None and reserved is not None and facts.uniform_steps
    if known and used < MIN_USED_SHARE * reserved:
        by_torch = f"PyTorch had reserved {number(reserved)} MiB"
        yield f"at most {number(used)} MiB of memory were in use by NVML, and {by_torch}"
    if known and used > MAX_USED[0] * reserved + MAX_USED[1]:
        yield f"{number(used)} MiB of memory were in use by NVML, and PyTorch had reserved {number(reserved)} MiB alone"
    util_pct, seconds = row["gpu_util_pct"], row["window_s"]
    steps = [facts.steps_of(window)["device_ms"] for window, _ in facts.measured]
    if util_pct is None or not seconds or any(rows.null_count() for rows in steps):
        return
    busy_pct = sum(float(rows.cast(pl.Float64).sum()) for rows in steps) / seconds / 10
    if util_pct < MIN_UTIL_SHARE * busy_pct:
        yield f"a utilisation of {util_pct:.2g} % by NVML, and the steps took {busy_pct:.0f} % of the window on the GPU"


def check_row(run: Finished) -> Iterator[str]:
    row = run.row
    for name, (low, high) in BOUNDS.items():
        value = row[name]
        if isinstance(value, int | float) and not low <= value <= high:
            yield f"{name} is {number(value)}, outside {number(low)} to {number(high)}"
    for part, of, margin in PARTS:
        values = row[part], row[of]
        left_out = run.telemetry.uncovered_pct if of == "gpu_util_pct" else 0.0
        if None not in values and values[0] > values[1] + margin + left_out:
            yield f"{part} is {number(values[0])} and cannot exceed {of}, which is {number(values[1])}"
    for name, most in MAX_MEAN_PCIE.items():
        if (row[name] or 0) > most and row["gpus"] == 1 and not run.facts.is_command:
            yield f"{name} is {number(row[name])} on average, and one GPU in use has at most {number(most)}"
