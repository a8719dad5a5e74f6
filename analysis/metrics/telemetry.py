"""What a run's samples show of its measure windows: utilisation, temperature, clocks, VRAM, throttling, energy.

A column counts only where its own values cover the window: rows whose value is null cover nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import numpy as np
import polars as pl

from analysis.columns import COUNTERS
from inpaint_bench.core.records import Manifest

from . import energy, gpm_counters
from .audit import events
from .audit import samples as audit
from .draft import RowDraft
from .flags import POWER_CAP_COUNTERS, THERMAL_COUNTERS, THERMAL_PCT
from .gpu_samples import COUNTER, GpuSamples, Span, null_reasons

_ENERGY = ("energy_j", "power_w", "joules_per_image", "images_per_s_per_w", "steps_per_s_per_w")
# The columns of the row that rest on each sampled column, whose reason for a null is their reason.
DEPENDENTS: dict[str, tuple[str, ...]] = {
    "energy_mj": ("energy_ratio", *_ENERGY),
    "power_instant_w": ("energy_integral_j", "energy_ratio", *_ENERGY),
    "gpu_util_pct": ("gpu_util_pct",),
    "mem_active_pct": ("mem_active_pct",),
    "sm_clock_mhz": ("sm_clock_mhz_mean",),
    "throttle_power_cap_ns": ("throttle_power_pct",),
    "throttle_sw_thermal_ns": ("throttle_thermal_pct",),
    "throttle_hw_thermal_ns": ("throttle_thermal_pct",),
    "temp_gpu_c": ("temp_gpu_c_mean", "temp_gpu_c_max"),
    "vram_total_mib": ("vram_pct",),
    "vram_reserved_mib": ("vram_pct",),
    "vram_used_mib": ("vram_used_mib_peak", "vram_used_mib_mean", "vram_pct"),
}
_FAST = ("power_instant_w", "power_avg1s_w", "energy_mj", "gpu_util_pct", "mem_active_pct")
_SLOW = tuple(name for name in DEPENDENTS if name not in _FAST)


def fill_telemetry(draft: RowDraft, manifest: Manifest, tables: Mapping[str, pl.DataFrame], spans: list[Span]) -> None:
    """Fill the telemetry columns of a row, and add what makes the run invalid to its problems.

    A requeued job leaves samples of another node and clock in the same directory: only those around the measure
    windows belong to this measurement.
    """
    fast, slow = (
        [gpu for gpu in GpuSamples.split(tables[table], columns) if gpu.touches(spans)]
        for table, columns in (("samples_fast", (*_FAST, "t_unix_ns")), ("samples_slow", _SLOW))
    )
    sidecar = manifest.telemetry
    # With telemetry=none the run stays valid for its throughput; missing samples of a real sidecar are a problem below.
    if not fast and sidecar and sidecar.source in (None, "none"):
        draft.warnings.append("no telemetry was requested: throughput only")
        columns = {name for names in DEPENDENTS.values() for name in names}
        draft.set_reason((*columns, *COUNTERS, *energy.UNCERTAINTY, "coverage_pct"), "telemetry off")
        draft.row["counters_source"] = gpm_counters.NONE
        return
    hz, uuids = (sidecar and sidecar.hz) or audit.DEFAULT_HZ, {gpu.uuid for gpu in fast}
    counter_hz = (sidecar and sidecar.energy_hz) or hz
    if not fast:
        draft.problems.append("no telemetry samples in the measure window")
    draft.problems += audit.check_devices(fast, slow, manifest) if fast else []
    for gpu, span in product(fast, spans):
        draft.problems += [f"GPU {gpu.uuid}: {problem}" for problem in audit.check_samples(gpu, span, hz, counter_hz)]
    draft.problems += events.check_events(tables["events"], manifest, uuids)
    rates = dict.fromkeys(_FAST, hz) | {COUNTER: counter_hz}
    # Of a counter that is read less often than the rows, only a gap tells that readings are missing.
    draft.row["coverage_pct"] = _coverage_pct(fast, [name for name in _FAST if rates[name] >= hz], spans, hz)
    # Null values cost a column its own figures, with a warning; missing rows were a problem above.
    gaps = _gaps(fast, _FAST, spans, lambda _, name: audit.gap_limit_s(rates[name]))
    # What a cumulative counter grows by between two readings is known, however far apart they are.
    sampled = [name for name in _SLOW if name not in (*POWER_CAP_COUNTERS, *THERMAL_COUNTERS)]
    gaps |= _gaps(slow, sampled, spans, _slow_gap_limit_s)
    for name in ("gpu_util_pct", "mem_active_pct"):
        draft.row[name] = None if name in gaps else _mean_over_gpus(fast, name, spans)
    energy.fill_energy(draft, fast, spans, gaps, counter_hz)
    _fill_slow(draft, slow, spans, gaps)
    gpm_counters.fill_counters(draft, tables["samples_gpm"], uuids, spans)
    # The rows' own reason comes first: "not supported" says more than that there is no value in the window.
    nulls = [tables[name]["nulls"].unique().cast(pl.String) for name in ("samples_fast", "samples_slow")]
    recorded = null_reasons(pl.concat(nulls))
    for column, names in DEPENDENTS.items():
        draft.set_reason(names, recorded.get(column) or gaps.get(column) or f"no {column} in the measure window")
    samples = {**dict.fromkeys(_FAST, fast), **dict.fromkeys(_SLOW, slow)}
    draft.warnings += [
        f"left out: {gap}" for name, gap in gaps.items() if any(len(gpu.known(name).t_ns) for gpu in samples[name])
    ]


def _gaps(
    samples: list[GpuSamples], columns: Sequence[str], spans: list[Span], limit_s: Callable[[GpuSamples, str], float]
) -> dict[str, str]:
    """Return why columns do not cover the windows, of those that do not."""
    gaps = {}
    for name in columns:
        checks = (audit.check_column(gpu, name, span, limit_s(gpu, name)) for gpu, span in product(samples, spans))
        if gap := next(filter(None, checks), None):
            gaps[name] = gap
    return gaps


def _slow_gap_limit_s(samples: GpuSamples, _: str) -> float:
    """Return the limit by the median period of the samples: nothing else says how slow they were to be."""
    period_s = float(np.median(np.diff(samples.t_ns))) * 1e-9 if len(samples.t_ns) > 1 else 0.0
    return max(audit.MAX_GAP_S, 2.5 * period_s)


def _coverage_pct(samples: list[GpuSamples], columns: Sequence[str], spans: list[Span], hz: float) -> float | None:
    """Return the share of expected samples, in the column with the fewest values; columns without any do not count."""
    expected = sum(end - start for start, end in spans) * 1e-9 * hz * len(samples)
    if not expected:
        return None
    known = [[gpu.known(name) for gpu in samples] for name in columns]
    counts = [
        sum(len(gpu.t_ns[gpu.inside(*span)]) for gpu in gpus for span in spans)
        for gpus in known
        if any(len(gpu.t_ns) for gpu in gpus)
    ]
    return min(100.0, 100 * min(counts, default=0) / expected)


def _fill_slow(draft: RowDraft, samples: list[GpuSamples], spans: list[Span], gaps: Mapping[str, str]) -> None:
    """Fill clocks averaged over GPUs; temperature and VRAM of the worst. A column with a gap may hide a peak: null."""
    row = draft.row
    covered = {name: [] if name in gaps else samples for name in _SLOW}
    for column, name in (("temp_gpu_c_mean", "temp_gpu_c"), ("sm_clock_mhz_mean", "sm_clock_mhz")):
        row[column] = _mean_over_gpus(covered[name], name, spans)
    row["vram_used_mib_mean"] = _mean_over_gpus(covered["vram_used_mib"], "vram_used_mib", spans)
    peak = {name: _maximum(gpu.maximum(name, spans) for gpu in covered[name]) for name in _SLOW}
    row["temp_gpu_c_max"], row["vram_used_mib_peak"] = peak["temp_gpu_c"], peak["vram_used_mib"]
    used, total, reserved = (peak[f"vram_{kind}_mib"] for kind in ("used", "total", "reserved"))
    if used is not None and total is not None and reserved is not None and total > reserved:
        # "Used" excludes what the driver reserves, so the memory that it is a share of must too.
        row["vram_pct"] = 100 * used / (total - reserved)
    for column, counters in (("throttle_power_pct", POWER_CAP_COUNTERS), ("throttle_thermal_pct", THERMAL_COUNTERS)):
        row[column] = _maximum(gpu.counted_pct(counters, spans) for gpu in samples)
    if (row["throttle_thermal_pct"] or 0) > THERMAL_PCT:
        draft.warnings.append(f"thermally throttled for {row['throttle_thermal_pct']:.1f} % of the measure window")


def _mean_over_gpus(samples: list[GpuSamples], column: str, spans: list[Span]) -> float | None:
    """Return the mean over GPUs of the time-weighted mean over windows."""
    means = [mean for gpu in samples if (mean := gpu.mean(column, spans)) is not None]
    return sum(means) / len(means) if means else None


def _maximum(values: Iterable[float | None]) -> float | None:
    """Return the largest known value: that of the worst GPU."""
    return max((value for value in values if value is not None), default=None)
