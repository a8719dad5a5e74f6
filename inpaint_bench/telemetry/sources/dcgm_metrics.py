"""What a page of NVIDIA's dcgm-exporter says of a GPU's profiling counters, by UUID alone.

The text format is Prometheus's; a metric is named after DCGM's field. DCGM 4.6 renamed fields and kept the old
names as aliases, so both are known here under the field's number. Units are DCGM's own (ratios, bytes
per second), whatever the type that the site's counter file gives: some call the rates counters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from inpaint_bench.core.schema import Null

_ANY: Final = "DCGM_FI_"
_PROFILING: Final = "DCGM_FI_PROF_"
_RATIO: Final = (100.0, 1.01)  # to %; a little over 1 is rounding, more is another unit
# To MiB/s. DCGM's words for "no value" are numbers from 2^47 on; an exporter should leave them out.
_RATE: Final = (2.0**-20, 2.0**47)


@dataclass(frozen=True)
class Metric:
    """A column of samples_gpm fed by a DCGM field: value * factor, where 0 <= value < limit."""

    column: str
    field_id: int
    names: tuple[str, ...]
    factor: float
    limit: float


METRICS: Final = (
    Metric("sm_active_pct", 1002, ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"), *_RATIO),
    Metric("sm_occupancy_pct", 1003, ("DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"), *_RATIO),
    Metric("tensor_active_pct", 1004, ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"), *_RATIO),
    Metric("dram_active_pct", 1005, ("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"), *_RATIO),
    Metric("pcie_tx_mib_s", 1009, ("DCGM_FI_PROF_PCIE_TX_BYTES",), *_RATE),
    Metric("pcie_rx_mib_s", 1010, ("DCGM_FI_PROF_PCIE_RX_BYTES",), *_RATE),
    Metric("nvlink_tx_mib_s", 1011, ("DCGM_FI_PROF_NVLINK_TX_BYTES",), *_RATE),
    Metric("nvlink_rx_mib_s", 1012, ("DCGM_FI_PROF_NVLINK_RX_BYTES",), *_RATE),
)
FIELD_IDS: Final = {name: metric.field_id for metric in METRICS for name in metric.names}

Series = Mapping[str, float]  # metric name -> value as exported; NaN where two series contradict each other


def read_page(text: str, uuids: Collection[str]) -> dict[str, Series]:
    """Profiling metrics of those of the GPUs that the page lists, maybe none of a GPU.

    Series of a MIG instance or of one link are not the GPU's and are left out. Jobs or pods that share a GPU
    have a series each, with equal values. Raises ValueError, with a phrase, for what is no exporter's page.
    """
    lines = [line for line in text.split("\n") if line.startswith(_ANY)]
    if not lines:
        raise ValueError("it gives no DCGM metric: is this the /metrics of a dcgm-exporter?")
    found: dict[str, dict[str, float]] = {uuid: {} for uuid in uuids if any(f'"{uuid}"' in line for line in lines)}
    wanted = [line for line in lines if line.startswith(_PROFILING) and any(f'"{uuid}"' in line for uuid in found)]
    try:
        samples = [one for family in text_string_to_metric_families("\n".join(wanted)) for one in family.samples]
    except (ValueError, IndexError) as error:
        raise ValueError(f"it is not Prometheus's text format ({str(error)[:200]})") from None
    for sample in samples:
        labels = sample.labels
        series = found.get(labels.get("UUID") or labels.get("uuid") or "")  # the latter: --use-old-namespace
        if series is None or labels.get("GPU_I_ID") or labels.get("nvlink"):
            continue
        value = float(sample.value)
        series[sample.name] = value if series.get(sample.name, value) == value else math.nan
    return dict(found)


def to_columns(series: Series) -> tuple[dict[str, float], dict[str, Null]]:
    """Values in the units of samples_gpm, and why the other columns are null."""
    values: dict[str, float] = {}
    nulls: dict[str, Null] = {}
    for metric in METRICS:
        given = next((series[name] for name in metric.names if name in series), None)
        if given is None:
            nulls[metric.column] = Null.NOT_EXPORTED
        elif not 0 <= given < metric.limit:  # NaN too
            nulls[metric.column] = Null.ERROR
        else:
            values[metric.column] = given * metric.factor
    return values, nulls
