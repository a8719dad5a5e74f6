"""Names, units and number format of the figures, once for every table and figure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import polars as pl

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run, as tables and axes name it."""

    name: str  # column of runs.parquet
    label: str
    unit: str = ""

    @property
    def heading(self) -> str:
        """Return label and unit for the head of a column."""
        return f"{self.label} [{self.unit}]" if self.unit else self.label

    @property
    def upper_bound(self) -> float:
        """Return what it cannot exceed; none of them goes below zero."""
        # The error of an energy is relative to it and may exceed 100 %.
        share = self.unit.startswith("%") and not self.name.startswith("energy_error")
        return 100.0 if share else math.inf


_ALL = (
    ("runtime_h", "Runtime, projected", "h"),
    ("steps_per_s", "Steps/s", ""),
    ("images_per_s", "Images/s", ""),
    ("step_ms_p50", "Step p50", "ms"),
    ("step_ms_p95", "Step p95", "ms"),
    ("data_wait_pct", "Data wait", "%"),
    ("gpu_util_pct", "GPU utilization", "%"),
    ("mem_active_pct", "Memory active", "% of time"),
    ("vram_pct", "VRAM peak", "%"),
    ("vram_used_mib_peak", "VRAM peak", "MiB"),
    ("torch_reserved_peak_mib", "torch reserved", "MiB"),
    ("torch_allocated_peak_mib", "torch allocated", "MiB"),
    ("power_w", "Power", "W"),
    ("temp_gpu_c_mean", "Temperature, mean", "\u00b0C"),
    ("temp_gpu_c_max", "Temperature, max", "\u00b0C"),
    ("sm_clock_mhz_mean", "SM clock", "MHz"),
    ("joules_per_image", "Energy", "J/image"),
    ("images_per_s_per_w", "Images/s/W", ""),
    ("steps_per_s_per_w", "Steps/s/W", ""),
    ("energy_ratio", "Counter / integral", ""),
    ("mfu_pct", "MFU", "%"),
    ("compile_s", "Compile", "s"),
    ("sm_active_pct", "SMs active", "%"),
    ("sm_occupancy_pct", "SM occupancy", "%"),
    ("tensor_active_pct", "Tensor cores active", "% of time"),
    ("dram_active_pct", "DRAM bandwidth", "% of peak"),
    ("pcie_tx_mib_s", "PCIe from the GPU", "MiB/s"),
    ("pcie_rx_mib_s", "PCIe to the GPU", "MiB/s"),
    ("energy_error_pct", "Energy error, at most", "%"),
    ("joules_per_image_error", "Energy error, at most", "J/image"),
)
METRICS = {name: Metric(name=name, label=label, unit=unit) for name, label, unit in _ALL}


def number(value: float | int | None) -> str:
    """Return three significant digits, never an exponent for what a person can read; an en dash for null."""
    if value is None:
        return "\u2013"
    # Of the rounded value: 999.9 is printed as 1,000 and 0.09999 as 0.100.
    size = abs(float(f"{value:.3g}"))
    if size == 0:
        return "0"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def runtime_heading(runs: pl.DataFrame) -> str:
    """Return what the runtime column is: projected from images/s, measured, or both."""
    kinds = sorted(runs["runtime_kind"].drop_nulls().unique().to_list()) if runs.height else []
    return f"Runtime, {' and '.join(kinds) or 'projected'} [h]"


def gpu_label(gpu: str) -> str:
    """Return a GPU type in capitals."""
    return gpu if gpu in ("cpu", UNKNOWN) else gpu.upper()


def scale_labels(gpus: int | None, nodes: int | None) -> list[str]:
    """Return `8 GPUs` and `2 nodes`; nothing for one, which goes without saying."""
    counts = ((gpus, "GPU"), (nodes, "node"))
    return [pluralize(count, noun) for count, noun in counts if (count or 1) > 1 and count is not None]


def gpu_order(gpu: str) -> tuple[str, int, str]:
    """Return a sort key that puts A40 before A100: letters first, then the number as a number."""
    match = re.match(r"([a-zA-Z]*)(\d*)", gpu)
    assert match is not None
    return match[1].lower(), int(match[2] or 0), gpu
