"""The section on the poster: what was measured next to what it published.

The published values are a layer of their own: they appear beside measurements and are never averaged with them.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from analysis import published
from analysis.report.tables import DASH, PARENTHESES, Table, TableBuilder, card_count, mean_text
from analysis.stats import cells, study
from analysis.stats.study import Step, step_gain
from analysis.units import gpu_label, gpu_order, number

from .study_tables import gain_text

METRICS = (
    "runtime_h",
    "gpu_util_pct",
    "power_w",
    "temp_gpu_c_mean",
    "vram_pct",
    "mem_active_pct",
    "steps_per_s_per_w",
    "images_per_s_per_w",
)
BASELINE, OPTIMIZED = "poster_baseline", "poster_optimized"
MEMORY_READING = (
    "The poster reads this figure as the use of memory bandwidth; NVML defines it as the share of time in which memory "
    "was read or written at all, so it says nothing about the bandwidth."
)
_PIPELINE_CELL = ("h200", "16")  # GPU and batch of the poster's second study
PIPELINE_COLUMNS = {  # our metric -> the column of poster_input_pipeline.csv
    "steps_per_s": "steps_per_s",
    "images_per_s": "images_per_s",
    "runtime_h": "hours",
    "gpu_util_pct": "gpu_util_pct",
    "mem_active_pct": "mem_bw_util_pct",
    "vram_pct": "vram_util_pct",
    "power_w": "power_w",
    "temp_gpu_c_mean": "temp_c",
    "steps_per_s_per_w": "steps_per_s_per_w",
    "images_per_s_per_w": "images_per_s_per_w",
}


def sections(build: TableBuilder) -> dict[str, list[Table]]:
    """Return the tables of the section by part; none if no run can stand beside the poster's."""
    if not is_comparable(build.runs):
        return {"pipeline": [], "poster": [], "contradictions": []}
    metrics = [comparison(build, metric) for metric in METRICS]
    return {"pipeline": pipeline(build), "poster": metrics, "contradictions": [contradictions(build)]}


def is_comparable(runs: pl.DataFrame) -> bool:
    """Return whether any run has the poster's workload and is no demonstration."""
    return bool(runs.select(published.is_comparable().any()).item())


def ratios(runs: pl.DataFrame) -> list[cells.Ratio]:
    """Return the poster's speedups between GPUs that have runs here, computed from its hours as ours are."""
    gpus = runs.filter(published.is_comparable())["gpu"].unique().to_list()
    hours = published.shown().filter(pl.col("metric") == "runtime_h", pl.col("gpu").is_in(gpus))
    speeds = hours.with_columns(value=1 / pl.col("value"), series=pl.col("gpu").map_elements(gpu_label, pl.String))
    return cells.series_ratios(speeds, "value")


def comparison(build: TableBuilder, metric: str) -> Table:
    """Return measured and published values at the same GPU and batch size."""
    measured = build.cells.filter(published.is_comparable() & pl.col(metric).is_not_null())
    # Hours depend on how many images were trained; the other metrics are rates, means or peaks.
    measured = measured.with_columns(comparable=published.same_training_images() | pl.lit(metric != "runtime_h"))
    values = published.shown().filter(pl.col("metric") == metric, pl.col("gpu").is_in(measured["gpu"].to_list()))
    # Full, so that what only one side has gets its row too, of a GPU that was measured.
    pairs = measured.join(values, on=["gpu", "batch"], how="full", coalesce=True, suffix="_published")
    rows, run_ids, incomparable = [], {}, False
    for row in pairs.iter_rows(named=True):
        name = row["series"] or gpu_label(row["gpu"])
        own = [name, str(row["batch"]), mean_text(row, metric), str(row[f"{metric}_n"] or 0), card_count(row)]
        run_ids[tuple(own[:2])] = row["run_ids"] or []
        # The poster optimized one cell only: see `pipeline`.
        if row["value"] is None or row["recipe"] == OPTIMIZED:
            rows.append([*own, DASH, DASH, DASH])
            continue
        incomparable |= row["comparable"] is False
        ratio = number(row[metric] / row["value"]) if row["comparable"] else DASH
        rows.append([*own, f"{row['value']:g}", row["status"], ratio])
    rows.sort(key=lambda row: (gpu_order(row[0]), int(row[1])))
    columns = ["GPU", "Batch", "Measured", "n", "Cards", "Published", "Status", "Ratio"]
    models = ", ".join(measured["model"].drop_nulls().unique().sort()) or "none"
    notes = [
        f"Published: {published.SOURCE}. Measured model: {models}. Ratio: measured / published.",
        PARENTHESES if (measured[f"{metric}_n"] > 1).any() else "",
        MEMORY_READING if metric == "mem_active_pct" else "",
        f"No ratio unless epochs times images are {published.IMAGES:,} as in the poster." if incomparable else "",
        cells.differences_note(measured),
        build.study_note(),
    ]
    title = f"Measured and published: {build.heading(metric)}"
    row_runs = [run_ids[tuple(row[:2])] for row in rows]
    return build.table(f"poster-{metric}", title, columns, rows, note=" ".join(filter(None, notes)), row_runs=row_runs)


