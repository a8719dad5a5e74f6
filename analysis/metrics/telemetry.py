"""What a run's samples show of its measure windows: utilisation, temperature, clocks, VRAM, throttling, energy.

A column counts only if its own values cover the window: rows whose value is null cover nothing. A row of samples_gpm is
the mean over the `window_ms` before its time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from analysis.columns import COLUMNS, COUNTERS

from . import energy, gpu_samples
from .energy import Energy
from .facts import Columns, Facts
from .flags import POWER_CAP_COUNTERS, THERMAL_COUNTERS
from .gpu_samples import COUNTER, Floats, GpuSamples, Ints, Span, check_column, null_reasons

_FAST = ("power_instant_w", "power_avg1s_w", "energy_mj", "gpu_util_pct", "mem_active_pct")
_SLOW = (
    *("sm_clock_mhz", "throttle_power_cap_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "temp_gpu_c"),
    *("vram_total_mib", "vram_reserved_mib", "vram_used_mib"),
)
GPM, NONE = "gpm", "none"
MIN_COVERAGE_PCT = 80.0  # percent of the measure windows, by rows; 1 Hz rows leave up to a second at either edge
MIN_INSIDE = 0.5  # share of a GPM row's window: a value that is mostly of another time does not belong here
# The columns of the row that rest on each sampled column, whose reason for a null is their reason.
DEPENDENTS = {
    name: [column.name for column in COLUMNS if name in column.sampled]
    for name in ("energy_mj", "power_instant_w", "gpu_util_pct", "mem_active_pct", *_SLOW)
}


@dataclass(frozen=True, kw_only=True)
class Telemetry(Columns):
    """The columns, and the samples around the measure windows, for the checks."""

    energy: Energy
    requested: bool = True
    fast: list[GpuSamples] = field(default_factory=list)
    slow: list[GpuSamples] = field(default_factory=list)
    hz: float = gpu_samples.DEFAULT_HZ
    counter_hz: float = gpu_samples.DEFAULT_HZ
    left_out: list[str] = field(default_factory=list)  # why columns with values have no figures
    uncovered_pct: float = 0.0  # share of the measure windows that no row of the counters covers


def measure(facts: Facts) -> Telemetry:
    """Return what the samples show of the measure windows.

    A requeued job leaves samples of another node and clock in the same directory: only those around the measure
    windows belong to this measurement.
    """
    tables, spans, sidecar = facts.tables, facts.spans, facts.manifest.telemetry
    fast, slow = (
        [gpu for gpu in GpuSamples.split(tables[table], columns) if gpu.touches(spans)]
        for table, columns in (("samples_fast", (*_FAST, "t_unix_ns")), ("samples_slow", _SLOW))
    )
    # With telemetry=none the run stays valid for its throughput; missing samples of a real sidecar are a problem.
    if not fast and sidecar and sidecar.source in (None, "none"):
        dependents = {name for names in DEPENDENTS.values() for name in names}
        reasons = dict.fromkeys((*dependents, *COUNTERS, *energy.UNCERTAINTY, "coverage_pct"), "telemetry off")
        source = {"counters_source": NONE}
        return Telemetry(values=source, reasons=reasons, energy=Energy(values={}), requested=False)
    hz, uuids = (sidecar and sidecar.hz) or gpu_samples.DEFAULT_HZ, {gpu.uuid for gpu in fast}
    counter_hz = (sidecar and sidecar.energy_hz) or hz
    rates = dict.fromkeys(_FAST, hz) | {COUNTER: counter_hz}
    # Null values cost a column its own figures, with a warning; missing rows are a problem.
    gaps = _gaps(fast, _FAST, spans, lambda _, name: gpu_samples.gap_limit_s(rates[name]))
    # The growth of a cumulative counter between two readings is known, however far apart they are.
    sampled = [name for name in _SLOW if name not in (*POWER_CAP_COUNTERS, *THERMAL_COUNTERS)]
    gaps |= _gaps(slow, sampled, spans, _slow_gap_limit_s)
    # If a counter is read less often than the rows, only a gap shows that readings are missing.
    columns = [name for name in _FAST if rates[name] >= hz]
    values: dict[str, Any] = {"coverage_pct": _coverage_pct(fast, columns, spans, hz)}
    for name in ("gpu_util_pct", "mem_active_pct"):
        values[name] = None if name in gaps else _mean_over_gpus(fast, name, spans)
    joules = energy.find_energy(fast, spans, gaps, counter_hz)
    counters = find_counters(facts.samples["samples_gpm"], uuids, spans)
    values |= {**joules.values, **_slow_values(slow, spans, gaps), **counters.values}
    reasons = {**counters.reasons, **joules.reasons}
    # The rows' own reason comes first: "not supported" says more than that there is no value in the window.
    nulls = [tables[name]["nulls"].unique().cast(pl.String) for name in ("samples_fast", "samples_slow")]
    recorded = null_reasons(pl.concat(nulls))
    if reason := joules.reasons.get("energy_j"):
        reasons = {**dict.fromkeys(DEPENDENTS[COUNTER], reason), **reasons}
    for column, names in DEPENDENTS.items():
        reason = recorded.get(column) or gaps.get(column) or f"no {column} in the measure window"
        reasons = {**dict.fromkeys(names, reason), **reasons}
    samples = {**dict.fromkeys(_FAST, fast), **dict.fromkeys(_SLOW, slow)}
    left_out = [gap for name, gap in gaps.items() if any(len(gpu.known(name).t_ns) for gpu in samples[name])]
    return Telemetry(
        values=values,
        reasons=reasons,
        fast=fast,
        slow=slow,
        hz=hz,
        counter_hz=counter_hz,
        energy=joules,
        left_out=left_out,
        uncovered_pct=100 - counters.coverage_pct,
    )


def _gaps(
    samples: list[GpuSamples], columns: Sequence[str], spans: list[Span], limit_s: Callable[[GpuSamples, str], float]
) -> dict[str, str]:
    gaps = {}
    for name in columns:
        checks = (check_column(gpu, name, span, limit_s(gpu, name)) for gpu, span in product(samples, spans))
        if gap := next(filter(None, checks), None):
            gaps[name] = gap
    return gaps


def _slow_gap_limit_s(samples: GpuSamples, _: str) -> float:
    """Return the limit by the median period of the samples: nothing else says how slow they were to be."""
    period_s = float(np.median(np.diff(samples.t_ns))) * 1e-9 if len(samples.t_ns) > 1 else 0.0
    return max(gpu_samples.MAX_GAP_S, 2.5 * period_s)


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


def _slow_values(samples: list[GpuSamples], spans: list[Span], gaps: Mapping[str, str]) -> dict[str, float | None]:
    """Return clocks averaged over GPUs; temperature and VRAM of the worst. A gap may hide a peak: null."""
    covered = {name: [] if name in gaps else samples for name in _SLOW}
    peak = {name: _maximum(gpu.maximum(name, spans) for gpu in covered[name]) for name in _SLOW}
    used, total, reserved = (peak[f"vram_{kind}_mib"] for kind in ("used", "total", "reserved"))
    room = total - reserved if None not in (total, reserved) else 0.0  # type: ignore[operator]
    whole = _maximum(
        float(gpu.known("vram_used_mib").columns["vram_used_mib"].max()) for gpu in covered["vram_used_mib"]
    )
    return {
        "temp_gpu_c_mean": _mean_over_gpus(covered["temp_gpu_c"], "temp_gpu_c", spans),
        "temp_gpu_c_max": peak["temp_gpu_c"],
        "sm_clock_mhz_mean": _mean_over_gpus(covered["sm_clock_mhz"], "sm_clock_mhz", spans),
        "vram_used_mib_mean": _mean_over_gpus(covered["vram_used_mib"], "vram_used_mib", spans),
        "vram_used_mib_peak": used,
        "vram_run_mib_peak": whole,
        # "Used" excludes what the driver reserves, so the memory that it is a share of must too.
        "vram_pct": 100 * used / room if used is not None and room > 0 else None,
        "vram_run_pct": 100 * whole / room if whole is not None and room > 0 else None,
        "throttle_power_pct": _maximum(gpu.counted_pct(POWER_CAP_COUNTERS, spans) for gpu in samples),
        "throttle_thermal_pct": _maximum(gpu.counted_pct(THERMAL_COUNTERS, spans) for gpu in samples),
    }


def _mean_over_gpus(samples: list[GpuSamples], column: str, spans: list[Span]) -> float | None:
    means = [mean for gpu in samples if (mean := gpu.mean(column, spans)) is not None]
    return sum(means) / len(means) if means else None


def _maximum(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


class WeightedMean(NamedTuple):
    """A mean, and the share of the measure windows that its rows cover."""

    value: float | None
    coverage_pct: float


@dataclass(frozen=True, kw_only=True)
class Counters(Columns):
    """The columns of the counters, and the share of the measure windows that rows of `sm_active_pct` cover."""

    coverage_pct: float = 0.0


def find_counters(samples: pl.DataFrame, uuids: set[str], spans: list[Span]) -> Counters:
    """Return the counters and their source from the samples of the run's GPUs, `uuids`."""
    own = samples.with_columns(pl.col("gpu_uuid", "nulls").cast(pl.String))
    own = own.filter(pl.col("gpu_uuid").is_in(sorted(uuids)))
    if own.is_empty():
        reason = "no samples_gpm of the run's GPUs"
        return Counters(values={"counters_source": NONE}, reasons=dict.fromkeys(COUNTERS, reason))
    means = {name: _mean_of_counter(own, name, uuids, spans) for name in COUNTERS}
    values: dict[str, float | str | None] = {name: mean.value for name, mean in means.items()}
    values["counters_source"] = NONE if all(value is None for value in values.values()) else GPM
    reasons, needed = null_reasons(own["nulls"]), f"{MIN_COVERAGE_PCT:.0f} % are needed"
    for name, mean in means.items():
        reasons.setdefault(name, f"{GPM} counters cover {mean.coverage_pct:.0f} % of the measure windows, {needed}")
    covered_pct = means["sm_active_pct"].coverage_pct
    return Counters(values=values, reasons={name: reasons[name] for name in COUNTERS}, coverage_pct=covered_pct)


