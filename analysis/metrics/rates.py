"""Rates over the measure windows: N/T and S/T, percentiles of the step time, stalls, and the hours for all epochs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from analysis.columns import COLUMNS
from inpaint_bench.core.schema import WindowKind

from . import steadiness
from .facts import Columns, Facts, span_of
from .steadiness import Steadiness, stalls_of

# Columns about the steps of a run: they mean something only if every step does the same work.
_RATES = [column.name for column in COLUMNS if column.of_steps]


@dataclass(frozen=True, kw_only=True)
class Rates(Columns):
    """The columns, and what the checks need to know of the steps; None if the steps are not compared."""

    steps_in_table: int | None = None
    steadiness: Steadiness | None = None


def find_rates(facts: Facts, known: Mapping[str, Any]) -> Rates:
    """Return the rates of a run, whose columns by the manifest are `known`."""
    seconds, windows = facts.seconds, [window for window, _ in facts.measured]
    images, steps = sum(window.images for window in windows), sum(window.steps for window in windows)
    values: dict[str, Any] = {"window_s": seconds, "images": images, "n_steps": steps}
    if facts.uniform_steps:
        values |= {"images_per_s": images / seconds, "steps_per_s": steps / seconds}
        of_steps = _step_times(facts, steps)
        reasons: dict[str, str] = {}
        for each in (of_steps, _stalled(facts, images), _runtime(facts, known, values["images_per_s"])):
            values |= each.values
            reasons |= each.reasons
        return replace(of_steps, values=values, reasons=reasons)
    if not facts.is_command:
        reason = "the steps of this workload differ in their work: see its results"
    elif images:  # as the user stated
        values |= {"n_steps": None, "images_per_s": images / seconds}
        reason = "the steps of the command are not known"
    else:
        values |= {"n_steps": None, "images": None}
        reason = "neither steps nor images of the command are known; --images states them"
    return Rates(values=values, reasons=dict.fromkeys(_RATES, reason))


def _step_times(facts: Facts, num_steps: int) -> Rates:
    spans = {window.window_id: span for window, span in facts.measured}
    inside = steadiness.measured_steps(facts.tables["steps"], spans)
    if inside.is_empty():
        unknown = ("step_ms_p50", "step_ms_p95", "data_wait_pct", "step_mean_pct", "step_drift_pct")
        return Rates(values={}, reasons=dict.fromkeys(unknown, "no steps in the table"), steps_in_table=0)
    on_device, step_ms = inside["device_ms"].null_count() == 0, inside["step_ms"].to_numpy()
    p50, p95 = (float(value) for value in np.percentile(step_ms, [50, 95]))
    steady = steadiness.judge(inside["start_s"].to_numpy(), step_ms, facts.seconds)
    total_ns = facts.seconds * 1e9
    if inside.height != num_steps:
        # Over the host time of the same steps, so that a lost part does not make waiting look short.
        first, last = pl.col("t_start_mono_ns").min(), pl.col("t_end_mono_ns").max()
        total_ns = float(inside.group_by("window_id").agg((last - first).alias("span"))["span"].sum())
    too_short = ("step_mean_pct", "step_drift_pct") if steady.verdict == "too_short" else ()
    values = {
        "step_ms_kind": "device" if on_device else "host",
        "step_ms_p50": p50,
        "step_ms_p95": p95,
        **steady.columns,
        "data_wait_pct": 100 * float(inside["data_wait_ns"].sum()) / total_ns if total_ns > 0 else None,
    }
    reasons = dict.fromkeys(too_short, steady.explanation)
    return Rates(values=values, reasons=reasons, steps_in_table=inside.height, steadiness=steady)


def _stalled(facts: Facts, images: int) -> Columns:
    found = [stalls_of(facts, window) for window, _ in facts.measured]
    known = [stalls for stalls in found if stalls is not None]
    if len(known) < len(found):
        unknown = ("stall_s", "stall_pct", "images_per_s_steady")
        return Columns(values={}, reasons=dict.fromkeys(unknown, "not every step is in the table"))
    count, stall_s = sum(stalls.count for stalls in known), sum(stalls.seconds for stalls in known)
    values = {"stalls": count, "stall_s": stall_s, "stall_pct": 100 * stall_s / facts.seconds}
    return Columns(values={**values, "images_per_s_steady": images / (facts.seconds - stall_s)})


def _runtime(facts: Facts, known: Mapping[str, Any], images_per_s: float) -> Columns:
    """Return the hours for the requested epochs: measured only if the run itself processed that many images."""
    if not known["epochs"] or not known["dataset_images"] or not images_per_s:
        return Columns(values={})
    requested = known["epochs"] * known["dataset_images"]
    trained = sum(w.images for w in facts.windows if w.kind in (WindowKind.WARMUP, WindowKind.MEASURE))
    # A resumed run has windows of several clocks, and time between them in which nothing ran.
    if trained < requested or known["resumed_from_step"] is not None:
        return Columns(values={"runtime_h": requested / images_per_s / 3600, "runtime_kind": "projected"})
    spans = [span for window in facts.windows if (span := span_of(window))]
    total_ns = max(end for _, end in spans) - min(start for start, _ in spans)
    return Columns(values={"runtime_h": total_ns * 1e-9 / 3600, "runtime_kind": "measured"})
