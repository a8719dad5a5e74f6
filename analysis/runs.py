"""One row per run (attempt): what it was, whether it counts, and its figures over the measure window.

With N images, S steps, T seconds and E joules of all GPUs in the completed measure windows: images/s = N/T,
mean power = E/T (never the mean of samples), J/image = E/N, images/s/W = N/E. A figure that cannot be known
is null, and `nulls` says why. A run that did not complete keeps its row and has no figures.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl

from inpaint_bench.contract import Status, WindowKind, WindowStatus

from . import audit, energy
from .audit import Lane
from .columns import SCHEMA, TEXT

_FAST = ["power_instant_w", "power_avg1s_w", "energy_mj", "gpu_util_pct", "mem_active_pct"]
_SLOW = [
    "sm_clock_mhz",
    "throttle_power_cap_ns",
    "throttle_sw_thermal_ns",
    "throttle_hw_thermal_ns",
    "temp_gpu_c",
    "vram_total_mib",
    "vram_reserved_mib",
    "vram_used_mib",
]
Window = tuple[int, int]


def summarise(
    manifest: dict[str, Any],
    windows: list[dict[str, Any]],
    samples_fast: pl.DataFrame,
    samples_slow: pl.DataFrame,
    steps: pl.DataFrame,
) -> dict[str, Any]:
    """The row of one run, with a value or None for every column of SCHEMA."""
    row: dict[str, Any] = dict.fromkeys(SCHEMA)
    row.update(_identity(manifest))
    sources = samples_fast["source"].unique().drop_nulls().sort().to_list()
    row["source"] = ", ".join(sources) or (manifest.get("telemetry") or {}).get("source") or "none"
    row["demonstration"] = bool(manifest.get("demonstration")) or row["source"].startswith("replay")
    row["valid"] = False
    if manifest.get("status") != Status.COMPLETED:
        row["invalid_reason"] = f"status {manifest.get('status')}" + (
            f" ({manifest['reason']})" if manifest.get("reason") else ""
        )
        return row
    measured = [w for w in windows if w.get("kind") == WindowKind.MEASURE]
    usable = [w for w in measured if w.get("status") == WindowStatus.COMPLETED and _span(w)]
    if not usable:
        states = ", ".join(str(w.get("status")) for w in measured) or "none recorded"
        row["invalid_reason"] = f"no completed measure window ({states})"
        return row
    warnings = []
    if len(usable) < len(measured):
        warnings.append(f"{len(measured) - len(usable)} measure window(s) cut short and left out")
    spans = [span for w in usable if (span := _span(w))]
    nulls: dict[str, str] = {}
    _throughput(row, usable, spans, steps, nulls, warnings)
    _runtime(row, windows, nulls)
    problems = []
    if row["images"] is None:
        problems.append("the measure window does not say how many images it processed")
    # A requeued job leaves samples of another node and clock in the same directory: only those around the
    # measure windows are of this measurement.
    fast = [lane for lane in Lane.split(samples_fast, _FAST) if lane.touches(spans)]
    slow = [lane for lane in Lane.split(samples_slow, _SLOW) if lane.touches(spans)]
    if audit.telemetry_off(manifest) and not fast:
        warnings.append("no telemetry was asked for: throughput only")
        nulls.update(dict.fromkeys(("power_w", "energy_j", "gpu_util_pct"), "telemetry off"))
    else:
        hz = audit.fast_hz(manifest)
        problems += audit.devices(fast, manifest) if fast else ["no telemetry samples in the measure window"]
        problems += [text for lane in fast for span in spans for text in audit.window(lane, *span, hz)]
        row["coverage_pct"] = _coverage(fast, spans, hz)
        _telemetry(row, fast, slow, spans, nulls, warnings)
    _per_watt(row)
    _mfu(row, manifest, nulls)
    _hardware_nulls(row, pl.concat([samples_fast.select("nulls"), samples_slow.select("nulls")]), nulls)
    row["valid"] = not problems
    row["invalid_reason"] = "; ".join(problems) or None
    row["warnings"] = "; ".join(warnings) or None
    row["nulls"] = "; ".join(f"{name}={why}" for name, why in sorted(nulls.items())) or None
    return row


def _identity(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says about the run; null where it does not."""
    facts = manifest.get("workload_facts") or {}
    env = manifest.get("environment") or {}
    slurm = manifest.get("slurm") or {}
    memory = manifest.get("memory") or {}
    found = [device for device in manifest.get("devices") or [] if isinstance(device, dict)]
    limits = [device["power_limit_w"] for device in found if device.get("power_limit_w") is not None]
    clocks = [device["max_sm_clock_mhz"] for device in found if device.get("max_sm_clock_mhz")]
    same = "run_id sweep_id point attempt site gpu workload recipe model status reason message batch gpus config_hash"
    values: dict[str, Any] = {name: manifest.get(name) for name in same.split()}
    values.update(
        started=_when(manifest.get("started_unix_ns")),
        ended=_when(manifest.get("ended_unix_ns")),
        gpu_name=_joined(device.get("name") for device in found),
        gpu_uuid=_joined(device.get("uuid") for device in found),
        power_limit_w=sum(limits) if limits else None,
        sm_clock_mhz_limit=min(clocks, default=None),
        node=slurm.get("node") or env.get("hostname"),
        slurm_job_id=slurm.get("job_id"),
        driver=env.get("driver"),
        torch=env.get("torch"),
        cuda=env.get("cuda"),
        precision=facts.get("precision"),
        resolution_px=facts.get("resolution_px"),
        epochs=facts.get("epochs"),
        dataset_images=facts.get("dataset_images") or facts.get("num_images"),
        torch_allocated_peak_mib=memory.get("allocated_peak_mib"),
        torch_reserved_peak_mib=memory.get("reserved_peak_mib"),
    )
    for name, value in values.items():
        if value is not None and name in TEXT:
            values[name] = str(value)
    return values