def pipeline(build: TableBuilder) -> list[Table]:
    """Return the poster's second study, its two recipes on one GPU at one batch size: a table per pair of them."""
    both = pl.col("recipe").is_in([BASELINE, OPTIMIZED]) & published.is_comparable()
    runs = build.runs.filter(both).with_columns(study.requested_batch())
    # Both recipes must have run side by side, and at least one of the runs must be valid.
    groups = [group for group in study.comparable_groups(runs) if group["recipe"].n_unique() == 2]
    groups = [group for group in groups if group["valid"].any()]
    groups.sort(key=lambda group: (gpu_order(group["gpu"][0]), group["requested_batch"][0].zfill(8), group["site"][0]))
    return [_pipeline_table(build, group.to_dicts(), index) for index, group in enumerate(groups)]


def _pipeline_table(build: TableBuilder, runs: list[dict[str, Any]], index: int) -> Table:
    base, optimized = (
        Step(label=name, recipe=name, attempts=[run for run in runs if run["recipe"] == name])
        for name in (BASELINE, OPTIMIZED)
    )
    first = runs[0]
    # Elsewhere the poster published nothing: its columns are dashes.
    same_cell = (first["gpu"], first["requested_batch"]) == _PIPELINE_CELL
    rows = []
    poster = {row["run"]: row for row in published.read("poster_input_pipeline.csv").to_dicts()}
    forms = {"baseline": "{:g}", "optimized": "{:g}", "delta_pct_printed": "{:+g} %"}
    for metric, column in PIPELINE_COLUMNS.items():
        means = [mean_text(step.summarise(metric), metric) for step in (base, optimized)]
        gain = gain_text(step_gain(optimized, base, metric), len(optimized.runs))
        printed = [form.format(poster[run][column]) if same_cell else DASH for run, form in forms.items()]
        rows.append([build.heading(metric), *means, gain, *printed])
    columns = ["Metric", "Baseline", "Optimized", "Change"]
    columns += ["Published baseline", "Published optimized", "Published change"]
    notes = [f"n = {len(base.runs)} and {len(optimized.runs)}."]
    notes += [f"{step.label}: {step.failures}." for step in (base, optimized) if step.failures]
    notes.append(
        "Five levers at once (pinned memory, workers, prefetch, non-blocking copies, channels_last), so no lever's own "
        f"gain. {PARENTHESES} Changes are ratios with 95 % confidence intervals, of the temperature too, as in the "
        "poster."
    )
    if same_cell:
        notes.append(f"{build.heading('mem_active_pct')}: {MEMORY_READING}")
        notes.append(f"Published: {published.SOURCE}, without error bars; hours for {published.IMAGES:,} images.")
    title = f"The poster's input pipeline: {gpu_label(first['gpu'])}, batch {first['requested_batch']}, {first['site']}"
    return build.table(f"pipeline-{index}", title, columns, rows, note=" ".join(notes))


def contradictions(build: TableBuilder) -> Table:
    """Return where the poster's text contradicts its own data."""
    rows = [list(row) for row in published.read("poster_contradictions.csv").iter_rows()]
    note = f"Published: {published.SOURCE}. Computed from its data; rates assume 103,600 images per run."
    title = "Contradictions between the poster's text and its data"
    return build.table("poster-contradictions", title, ["Claim", "Its data", "Explanation"], rows, note=note)
