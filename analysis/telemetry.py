"""What a run's samples say about its measure windows: energy, utilisation, temperature, clocks, VRAM, throttling.

A column counts only where its own values cover the window: rows whose value is null cover nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from . import audit, energy
from .audit import Lane

Window = tuple[int, int]
_ENERGY = ("energy_j", "power_w", "joules_per_image", "images_per_s_per_w", "steps_per_s_per_w")
_POWER = ("energy_integral_j", "energy_ratio", *_ENERGY)
# The figures that rest on each column: where one is null, the sidecar's reason for the column is its reason.
RESTS_ON: dict[str, tuple[str, ...]] = {
    "energy_mj": ("energy_ratio", *_ENERGY),
    "power_instant_w": _POWER,
    "power_avg1s_w": _POWER,
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
RATIO_LIMIT = 0.05


def figures(
    row: dict[str, Any],
    manifest: dict[str, Any],
    samples_fast: pl.DataFrame,
    samples_slow: pl.DataFrame,
    spans: list[Window],
    nulls: dict[str, str],
    warnings: list[str],
) -> list[str]:
    """Fill the row's telemetry figures; returns what makes the run invalid.

    A requeued job leaves samples of another node and clock in the same directory: only those around the measure
    windows are of this measurement.
    """
    fast = [lane for lane in Lane.split(samples_fast, _FAST) if lane.touches(spans)]
    slow = [lane for lane in Lane.split(samples_slow, _SLOW) if lane.touches(spans)]
    if audit.telemetry_off(manifest) and not fast:
        warnings.append("no telemetry was asked for: throughput only")
        nulls.update(dict.fromkeys((*_FIGURES, "coverage_pct"), "telemetry off"))
        return []
    hz = audit.fast_hz(manifest)
    problems = audit.devices(fast, manifest) if fast else ["no telemetry samples in the measure window"]
    problems += [text for lane in fast for span in spans for text in audit.window(lane, *span, hz)]
    row["coverage_pct"] = _coverage(fast, spans, hz)
    gaps = {name: why for name in _FAST if (why := _uncovered(fast, name, spans, hz))}
    for name in ("gpu_util_pct", "mem_active_pct"):
        if name not in gaps:
            row[name] = _mean(fast, name, spans)
    _energy(row, fast, spans, gaps, nulls, warnings)
    _slow(row, slow, spans)
    _reasons(row, pl.concat([samples_fast.select("nulls"), samples_slow.select("nulls")]), gaps, nulls)
    partly = [why for name, why in gaps.items() if any((~np.isnan(lane.columns[name])).any() for lane in fast)]
    warnings += [f"left out: {why}" for why in partly]
    return problems


def _uncovered(lanes: list[Lane], name: str, spans: list[Window], hz: float) -> str | None:
    found = (audit.column(lane, name, *span, hz) for lane in lanes for span in spans)
    return next((why for why in found if why), None)


def _coverage(lanes: list[Lane], spans: list[Window], hz: float) -> float | None:
    """Share of the expected samples, in %, of the column that has the fewest values; absent columns aside."""
    expected = sum(end - start for start, end in spans) * 1e-9 * hz * len(lanes)
    if not expected:
        return None
    counts = [
        sum(
            int(((t_ns >= a) & (t_ns <= b)).sum())
            for lane in lanes
            for t_ns in [lane.known(name).t_ns]
            for a, b in spans
        )
        for name in _FAST
        if any(len(lane.known(name).t_ns) for lane in lanes)
    ]
    return min(100.0, 100 * min(counts, default=0) / expected)


def _energy(
    row: dict[str, Any],
    fast: list[Lane],
    spans: list[Window],
    gaps: dict[str, str],
    nulls: dict[str, str],
    warnings: list[str],
) -> None:
    """Joules summed over GPUs, by the counter where it can be trusted, else by the integral of sampled power."""
    row["energy_integral_j"] = _sampled_j(fast, spans, gaps)
    counted = [] if "energy_mj" in gaps else [_counted_j(lane, span) for lane in fast for span in spans]
    stuck = any(value is not None and value <= 0 for value in counted)
    by_counter = _total(counted)
    if any(audit.counter_fell(lane.known("energy_mj").bracket(*span)) for lane in fast for span in spans):
        nulls["energy_j"] = "energy counter went back"
    elif by_counter is not None and not stuck:
        row["energy_j"], row["energy_source"] = by_counter, "counter"
    elif row["energy_integral_j"] is not None:
        row["energy_j"], row["energy_source"] = row["energy_integral_j"], "integral"
        why = "energy counter does not move" if stuck else "no energy counter"
        warnings.append(f"{why}: energy is the integral of sampled power")
    elif stuck:
        nulls["energy_j"] = "energy counter does not move and power is unknown"
    else:
        nulls["energy_j"] = "neither an energy counter nor power around the window"
    if row["energy_source"] == "counter" and row["energy_integral_j"]:
        row["energy_ratio"] = row["energy_j"] / row["energy_integral_j"]
        if abs(row["energy_ratio"] - 1) > RATIO_LIMIT:
            apart = 100 * (row["energy_ratio"] - 1)
            warnings.append(f"energy counter is {apart:+.1f} % off the integral of sampled power")
    elif stuck:
        nulls["energy_ratio"] = "energy counter does not move"
    else:
        nulls["energy_ratio"] = "counter and integral are not both known"


def _slow(row: dict[str, Any], slow: list[Lane], spans: list[Window]) -> None:
    """Clocks averaged over GPUs; temperature and VRAM of the worst."""
    row["temp_gpu_c_mean"] = _mean(slow, "temp_gpu_c", spans)
    row["temp_gpu_c_max"] = _max(slow, "temp_gpu_c", spans)
    row["sm_clock_mhz_mean"] = _mean(slow, "sm_clock_mhz", spans)
    row["vram_used_mib_peak"] = _max(slow, "vram_used_mib", spans)
    row["vram_used_mib_mean"] = _mean(slow, "vram_used_mib", spans)
    # "Used" leaves out what the driver reserves, so the room it is a share of must too.
    total, reserved = _max(slow, "vram_total_mib", spans), _max(slow, "vram_reserved_mib", spans)
    if row["vram_used_mib_peak"] is not None and total is not None and reserved is not None:
        row["vram_pct"] = 100 * row["vram_used_mib_peak"] / (total - reserved)
    row["throttle_power_pct"] = _throttled(slow, ("throttle_power_cap_ns",), spans)
    thermal = ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns")
    row["throttle_thermal_pct"] = _throttled(slow, thermal, spans)


def _reasons(row: dict[str, Any], cells: pl.DataFrame, gaps: dict[str, str], nulls: dict[str, str]) -> None:
    """Hand on the sidecar's own reasons for the columns that a null figure rests on, then those of the audit."""
    said: dict[str, str] = {}
    for cell in cells["nulls"].unique().drop_nulls().sort().to_list():
        for pair in str(cell).split(";"):
            column, _, why = pair.strip().partition("=")
            if why:
                said.setdefault(column, why)
    for column, names in RESTS_ON.items():
        why = said.get(column) or gaps.get(column) or f"no {column} in the measure window"
        for name in names:
            if row[name] is None:
                nulls.setdefault(name, why)