def _mean_of_counter(samples: pl.DataFrame, name: str, uuids: set[str], spans: list[Span]) -> WeightedMean:
    """Return the mean over GPUs, without a value if one of them is not covered."""
    means = []
    for uuid in sorted(uuids):
        rows = samples.filter((pl.col("gpu_uuid") == uuid) & pl.col(name).is_not_null() & (pl.col("window_ms") > 0))
        window_ns = (rows["window_ms"].cast(pl.Float64) * 1e6).round().cast(pl.Int64).to_numpy()
        value = rows[name].cast(pl.Float64).to_numpy()
        means.append(weighted_mean(rows["t_mono_ns"].to_numpy(), window_ns, value, spans))
    coverage_pct = min((mean.coverage_pct for mean in means), default=0.0)
    known = [mean.value for mean in means if mean.value is not None]
    if not means or len(known) < len(means) or coverage_pct < MIN_COVERAGE_PCT:
        return WeightedMean(None, coverage_pct)
    return WeightedMean(math.fsum(known) / len(known), coverage_pct)


def weighted_mean(t_ns: Ints, window_ns: Ints, value: Floats, spans: list[Span]) -> WeightedMean:
    """Return the mean of rows over `spans`, weighted by overlap, and the share of the spans that they cover.

    A row counts if at least the share MIN_INSIDE of its window is inside. The result does not depend on the order
    of the rows, and lies within the values that it is made of.
    """
    begin = t_ns - window_ns
    weight = np.zeros(len(t_ns), dtype=np.int64)
    for start, end in spans:
        # The overlaps add up: the window of one row may reach into two spans.
        weight += np.clip(np.minimum(t_ns, end) - np.maximum(begin, start), 0, None)
    counts = (weight >= MIN_INSIDE * window_ns) & (weight > 0)
    total_ns = sum(end - start for start, end in spans)
    if not counts.any() or total_ns <= 0:
        return WeightedMean(None, 0.0)
    known, weights = value[counts], weight[counts].astype(np.float64)
    mean = math.fsum(known * weights) / math.fsum(weights)
    covered_ns = sum(_union_ns(begin[counts], t_ns[counts], *span) for span in spans)
    return WeightedMean(float(np.clip(mean, known.min(), known.max())), 100 * covered_ns / total_ns)


def _union_ns(begin: Ints, end: Ints, low: int, high: int) -> int:
    """Return the length that intervals cover between low and high; if they overlap it counts once."""
    order = np.lexsort((end, begin))
    first, last = np.clip(begin[order], low, high), np.clip(end[order], low, high)
    # How far the intervals before each one reach: only what lies beyond is counted for it.
    reached = np.concatenate([[low], np.maximum.accumulate(last)[:-1]])
    return int(np.clip(last - np.maximum(first, reached), 0, None).sum())
