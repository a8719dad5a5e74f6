"""What a run's samples say about its measure windows: energy, utilisation, temperature, clocks, VRAM, throttling.

A column counts only where its own values cover the window: rows whose value is null cover nothing. Sampled energy
is of instant power alone: one-second averages are another quantity, and a mean over runs must not hold both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from analysis.columns import COUNTERS
from analysis.ingest import parts

from . import audit, energy, gpm_counters
from .audit import GpuSamples
from .flags import THERMAL_PCT

Window = tuple[int, int]
_ENERGY = ("energy_j", "power_w", "joules_per_image", "images_per_s_per_w", "steps_per_s_per_w")
_POWER = ("energy_integral_j", "energy_ratio", *_ENERGY)
# The figures that rest on each column: where one is null, the sidecar's reason for the column is its reason.
RESTS_ON: dict[str, tuple[str, ...]] = {
    "energy_mj": ("energy_ratio", *_ENERGY),
    "power_instant_w": _POWER,
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
_FIGURES = tuple(dict.fromkeys(name for names in RESTS_ON.values() for name in names))
_FAST = ["power_instant_w", "power_avg1s_w", "energy_mj", "gpu_util_pct", "mem_active_pct"]
_SLOW = [name for name in RESTS_ON if name not in _FAST]
_THROTTLE = ("throttle_power_cap_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns")
MAX_COUNTER_DEVIATION = 0.05
ERROR = ("energy_error_pct", "energy_edge_pct", "energy_sensor_pct", "energy_update_ms", "joules_per_image_error")


def figures(
    row: dict[str, Any],
    manifest: dict[str, Any],
    samples_fast: pl.DataFrame,
    samples_slow: pl.DataFrame,
    samples_gpm: pl.DataFrame,
    events: pl.DataFrame,
    spans: list[Window],
    nulls: dict[str, str],
    warnings: list[str],
) -> list[str]:
    """Fill the row's telemetry figures; returns what makes the run invalid.

    A requeued job leaves samples of another node and clock in the same directory: only those around the measure
    windows are of this measurement.
    """
    fast = [lane for lane in GpuSamples.split(samples_fast, [*_FAST, "t_unix_ns"]) if lane.touches(spans)]
    slow = [lane for lane in GpuSamples.split(samples_slow, _SLOW) if lane.touches(spans)]
    if audit.telemetry_off(manifest) and not fast:
        warnings.append("no telemetry was asked for: throughput only")
        nulls.update(dict.fromkeys((*_FIGURES, *COUNTERS, *ERROR, "coverage_pct"), "telemetry off"))
        row["counters_source"] = gpm_counters.NONE
        return []
    hz = audit.fast_hz(manifest)
    problems = audit.devices(fast, manifest) if fast else ["no telemetry samples in the measure window"]
    problems += audit.strangers(slow, manifest)
    problems += [text for lane in fast for span in spans for text in audit.window(lane, *span, hz)]
    problems += audit.events(events, manifest, {lane.uuid for lane in fast})
    row["coverage_pct"] = _coverage(fast, spans, hz)
    limit_s = audit.gap_limit_s(hz)
    gaps = {name: why for name in _FAST if (why := _uncovered(fast, name, spans, [limit_s] * len(fast)))}
    for name in ("gpu_util_pct", "mem_active_pct"):
        if name not in gaps:
            row[name] = _mean(fast, name, spans)
    stuck = any(audit.counter_still(lane, *span, hz) for lane in fast for span in spans)
    _energy(row, fast, spans, gaps, stuck, nulls, warnings)
    limits_s = [_slow_limit_s(lane) for lane in slow]
    # What a cumulative counter grows by between two readings is known, however far apart they are.
    sampled = [name for name in _SLOW if name not in _THROTTLE]
    gaps |= {name: why for name in sampled if (why := _uncovered(slow, name, spans, limits_s))}
    _slow(row, slow, spans, gaps, warnings)
    gpm_counters.figures(row, manifest, samples_gpm, {lane.uuid for lane in fast}, spans, nulls)
    cells = [samples["nulls"].unique().cast(pl.String) for samples in (samples_fast, samples_slow)]
    _reasons(row, pl.concat(cells), gaps, nulls)
    partly = [
        why
        for name, why in gaps.items()
        if any((~np.isnan(lane.columns[name])).any() for lane in (slow if name in _SLOW else fast))
    ]
    warnings += [f"left out: {why}" for why in partly]
    return problems


def _uncovered(lanes: list[GpuSamples], name: str, spans: list[Window], limits_s: list[float]) -> str | None:
    found = (audit.column(lane, name, *span, s) for lane, s in zip(lanes, limits_s, strict=True) for span in spans)
    return next((why for why in found if why), None)


def _slow_limit_s(lane: GpuSamples) -> float:
    """As for the fast lane, but by the lane's own usual period: nothing else says how slow it was asked to be."""
    usual_s = float(np.median(np.diff(lane.t_ns))) * 1e-9 if len(lane.t_ns) > 1 else 0.0
    return max(audit.MAX_GAP_S, 2.5 * usual_s)