def _joined(values: Iterable[Any]) -> str | None:
    return ", ".join(dict.fromkeys(str(v) for v in values if v)) or None


def _when(unix_ns: Any) -> dt.datetime | None:
    return dt.datetime.fromtimestamp(unix_ns / 1e9, dt.UTC) if isinstance(unix_ns, int) else None


def _span(window: dict[str, Any]) -> Window | None:
    start, end = window.get("t_start_mono_ns"), window.get("t_end_mono_ns")
    return (start, end) if isinstance(start, int) and isinstance(end, int) and end > start else None


def _throughput(
    row: dict[str, Any],
    usable: list[dict[str, Any]],
    spans: list[Window],
    steps: pl.DataFrame,
    nulls: dict[str, str],
    warnings: list[str],
) -> None:
    """N/T and S/T over the measure windows; percentiles and data wait from the step table."""
    seconds = sum(end - start for start, end in spans) * 1e-9
    row["window_s"] = seconds
    for name, key in (("images", "images"), ("n_steps", "steps")):
        counts = [w.get(key) for w in usable]
        row[name] = sum(c for c in counts if c is not None) if None not in counts else None
    if row["images"] is not None:
        row["images_per_s"] = row["images"] / seconds
    if row["n_steps"] is not None:
        row["steps_per_s"] = row["n_steps"] / seconds
    inside = steps.filter(pl.col("window_id").is_in([str(w.get("window_id")) for w in usable]))
    if row["n_steps"] is not None and inside.height != row["n_steps"]:
        warnings.append(f"step table holds {inside.height} of {row['n_steps']} steps")
    if inside.is_empty():
        nulls["step_ms_p50"] = nulls["data_wait_pct"] = "no steps in the table"
        return
    on_device = inside["device_ms"].null_count() == 0
    row["step_ms_kind"] = "device" if on_device else "host"
    host_ms = (inside["t_end_mono_ns"] - inside["t_start_mono_ns"]) / 1e6
    millis = (inside["device_ms"].cast(pl.Float64) if on_device else host_ms).to_numpy()
    row["step_ms_p50"], row["step_ms_p95"] = (float(q) for q in np.percentile(millis, [50, 95]))
    # Of the same steps' own time on the host, so that a lost part does not make waiting look short.
    starts = inside.group_by("window_id").agg(
        (pl.col("t_end_mono_ns").max() - pl.col("t_start_mono_ns").min()).alias("span"),
        pl.col("data_wait_ns").sum().alias("wait"),
    )
    complete = inside.height == row["n_steps"]
    over = seconds * 1e9 if complete else float(starts["span"].sum())
    row["data_wait_pct"] = 100 * float(starts["wait"].sum()) / over if over > 0 else None


def _runtime(row: dict[str, Any], windows: list[dict[str, Any]], nulls: dict[str, str]) -> None:
    """Hours for the epochs asked: measured only where the run itself processed that many images."""
    if not row["epochs"] or not row["dataset_images"] or not row["images_per_s"]:
        nulls["runtime_h"] = "epochs, dataset size or images/s unknown"
        return
    asked = row["epochs"] * row["dataset_images"]
    trained = [w for w in windows if w.get("kind") in (WindowKind.WARMUP, WindowKind.MEASURE)]
    spans = [span for w in windows if (span := _span(w))]
    if sum(w.get("images") or 0 for w in trained) >= asked:
        whole_ns = max(end for _, end in spans) - min(start for start, _ in spans)
        row["runtime_h"], row["runtime_kind"] = whole_ns * 1e-9 / 3600, "measured"
    else:
        row["runtime_h"], row["runtime_kind"] = asked / row["images_per_s"] / 3600, "projected"


