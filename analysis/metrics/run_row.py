"""One row per run (attempt): what it was, whether it is valid, and its figures over the measure windows.

With N images, S steps, T seconds and E joules of all GPUs in the completed measure windows: images/s = N/T, mean power
= E/T (never the mean of samples), J/image = E/N, images/s/W = N/E. A figure that cannot be known is null, and
`null_reasons` says why. A run that did not complete keeps its row and has no figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from analysis.columns import FLOAT
from inpaint_bench.core.records import Manifest, Window
from inpaint_bench.core.schema import Reason, Status, WindowKind

from . import audit, manifest_facts, stalls, steadiness
from .audit import board, bounds, events, samples
from .audit.evidence import Evidence, NodeTelemetry, RunFiles, number
from .draft import RowDraft
from .gpu_samples import Span
from .telemetry import fill_telemetry

# Of the steps of a run: they mean something where every step does the same work.
_RATES = (
    *("images_per_s", "steps_per_s", "step_ms_p50", "step_ms_p95", "data_wait_pct", "runtime_h", "mfu_pct"),
    *("joules_per_image", "joules_per_image_error", "images_per_s_per_w", "steps_per_s_per_w", "images_per_s_steady"),
    *("step_drift_pct", "step_block_cv_pct", "stall_s", "stall_pct"),
)


def summarise(
    manifest: Manifest,
    windows: list[Window],
    tables: Mapping[str, pl.DataFrame],
    files: RunFiles | None = None,
    nodes: Sequence[NodeTelemetry] = (),
) -> dict[str, Any]:
    """Return the row of one run, with a value or None for every column of runs.parquet.

    `tables` holds the rows of every long table, in written order; `files` is what else the directory holds,
    and `nodes` the telemetry of each node of several.
    """
    draft = RowDraft()
    row = draft.row
    row.update(manifest_facts.manifest_columns(manifest))
    kinds = _fill_source(row, manifest, tables["samples_fast"])
    row["valid"] = False
    if manifest.status != Status.COMPLETED:
        reason = f" ({manifest.reason})" if manifest.reason else ""
        row["invalid_reason"] = (
            "unavailable on this machine" if is_unavailable(row) else f"status {manifest.status}{reason}"
        )
        return row
    if manifest.profile and manifest.profile.counts:  # whatever windows the directory holds
        row["invalid_reason"] = "kernels were counted, nothing was timed (profile=ncu)"
        return row
    measured = [window for window in windows if window.kind == WindowKind.MEASURE]
    usable = [window for window in measured if window.status == Status.COMPLETED and _span(window)]
    if not usable:
        states = [f"{window.status}{'' if _span(window) else ', without an end'}" for window in measured]
        row["invalid_reason"] = f"no completed measure window ({', '.join(states) or 'none recorded'})"
        return row
    spans = [span for window in usable if (span := _span(window))]
    draft.null_reasons.update(manifest_facts.null_reasons(manifest))
    evidence = Evidence(
        manifest=manifest,
        windows=windows,
        measured=list(zip(usable, spans, strict=True)),
        tables=tables,
        files=files or RunFiles(),
        batch=row["batch"],
        nodes=nodes,
    )
    draft.problems += audit.problems(evidence)
    draft.warnings += audit.warnings(evidence)
    if len(usable) < len(measured):
        draft.warnings.append(f"{len(measured) - len(usable)} measure window(s) cut short and left out")
    draft.warnings += manifest_facts.warnings(manifest)
    # In this order: the runtime is projected from the rate, what is per joule needs the energy.
    row["window_s"] = sum(end - start for start, end in spans) * 1e-9
    row["images"], row["n_steps"] = sum(window.images for window in usable), sum(window.steps for window in usable)
    if evidence.uniform_steps:
        _fill_throughput(draft, usable, spans, tables["steps"])
        _fill_stalls(draft, evidence)
        _fill_runtime(draft, windows)
    elif evidence.is_command:
        _fill_command(draft)
    else:
        draft.set_reason(_RATES, "the steps of this workload differ in their work: see its results")
    if len(kinds) > 1:
        draft.problems.append(f"telemetry of several kinds: {row['source']}")
    fill_telemetry(draft, manifest, tables, spans)
    draft.warnings += events.check_incidents(tables["events"], manifest, spans)
    if evidence.uniform_steps or evidence.is_command:
        fill_per_joule(row)
    elif row["energy_j"]:
        row["power_w"] = row["energy_j"] / row["window_s"]
    draft.problems += samples.check_power(row["power_w"], manifest)
    if evidence.uniform_steps:
        _fill_mfu(draft, evidence)
    draft.problems += bounds.check_row(row)
    draft.problems += bounds.check_use(evidence, row)
    row["valid"] = not draft.problems
    row["invalid_reason"] = "; ".join(draft.problems) or None
    row["warnings"] = "; ".join(draft.warnings) or None
    row["null_reasons"] = _join_reasons(draft)
    return row


def is_unavailable(row: Mapping[str, Any]) -> bool:
    """Return whether a run ended because the machine lacks what its recipe needs."""
    return row.get("status") == Status.FAILED and row.get("reason") == Reason.UNAVAILABLE


def _fill_source(row: dict[str, Any], manifest: Manifest, samples_fast: pl.DataFrame) -> set[str]:
    """Fill where telemetry came from, and return its kinds. Replayed telemetry makes the run a demonstration."""
    sources = samples_fast["source"].unique().drop_nulls().cast(pl.String).sort().to_list()
    kinds = {source.partition(":")[0] for source in sources}
    requested = manifest.telemetry.source if manifest.telemetry else None
    row["source"] = ", ".join(sources) or requested or "none"
    row["demonstration"] = row["demonstration"] or row["source"].startswith("replay") or "replay" in kinds
    return kinds


def _span(window: Window) -> Span | None:
    start, end = window.t_start_mono_ns, window.t_end_mono_ns
    return (start, end) if end is not None and end > start else None


def _fill_throughput(draft: RowDraft, usable: list[Window], spans: list[Span], steps: pl.DataFrame) -> None:
    """Fill N/T and S/T over the measure windows; percentiles and data wait from the step table."""
    row, seconds = draft.row, draft.row["window_s"]
    row["images_per_s"], row["steps_per_s"] = row["images"] / seconds, row["n_steps"] / seconds
    # Measured time before each window minus its start: the time between two windows does not count.
    lengths_ns = [end - start for start, end in spans]
    offsets_ns = {
        window.window_id: sum(lengths_ns[:index]) - window.t_start_mono_ns for index, window in enumerate(usable)
    }
    inside = steps.with_columns(pl.col("window_id").cast(pl.String)).filter(pl.col("window_id").is_in(list(offsets_ns)))
    if inside.height != row["n_steps"]:
        draft.warnings.append(f"step table holds {inside.height} of {row['n_steps']} steps")
    if inside.is_empty():
        unknown = ("step_ms_p50", "step_ms_p95", "data_wait_pct", "step_drift_pct", "step_block_cv_pct")
        draft.set_reason(unknown, "no steps in the table")
        return
    # One kind for all steps: percentiles over device and host times together would mean nothing.
    on_device = inside["device_ms"].null_count() == 0
    row["step_ms_kind"] = "device" if on_device else "host"
    host_ms = (inside["t_end_mono_ns"] - inside["t_start_mono_ns"]) / 1e6
    step_ms = (inside["device_ms"].cast(pl.Float64) if on_device else host_ms).to_numpy()
    row["step_ms_p50"], row["step_ms_p95"] = (float(value) for value in np.percentile(step_ms, [50, 95]))
    start_ns = pl.col("t_start_mono_ns") + pl.col("window_id").replace_strict(offsets_ns, return_dtype=pl.Int64)
    result = steadiness.judge(inside.select(start_ns).to_series().to_numpy() * 1e-9, step_ms, seconds)
    row["steady"], row["step_blocks"] = result.verdict, result.blocks
    row["step_drift_pct"], row["step_block_cv_pct"] = result.drift_pct, result.cv_pct
    if result.verdict == "no":
        draft.warnings.append(result.explanation)
    elif result.verdict == "too_short":
        draft.set_reason(("step_drift_pct", "step_block_cv_pct"), result.explanation)
    wait_ns = float(inside["data_wait_ns"].sum())
    total_ns = seconds * 1e9
    if inside.height != row["n_steps"]:
        # Over the host time of the same steps, so that a lost part does not make waiting look short.
        first, last = pl.col("t_start_mono_ns").min(), pl.col("t_end_mono_ns").max()
        total_ns = float(inside.group_by("window_id").agg((last - first).alias("span"))["span"].sum())
    row["data_wait_pct"] = 100 * wait_ns / total_ns if total_ns > 0 else None


def _fill_command(draft: RowDraft) -> None:
    """Fill N/T where the user stated how many images the command processes; its steps are not known."""
    row = draft.row
    row["n_steps"], row["images"] = None, row["images"] or None
    if row["images"]:
        row["images_per_s"] = row["images"] / row["window_s"]
        draft.warnings.append("the images are those of --images, over the whole command, its start included")
        draft.set_reason(_RATES, "the steps of the command are not known")
    else:
        draft.set_reason(_RATES, "neither steps nor images of the command are known; --images states them")


def _fill_runtime(draft: RowDraft, windows: list[Window]) -> None:
    """Fill the hours for the requested epochs: measured only where the run itself processed that many images."""
    row = draft.row
    if not row["epochs"] or not row["dataset_images"] or not row["images_per_s"]:
        draft.set_reason(["runtime_h"], "epochs, dataset size or images/s unknown")
        return
    requested = row["epochs"] * row["dataset_images"]
    trained = sum(w.images for w in windows if w.kind in (WindowKind.WARMUP, WindowKind.MEASURE))
    spans = [span for window in windows if (span := _span(window))]
    # A resumed run has windows of several clocks, and time between them in which nothing ran.
    if trained >= requested and row["resumed_from_step"] is None:
        total_ns = max(end for _, end in spans) - min(start for start, _ in spans)
        row["runtime_h"], row["runtime_kind"] = total_ns * 1e-9 / 3600, "measured"
    else:
        row["runtime_h"], row["runtime_kind"] = requested / row["images_per_s"] / 3600, "projected"


def fill_per_joule(row: dict[str, Any]) -> None:
    """Fill what is per joule, from the same totals: joules_per_image * images_per_s_per_w is 1."""
    joules = row["energy_j"]
    if not joules:
        return
    row["power_w"] = joules / row["window_s"]
    if row["images"]:
        row["joules_per_image"], row["images_per_s_per_w"] = joules / row["images"], row["images"] / joules
        if row["energy_error_pct"] is not None:
            row["joules_per_image_error"] = row["joules_per_image"] * row["energy_error_pct"] / 100
    if row["n_steps"]:
        row["steps_per_s_per_w"] = row["n_steps"] / joules


def _fill_stalls(draft: RowDraft, evidence: Evidence) -> None:
    """Fill what stalled steps cost, and images/s over the time without them."""
    row, stalled = draft.row, stalls.Stalls()
    if any(evidence.steps_of(window).height != window.steps for window, _ in evidence.measured):
        draft.set_reason(("stall_s", "stall_pct", "images_per_s_steady"), "not every step is in the table")
        return
    for window, span in evidence.measured:
        stalled += stalls.find_stalls(evidence.steps_of(window), span)
    row["stalls"], row["stall_s"], row["stall_pct"] = (
        stalled.count,
        stalled.seconds,
        100 * stalled.seconds / row["window_s"],
    )
    row["images_per_s_steady"] = row["images"] / (row["window_s"] - stalled.seconds)
    if stalled.count:
        cost = f"{stalled.seconds:.1f} s, {row['stall_pct']:.1f} % of the measure window"
        without = f"{row['images_per_s_steady']:.4g} images/s in place of {row['images_per_s']:.4g}"
        draft.warnings.append(f"{stalled.count} step(s) stalled for {cost}; without them {without}")


def _fill_mfu(draft: RowDraft, evidence: Evidence) -> None:
    """Fill model FLOP/s over the GPU's dense BF16 peak, both from the manifest; only for 16-bit precision."""
    row, manifest = draft.row, evidence.manifest
    flop = number((manifest.workload_facts or {}).get("flop_per_image"))
    peak = manifest.gpu_facts.bf16_dense_tflops if manifest.gpu_facts else None
    if not flop or not peak or not row["images_per_s"]:
        draft.set_reason(["mfu_pct"], "FLOP per image or peak unknown")
    elif row["precision"] not in ("bf16", "fp16"):
        draft.set_reason(["mfu_pct"], f"the BF16 peak does not apply to {row['precision']}")
    elif problem := board.peak_problem(evidence):
        draft.set_reason(["mfu_pct"], problem)
    else:
        # The rate is of all GPUs together, the peak of one.
        row["mfu_pct"] = 100 * flop * row["images_per_s"] / (peak * 1e12 * (row["gpus"] or 1))


def _join_reasons(draft: RowDraft) -> str | None:
    """Return the reasons of all figures that are null: of the figure behind them, or that nothing was recorded."""
    if "energy_j" in draft.null_reasons:
        per_joule = ("power_w", "joules_per_image", "images_per_s_per_w", "steps_per_s_per_w")
        draft.set_reason(per_joule, draft.null_reasons["energy_j"])
    draft.set_reason(FLOAT, "not recorded")
    reasons = {name: reason for name, reason in draft.null_reasons.items() if draft.row[name] is None}
    return "; ".join(f"{name}={reason}" for name, reason in sorted(reasons.items())) or None