def _coverage(lanes: list[GpuSamples], spans: list[Window], hz: float) -> float | None:
    """Share of the expected samples, in %, of the column that has the fewest values; absent columns aside."""
    expected = sum(end - start for start, end in spans) * 1e-9 * hz * len(lanes)
    if not expected:
        return None
    counts = [
        sum(len(known.t_ns[known.inside(*span)]) for known in (lane.known(name) for lane in lanes) for span in spans)
        for name in _FAST
        if any(len(lane.known(name).t_ns) for lane in lanes)
    ]
    return min(100.0, 100 * min(counts, default=0) / expected)


def _energy(
    row: dict[str, Any],
    fast: list[GpuSamples],
    spans: list[Window],
    gaps: dict[str, str],
    stuck: bool,
    nulls: dict[str, str],
    warnings: list[str],
) -> None:
    """Joules summed over GPUs, by the counter where it can be trusted, else by the integral of instant power."""
    row["energy_integral_j"] = _sampled_j(fast, "power_instant_w", spans, gaps)
    averaged_j = _sampled_j(fast, "power_avg1s_w", spans, gaps)
    counted = [] if "energy_mj" in gaps else [_counted_j(lane, span) for lane in fast for span in spans]
    stuck = stuck or any(value is not None and value <= 0 for value in counted)
    by_counter = _total(counted)
    if any(audit.counter_fell(lane.known("energy_mj").bracket(*span)) for lane in fast for span in spans):
        nulls["energy_j"] = "energy counter went back"
    elif by_counter is not None and not stuck:
        row["energy_j"], row["energy_source"] = by_counter, "counter"
    elif row["energy_integral_j"] is not None:
        row["energy_j"], row["energy_source"] = row["energy_integral_j"], "integral"
        why = "energy counter does not move" if stuck else "no energy counter"
        warnings.append(f"{why}: energy is the integral of sampled power")
    elif averaged_j is not None:
        nulls["energy_j"] = "only one-second averages of power are known, and those are not mixed with instant power"
        warnings.append(f"no energy: {nulls['energy_j']}")
    elif stuck:
        nulls["energy_j"] = "energy counter does not move and power is unknown"
    else:
        nulls["energy_j"] = "neither an energy counter nor power around the window"
    sampled_j = averaged_j if row["energy_integral_j"] is None else row["energy_integral_j"]
    if row["energy_source"] == "counter" and sampled_j:
        apart = row["energy_j"] / sampled_j - 1
        if abs(apart) > MAX_COUNTER_DEVIATION:
            both = f"{row['energy_j']:.0f} J by the counter, {sampled_j:.0f} J by the integral"
            warnings.append(f"energy counter is {100 * apart:+.1f} % off the integral of sampled power: {both}")
    if row["energy_source"] == "counter" and row["energy_integral_j"]:
        row["energy_ratio"] = row["energy_j"] / row["energy_integral_j"]
    elif stuck:
        nulls["energy_ratio"] = "energy counter does not move"
    else:
        nulls["energy_ratio"] = "counter and integral are not both known"
    _error(row, fast, spans, sampled_j, nulls)


def _error(
    row: dict[str, Any], fast: list[GpuSamples], spans: list[Window], sampled_j: float | None, nulls: dict[str, str]
) -> None:
    """The error bar of energy by the counter. The integral alone has none: nothing says what it did not see."""
    if row["energy_source"] != "counter":
        nulls.update(dict.fromkeys(ERROR, nulls.get("energy_j", "no energy counter to tell it by")))
        return
    near = [lane.known("energy_mj").bracket(*span) for lane in fast for span in spans]
    seen = [update for one in near if (update := energy.update_s(one.t_ns, one.columns["energy_mj"])) is not None]
    if not seen or not sampled_j:
        why = "no sampled power to check the energy counter against" if seen else "too few updates of the counter"
        nulls.update(dict.fromkeys(ERROR, why))
        return
    seconds = sum(end - start for start, end in spans) * 1e-9
    joules = row["energy_j"]
    error = energy.EnergyUncertainty.of(joules, seconds, len(spans), len(fast), max(seen), joules / sampled_j)
    row["energy_update_ms"] = 1000 * max(seen)
    row["energy_edge_pct"], row["energy_sensor_pct"] = error.edge_pct, error.sensor_pct
    row["energy_error_pct"] = error.pct