def _total(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def _counted_j(lane: Lane, span: Window) -> float | None:
    part = lane.known("energy_mj").bracket(*span)
    return energy.counter_j(part.t_ns, part.columns["energy_mj"], *span)


def _sampled_j(lanes: list[Lane], spans: list[Window], gaps: dict[str, str]) -> float | None:
    """Integral of instant power, which every card has; of its one-second average where it is missing."""
    for column in ("power_instant_w", "power_avg1s_w"):
        near = [(lane.known(column).bracket(*span), span) for lane in lanes for span in spans]
        joules = _total([energy.integral(part.t_ns, part.columns[column], *span) for part, span in near])
        if joules is not None and column not in gaps:
            return joules
    return None


def _mean(lanes: list[Lane], column: str, spans: list[Window]) -> float | None:
    """Mean over GPUs of the time-weighted mean over windows."""
    means = []
    for lane in lanes:
        near = [(lane.known(column).bracket(a, b), a, b) for a, b in spans]
        parts = [(energy.mean(part.t_ns, part.columns[column], a, b), b - a) for part, a, b in near]
        known = [(value, weight) for value, weight in parts if value is not None]
        if known:
            means.append(sum(v * w for v, w in known) / sum(w for _, w in known))
    return sum(means) / len(means) if means else None


def _max(lanes: list[Lane], column: str, spans: list[Window]) -> float | None:
    best: float | None = None
    for lane in lanes:
        for a, b in spans:
            inside = lane.columns[column][(lane.t_ns >= a) & (lane.t_ns <= b)]
            inside = inside[~np.isnan(inside)]
            if len(inside):
                top = float(inside.max())
                best = top if best is None else max(best, top)
    return best


def _throttled(lanes: list[Lane], columns: tuple[str, ...], spans: list[Window]) -> float | None:
    """Share of the window, in %, that the worst GPU spent held back; null where no counter is known."""
    shares = []
    for lane in lanes:
        rates = [energy.counter_rate(lane.t_ns, lane.columns[c], a, b) for c in columns for a, b in spans]
        known = [rate for rate in rates if rate is not None]
        if known:
            shares.append(100 * sum(known) / len(spans))
    return max(shares) if shares else None
