"""The section on the poster: what was measured next to what it published."""

from typing import Any

import polars as pl

from analysis import published, recipe_labels
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, counts, mean_text
from analysis.stats import cells, study
from analysis.stats.study import Step, step_gain
from analysis.units import gpu_label, gpu_order, number

from .study_tables import gain_text

BASELINE, OPTIMIZED = "poster_baseline", "poster_optimized"
_PLAIN = (BASELINE, recipe_labels.BASELINE, recipe_labels.EARLIER)
_METHOD = (
    f"Published values stand beside the measurements and are never averaged with them. Source: {published.SOURCE}. "
    "They have no error bars, and the poster states neither resolution, precision, casts of the frozen networks, "
    "optimizer, workers nor epochs, so a ratio other than 1 need not be an error on either side. Proven: the text "
    "allows only one reading. Likely: the reading that fits the trends, or a value computed from an inferred number of "
    "images. Values with several possible readings (most temperatures, several powers) are not shown."
)
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
METRICS = [name for name in PIPELINE_COLUMNS if name not in ("steps_per_s", "images_per_s")]


def sections(build: TableBuilder) -> list[Section]:
    """Return the section; empty if no run can stand beside the poster's."""
    if build.runs.filter(published.is_comparable()).is_empty():
        return []
    tables = [*pipeline(build), comparison(build), contradictions(build)]
    return [Section(title="Comparison with the poster", paragraphs=[_METHOD], tables=tables)]


def ratios(runs: pl.DataFrame) -> list[cells.Ratio]:
    """Return the poster's speedups between GPUs that have runs here, computed from its hours as ours are."""
    gpus = runs.filter(published.is_comparable())["gpu"].unique().to_list()
    hours = published.shown().filter(pl.col("metric") == "runtime_h", pl.col("gpu").is_in(gpus))
    speeds = hours.with_columns(value=1 / pl.col("value"), series=pl.col("gpu").map_elements(gpu_label, pl.String))
    return cells.series_ratios(speeds, "value")


def comparison(build: TableBuilder) -> Table:
    """Return measured and published values at the same GPU and batch size, of the recipes that the poster may mean."""
    plain = build.cells.filter(published.is_comparable() & pl.col("recipe").is_in(_PLAIN))
    rows, row_runs = [], []
    for metric in METRICS:
        # Hours depend on how many images were trained; the other metrics are rates, means or peaks.
        same = published.same_training_images() | pl.lit(metric != "runtime_h")
        measured = plain.drop_nulls(metric).with_columns(comparable=same)
        values = published.shown().filter(pl.col("metric") == metric, pl.col("gpu").is_in(measured["gpu"].to_list()))
        # Full, so that what only one side has gets its row too, of a GPU that was measured.
        pairs = measured.join(values, on=["gpu", "batch"], how="full", coalesce=True, suffix="_published").to_dicts()
        for row in sorted(pairs, key=lambda row: (gpu_order(row["gpu"]), row["batch"], row["recipe"] or "")):
            own = [build.heading(metric), gpu_label(row["gpu"]), row["recipe"] or DASH, str(row["batch"])]
            own += [mean_text(row, metric), *counts({**row, "n": row[f"{metric}_n"]})]
            ratio = number(row[metric] / row["value"]) if row["comparable"] and row["value"] else DASH
            stated = [DASH, DASH] if row["value"] is None else [f"{row['value']:g}", row["status"]]
            rows.append([*own, *stated, ratio])
            row_runs.append(row["run_ids"] or [])
    columns = ["Metric", "GPU", "Recipe", "Batch", "Measured", *COUNTS, "Published", "Status", "Ratio"]
    note = (
        f"Published: {published.SOURCE}; tuned recipes are left out; which loop it trains with is not said. Ratio: "
        f"measured / published; of hours only where epochs times images are {published.IMAGES:,} as in the poster. "
        f"{build.heading('mem_active_pct')}: {MEMORY_READING}"
    )
    title = "Measured with plain loops, and published"
    return build.table("poster", title, columns, rows, note=note, row_runs=row_runs)


def pipeline(build: TableBuilder) -> list[Table]:
    """Return the poster's second study, its two recipes on one GPU at one batch size: a table per pair of them."""
    both = pl.col("recipe").is_in([BASELINE, OPTIMIZED]) & published.is_comparable()
    runs = build.runs.filter(both).with_columns(study.requested_batch())
    # Both recipes must have run side by side, and at least one of the runs must be valid.
    groups = study.comparable_groups(runs)
    groups = [group for group in groups if group["recipe"].n_unique() == 2 and group["valid"].any()]
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
    for metric, column in PIPELINE_COLUMNS.items():
        means = [mean_text(step.summarise(metric), metric) for step in (base, optimized)]
        gain = gain_text(step_gain(optimized, base, [optimized, base], metric), len(optimized.runs))
        printed = [form.format(poster[run][column]) if same_cell else DASH for run, form in _PRINTED.values()]
        rows.append([build.heading(metric), *means, gain, *printed])
    columns = ["Metric", "Baseline", "Optimized", "Change", *(f"Published {name}" for name in _PRINTED)]
    notes = [f"n = {len(base.runs)} and {len(optimized.runs)}."]
    notes += [f"{step.label}: {step.failures}." for step in (base, optimized) if step.failures]
    notes.append(
        "Five levers at once (pinned memory, workers, prefetch, non-blocking copies, channels_last), so no lever's own "
        "gain. Changes are ratios, of the temperature too, as in the poster."
    )
    notes.append(f"Published: {published.SOURCE}, without error bars; hours for {published.IMAGES:,} images.")
    title = f"The poster's input pipeline: {gpu_label(first['gpu'])}, batch {first['requested_batch']}, {first['site']}"
    return build.table(f"pipeline-{index}", title, columns, rows, note=" ".join(notes))


_PRINTED = {  # heading: its row in poster_input_pipeline.csv, and its form
    "baseline": ("baseline", "{:g}"),
    "optimized": ("optimized", "{:g}"),
    "change": ("delta_pct_printed", "{:+g} %"),
}


def contradictions(build: TableBuilder) -> Table:
    """Return where the poster's text contradicts its own data."""
    rows = [list(row) for row in published.read("poster_contradictions.csv").iter_rows()]
    note = f"Published: {published.SOURCE}. Computed from its data; rates assume 103,600 images per run."
    title = "Contradictions between the poster's text and its data"
    return build.table("poster-contradictions", title, ["Claim", "Its data", "Explanation"], rows, note=note)