def _slow(
    row: dict[str, Any], slow: list[GpuSamples], spans: list[Window], gaps: dict[str, str], warnings: list[str]
) -> None:
    """Clocks averaged over GPUs; temperature and VRAM of the worst. A column with a gap may hide a peak: null."""
    whole = {name: [] if name in gaps else slow for name in _SLOW}
    row["temp_gpu_c_mean"] = _mean(whole["temp_gpu_c"], "temp_gpu_c", spans)
    row["temp_gpu_c_max"] = _max(whole["temp_gpu_c"], "temp_gpu_c", spans)
    row["sm_clock_mhz_mean"] = _mean(whole["sm_clock_mhz"], "sm_clock_mhz", spans)
    row["vram_used_mib_peak"] = _max(whole["vram_used_mib"], "vram_used_mib", spans)
    row["vram_used_mib_mean"] = _mean(whole["vram_used_mib"], "vram_used_mib", spans)
    # "Used" leaves out what the driver reserves, so the room it is a share of must too.
    total = _max(whole["vram_total_mib"], "vram_total_mib", spans)
    reserved = _max(whole["vram_reserved_mib"], "vram_reserved_mib", spans)
    if row["vram_used_mib_peak"] is not None and total is not None and reserved is not None:
        row["vram_pct"] = 100 * row["vram_used_mib_peak"] / (total - reserved)
    row["throttle_power_pct"] = _throttled(slow, _THROTTLE[:1], spans)
    row["throttle_thermal_pct"] = _throttled(slow, _THROTTLE[1:], spans)
    if (row["throttle_thermal_pct"] or 0) > THERMAL_PCT:
        warnings.append(f"thermally throttled for {row['throttle_thermal_pct']:.1f} % of the measure window")


def _reasons(row: dict[str, Any], cells: pl.Series, gaps: dict[str, str], nulls: dict[str, str]) -> None:
    """Hand on the sidecar's own reasons for the columns that a null figure rests on, then those of the audit."""
    said = parts.null_reasons(cells)
    for column, names in RESTS_ON.items():
        why = said.get(column) or gaps.get(column) or f"no {column} in the measure window"
        for name in names:
            if row[name] is None:
                nulls.setdefault(name, why)


def _total(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def _counted_j(lane: GpuSamples, span: Window) -> float | None:
    part = lane.known("energy_mj").bracket(*span)
    return energy.counter_j(part.t_ns, part.columns["energy_mj"], *span)


def _sampled_j(lanes: list[GpuSamples], column: str, spans: list[Window], gaps: dict[str, str]) -> float | None:
    """Integral of one column of power over all GPUs and windows; None where it does not cover one of them."""
    if column in gaps:
        return None
    near = [(lane.known(column).bracket(*span), span) for lane in lanes for span in spans]
    return _total([energy.integral(part.t_ns, part.columns[column], *span) for part, span in near])


def _mean(lanes: list[GpuSamples], column: str, spans: list[Window]) -> float | None:
    """Mean over GPUs of the time-weighted mean over windows."""
    means = []
    for lane in lanes:
        near = [(lane.known(column).bracket(a, b), a, b) for a, b in spans]
        parts = [(energy.mean(part.t_ns, part.columns[column], a, b), b - a) for part, a, b in near]
        known = [(value, weight) for value, weight in parts if value is not None]
        if known:
            means.append(sum(v * w for v, w in known) / sum(w for _, w in known))
    return sum(means) / len(means) if means else None


def _max(lanes: list[GpuSamples], column: str, spans: list[Window]) -> float | None:
    best: float | None = None
    for lane in lanes:
        known = lane.known(column)
        for span in spans:
            inside = known.columns[column][known.inside(*span)]
            if len(inside):
                top = float(inside.max())
                best = top if best is None else max(best, top)
    return best


def _throttled(lanes: list[GpuSamples], columns: tuple[str, ...], spans: list[Window]) -> float | None:
    """Share of the windows, in %, that the worst GPU spent held back; null where no counter is known in all of them.

    Two reasons may hold at the same moment: their sum is an upper bound, and never more than the whole.
    """
    whole_ns = sum(end - start for start, end in spans)
    shares = []
    for lane in lanes:
        known = [grown for name in columns if (grown := _grown_ns(lane.known(name), name, spans)) is not None]
        if known:
            shares.append(min(100.0, 100 * sum(known) / whole_ns))
    return max(shares) if shares else None


def _grown_ns(lane: GpuSamples, name: str, spans: list[Window]) -> float | None:
    """What a cumulative counter grows by in all windows together; None where one is not covered, or it went back."""
    near = [(lane.bracket(*span), span) for span in spans]
    grown = [energy.growth(part.t_ns, part.columns[name], *span) for part, span in near]
    return None if any(value is not None and value < 0 for value in grown) else _total(grown)