def _coverage(lanes: list[Lane], spans: list[Window], hz: float) -> float | None:
    expected = sum(end - start for start, end in spans) * 1e-9 * hz * len(lanes)
    if not expected:
        return None
    inside = sum(int(((lane.t_ns >= a) & (lane.t_ns <= b)).sum()) for lane in lanes for a, b in spans)
    return min(100.0, 100 * inside / expected)


def _telemetry(
    row: dict[str, Any],
    fast: list[Lane],
    slow: list[Lane],
    spans: list[Window],
    nulls: dict[str, str],
    warnings: list[str],
) -> None:
    """Energy summed over GPUs; utilisation and clocks averaged over them; temperature and VRAM of the worst."""
    row["gpu_util_pct"] = _mean(fast, "gpu_util_pct", spans)
    row["mem_active_pct"] = _mean(fast, "mem_active_pct", spans)
    counted = [_sum(lane, "energy_mj", spans) for lane in fast]
    row["energy_integral_j"] = _total([_sampled_j(lane, spans) for lane in fast])
    if any(audit.counter_fell(lane.bracket(*span)) for lane in fast for span in spans):
        nulls["energy_j"] = "energy counter went back"
    elif (by_counter := _total(counted)) is not None:
        row["energy_j"], row["energy_source"] = by_counter, "counter"
    elif row["energy_integral_j"] is not None:
        row["energy_j"], row["energy_source"] = row["energy_integral_j"], "integral"
        warnings.append("no energy counter: energy is the integral of sampled power")
    else:
        nulls["energy_j"] = "neither an energy counter nor power around the window"
    if row["energy_source"] == "counter" and row["energy_integral_j"]:
        row["energy_ratio"] = row["energy_j"] / row["energy_integral_j"]
    else:
        nulls["energy_ratio"] = "counter and integral are not both known"
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


def _total(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def _sum(lane: Lane, column: str, spans: list[Window]) -> float | None:
    near = [(lane.bracket(a, b), a, b) for a, b in spans]
    return _total([energy.counter_j(part.t_ns, part.columns[column], a, b) for part, a, b in near])


def _sampled_j(lane: Lane, spans: list[Window]) -> float | None:
    """Integral of instant power, which every card has; of its one-second average where it is missing."""
    near = [(lane.bracket(a, b), a, b) for a, b in spans]
    for column in ("power_instant_w", "power_avg1s_w"):
        joules = _total([energy.integral(part.t_ns, part.columns[column], a, b) for part, a, b in near])
        if joules is not None:
            return joules
    return None


def _mean(lanes: list[Lane], column: str, spans: list[Window]) -> float | None:
    """Mean over GPUs of the time-weighted mean over windows."""
    means = []
    for lane in lanes:
        near = [(lane.bracket(a, b), a, b) for a, b in spans]
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


def _per_watt(row: dict[str, Any]) -> None:
    joules = row["energy_j"]
    if not joules:
        return
    row["power_w"] = joules / row["window_s"]
    if row["images"]:
        row["joules_per_image"] = joules / row["images"]
        row["images_per_s_per_w"] = row["images"] / joules
    if row["n_steps"]:
        row["steps_per_s_per_w"] = row["n_steps"] / joules


def _mfu(row: dict[str, Any], manifest: dict[str, Any], nulls: dict[str, str]) -> None:
    """Model FLOP/s over the card's dense BF16 peak, both from the manifest; only for 16-bit precision."""
    facts = manifest.get("workload_facts") or {}
    flop, peak = facts.get("flop_per_image"), (manifest.get("gpu_facts") or {}).get("bf16_dense_tflops")
    if not flop or not peak or not row["images_per_s"]:
        nulls["mfu_pct"] = "FLOP per image or peak unknown"
    elif facts.get("precision") not in ("bf16", "fp16"):
        nulls["mfu_pct"] = f"the BF16 peak says nothing about {facts.get('precision')}"
    else:
        row["mfu_pct"] = 100 * flop * row["images_per_s"] / (peak * 1e12 * (row["gpus"] or 1))


def _hardware_nulls(row: dict[str, Any], cells: pl.DataFrame, nulls: dict[str, str]) -> None:
    """Hand on the sidecar's own reasons for the columns that a null figure rests on."""
    for cell in cells["nulls"].unique().drop_nulls().to_list():
        for pair in str(cell).split(";"):
            column, _, why = pair.partition("=")
            figures = [name for name in row if name == column or name.startswith(f"{column}_")]
            for name in figures:
                if row[name] is None and why:
                    nulls.setdefault(name, why)
