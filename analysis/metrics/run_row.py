"""One row per run (attempt): what it was, whether it counts, and its figures over the measure window.

With N images, S steps, T seconds and E joules of all GPUs in the completed measure windows: images/s = N/T,
mean power = E/T (never the mean of samples), J/image = E/N, images/s/W = N/E. A figure that cannot be known
is null, and `nulls` says why. A run that did not complete keeps its row and has no figures.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from analysis.columns import FLOAT, SCHEMA, TEXT
from analysis.ingest import parts
from inpaint_bench.core.schema import Reason, Status, WindowKind, WindowStatus

from . import audit, manifest_facts, steadiness, telemetry
from .energy import Floats
from .telemetry import Window

SKIPPED_SHOWN = 50  # photographs named per run; all of them are counted


def summarise(
    manifest: dict[str, Any],
    windows: list[dict[str, Any]],
    samples_fast: pl.DataFrame,
    samples_slow: pl.DataFrame,
    steps: pl.DataFrame,
    events: pl.DataFrame | None = None,
    samples_gpm: pl.DataFrame | None = None,
) -> dict[str, Any]:
    """The row of one run, with a value or None for every column of SCHEMA."""
    events = pl.DataFrame(schema=parts.polars_schema("events")) if events is None else events
    gpm = pl.DataFrame(schema=parts.polars_schema("samples_gpm")) if samples_gpm is None else samples_gpm
    row: dict[str, Any] = dict.fromkeys(SCHEMA)
    row.update(_identity(manifest))
    manifest = manifest_facts.with_batch(manifest)
    row["batch"] = manifest.get("batch")
    sources = samples_fast["source"].unique().drop_nulls().cast(pl.String).sort().to_list()
    kinds = {str(source).partition(":")[0] for source in sources}
    row["source"] = ", ".join(sources) or (manifest.get("telemetry") or {}).get("source") or "none"
    row["demonstration"] = (
        bool(manifest.get("demonstration")) or row["source"].startswith("replay") or "replay" in kinds
    )
    row["valid"] = False
    if manifest.get("status") != Status.COMPLETED:
        row["invalid_reason"] = f"status {manifest.get('status')}" + (
            f" ({manifest['reason']})" if manifest.get("reason") else ""
        )
        if is_unavailable(manifest):
            row["invalid_reason"] = "unavailable on this machine"
        return row
    measured = [w for w in windows if w.get("kind") == WindowKind.MEASURE]
    usable = [w for w in measured if w.get("status") == WindowStatus.COMPLETED and _span(w)]
    if not usable:
        states = ", ".join(f"{w.get('status')}{'' if _span(w) else ', without an end'}" for w in measured)
        states = states or "none recorded"
        row["invalid_reason"] = f"no completed measure window ({states})"
        return row
    warnings = _workload_warnings(manifest) + [text for w in usable for text in audit.short(w)]
    if len(usable) < len(measured):
        warnings.append(f"{len(measured) - len(usable)} measure window(s) cut short and left out")
    warnings += manifest_facts.warnings(manifest)
    spans = [span for w in usable if (span := _span(w))]
    nulls = manifest_facts.nulls(manifest)
    _throughput(row, usable, spans, steps, nulls, warnings)
    _runtime(row, windows, nulls)
    problems = [text for w in usable for text in (*audit.clocks(w), *audit.counts(w, manifest))]
    problems += [text for w in usable for text in (*audit.overlaps(w, windows), *audit.steps(w, steps))]
    if row["images"] is None:
        problems.append("the measure window does not say how many images it processed")
    if len(kinds) > 1:
        problems.append(f"telemetry of several kinds: {row['source']}")
    problems += telemetry.figures(row, manifest, samples_fast, samples_slow, gpm, events, spans, nulls, warnings)
    warnings += audit.incidents(events, manifest, usable)
    _per_watt(row)
    problems += audit.over_limit(row["power_w"], manifest)
    _mfu(row, manifest, nulls)
    _explain(row, nulls)
    row["valid"] = not problems
    row["invalid_reason"] = "; ".join(problems) or None
    row["warnings"] = "; ".join(warnings) or None
    row["null_reasons"] = "; ".join(f"{name}={why}" for name, why in sorted(nulls.items())) or None
    return row


def is_unavailable(row: Mapping[str, Any]) -> bool:
    """Whether a run, by its manifest or its row, ended because the machine lacks what its recipe needs."""
    return row.get("status") == Status.FAILED and row.get("reason") == Reason.UNAVAILABLE


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
        **_photographs(manifest),
        **manifest_facts.facts(manifest),
    )
    if facts.get("own_shapes"):  # not the model of that name: never in one cell with it, nor beside the poster
        values["model"] = f"{values['model']} of other shapes, {facts.get('parameters') or 0:,} parameters"
    for name, value in values.items():
        if value is not None and name in TEXT:
            values[name] = str(value)
    return values


def _photographs(manifest: dict[str, Any]) -> dict[str, Any]:
    """How many photographs were found, used and left out, and which ones were left out and why."""
    data = manifest.get("data") or {}
    lost = data.get("skipped")
    named = [{"file": str(one.get("file")), "reason": str(one.get("reason"))} for one in lost or []]
    return {
        "data_identity": data.get("identity"),
        "images_found": data.get("found"),
        "images_used": data.get("used"),
        "images_skipped": None if lost is None else len(lost),
        "skipped_images": json.dumps(named[:SKIPPED_SHOWN]) if named else None,
    }


def _workload_warnings(manifest: dict[str, Any]) -> list[str]:
    facts = manifest.get("workload_facts") or {}
    words = {"losses_not_finite": "loss(es) not finite", "skipped_steps": "optimiser step(s) skipped"}
    return [f"{facts[name]} {text}" for name, text in words.items() if (facts.get(name) or 0) > 0]


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
        unknown = ("step_ms_p50", "data_wait_pct", "step_drift_pct", "step_block_cv_pct")
        nulls.update(dict.fromkeys(unknown, "no steps in the table"))
        return
    on_device = inside["device_ms"].null_count() == 0
    row["step_ms_kind"] = "device" if on_device else "host"
    host_ms = (inside["t_end_mono_ns"] - inside["t_start_mono_ns"]) / 1e6
    millis = (inside["device_ms"].cast(pl.Float64) if on_device else host_ms).to_numpy()
    row["step_ms_p50"], row["step_ms_p95"] = (float(q) for q in np.percentile(millis, [50, 95]))
    _steadiness(row, usable, inside, millis, nulls, warnings)
    # Of the same steps' own time on the host, so that a lost part does not make waiting look short.
    starts = inside.group_by("window_id").agg(
        (pl.col("t_end_mono_ns").max() - pl.col("t_start_mono_ns").min()).alias("span"),
        pl.col("data_wait_ns").sum().alias("wait"),
    )
    complete = inside.height == row["n_steps"]
    over = seconds * 1e9 if complete else float(starts["span"].sum())
    row["data_wait_pct"] = 100 * float(starts["wait"].sum()) / over if over > 0 else None


def _steadiness(
    row: dict[str, Any],
    usable: list[dict[str, Any]],
    inside: pl.DataFrame,
    millis: Floats,
    nulls: dict[str, str],
    warnings: list[str],
) -> None:
    """Whether the step time had settled, over the measured time: what lies between two windows takes none of it."""
    offset_ns: dict[str, int] = {}
    measured_ns = 0
    for window in usable:
        start, end = window["t_start_mono_ns"], window["t_end_mono_ns"]
        offset_ns[str(window.get("window_id"))] = measured_ns - start
        measured_ns += end - start
    shift = pl.col("window_id").replace_strict(offset_ns, return_dtype=pl.Int64)
    at_s = (inside.select(pl.col("t_start_mono_ns") + shift).to_series().to_numpy()) * 1e-9
    found = steadiness.judge(at_s, millis, measured_ns * 1e-9)
    row["steady"], row["step_blocks"] = found.verdict.value, found.blocks
    row["step_drift_pct"], row["step_block_cv_pct"] = found.drift_pct, found.cv_pct
    if found.verdict is steadiness.Steady.NO:
        warnings.append(found.words)
    elif found.verdict is steadiness.Steady.TOO_SHORT:
        nulls["step_drift_pct"] = nulls["step_block_cv_pct"] = found.words


def _runtime(row: dict[str, Any], windows: list[dict[str, Any]], nulls: dict[str, str]) -> None:
    """Hours for the epochs asked: measured only where the run itself processed that many images."""
    if not row["epochs"] or not row["dataset_images"] or not row["images_per_s"]:
        nulls["runtime_h"] = "epochs, dataset size or images/s unknown"
        return
    asked = row["epochs"] * row["dataset_images"]
    trained = [w for w in windows if w.get("kind") in (WindowKind.WARMUP, WindowKind.MEASURE)]
    spans = [span for w in windows if (span := _span(w))]
    # A run that went on elsewhere, or later, has windows of several clocks, and stood still between them.
    if sum(w.get("images") or 0 for w in trained) >= asked and row["resumed_from_step"] is None:
        whole_ns = max(end for _, end in spans) - min(start for start, _ in spans)
        row["runtime_h"], row["runtime_kind"] = whole_ns * 1e-9 / 3600, "measured"
    else:
        row["runtime_h"], row["runtime_kind"] = asked / row["images_per_s"] / 3600, "projected"


def _per_watt(row: dict[str, Any]) -> None:
    joules = row["energy_j"]
    if not joules:
        return
    row["power_w"] = joules / row["window_s"]
    if row["images"]:
        row["joules_per_image"] = joules / row["images"]
        row["images_per_s_per_w"] = row["images"] / joules
        if row.get("energy_error_pct") is not None:
            row["joules_per_image_error"] = row["joules_per_image"] * row["energy_error_pct"] / 100
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


def _explain(row: dict[str, Any], nulls: dict[str, str]) -> None:
    """A reason for every figure that is null: of the figure it is worked out from, or that nothing was recorded."""
    per_joule = ("joules_per_image", "images_per_s_per_w", "steps_per_s_per_w")
    for name in ("power_w", *per_joule):
        if row["energy_j"] is None and "energy_j" in nulls:
            nulls.setdefault(name, nulls["energy_j"])
    if "step_ms_p50" in nulls:
        nulls.setdefault("step_ms_p95", nulls["step_ms_p50"])
    for name in FLOAT:
        if row[name] is None:
            nulls.setdefault(name, "not recorded")
    for name in [name for name in nulls if row[name] is not None]:
        del nulls[name]
