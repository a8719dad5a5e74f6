"""Columns of runs.parquet that older merges did not write, from the steps and samples of their datasets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from inpaint_bench.core.schema import Status, WindowKind

from .columns import SCHEMA
from .metrics import steadiness
from .metrics.flags import Flag

_STALE = r"(step_drift_pct|step_block_cv_pct)=[^;]*(; )?|not steady: [^;]*(; )?"  # by blocks of 10 s


def add_columns(
    runs: pl.DataFrame, windows: pl.DataFrame, scan: Callable[[str], pl.LazyFrame], written: list[str]
) -> pl.DataFrame:
    """Return the runs with what follows from the tables; `written` are the columns that the merge wrote."""
    if "step_mean_pct" not in written:
        runs = _judge_steps(runs, windows, scan("steps").collect())
    return runs if "vram_run_mib_peak" in written else _add_peaks(runs, scan("samples_slow"))


def _judge_steps(runs: pl.DataFrame, windows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    own = steps.partition_by("run_id", as_dict=True)
    done = (pl.col("kind") == WindowKind.MEASURE) & (pl.col("status") == Status.COMPLETED)
    measured = windows.filter(done).select("run_id", "window_id", "t_start_mono_ns", "t_end_mono_ns").rows()
    known = runs.filter(pl.col("step_ms_p50").is_not_null())["run_id"]  # others have steps of different work, or none
    rows: list[dict[str, Any]] = []
    for run_id in known.filter(known.is_in([name for (name,) in own])):
        spans = {window_id: (start, end) for name, window_id, start, end in measured if name == run_id}
        inside = steadiness.measured_steps(own[run_id,], spans)
        seconds = sum(end - start for start, end in spans.values()) * 1e-9
        verdict = steadiness.judge(inside["start_s"].to_numpy(), inside["step_ms"].to_numpy(), seconds)
        warning = verdict.explanation if verdict.verdict == "no" else None
        rows.append({"run_id": run_id, "warning": warning, **verdict.columns})
    names = list(steadiness.Steadiness(blocks=0).columns)
    judged = pl.DataFrame(rows, schema={name: SCHEMA.get(name, pl.String()) for name in ("run_id", "warning", *names)})
    runs = runs.drop(names).join(judged, "run_id", how="left", maintain_order="left")
    texts = pl.col("warnings", "null_reasons").str.replace_all(_STALE, "").str.strip_chars("; ")
    runs = runs.with_columns(texts)
    unsteady = pl.when(pl.col("steady") == "no").then(pl.lit(Flag.UNSTEADY.value))
    warnings = pl.concat_str("warnings", "warning", separator="; ", ignore_nulls=True).replace("", None)
    flags = pl.concat_str("flags", unsteady, separator=",", ignore_nulls=True).replace("", None)
    return runs.with_columns(warnings=warnings, flags=flags).drop("warning")


def _add_peaks(runs: pl.DataFrame, samples: pl.LazyFrame) -> pl.DataFrame:
    used, room = pl.col("vram_used_mib"), pl.col("vram_total_mib") - pl.col("vram_reserved_mib")
    peaks = (
        samples.filter(used <= pl.col("vram_total_mib"))
        .group_by("run_id")
        .agg(vram_run_mib_peak=used.max().cast(pl.Float64), vram_run_pct=(100 * used / room).max().cast(pl.Float64))
    )
    runs = runs.drop("vram_run_mib_peak", "vram_run_pct").join(
        peaks.collect(), "run_id", how="left", maintain_order="left"
    )
    judged = pl.col("vram_used_mib_peak").is_not_null()  # by the samples of its own GPUs
    return runs.with_columns(pl.when(judged).then(pl.col("vram_run_mib_peak", "vram_run_pct")))
