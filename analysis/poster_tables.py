"""What was measured beside what the poster prints: its figures over batches, and its change of input pipeline."""

from __future__ import annotations

from typing import Any

import polars as pl

from . import aggregate, published, study
from .lever_tables import gain_words
from .metrics import gpu_label, gpu_order, number
from .study import Step, change
from .tables import Builder, Table, cards, spread

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
_PIPELINE_CELL = ("h200", "16")  # GPU and batch of the poster's second study
_PIPELINE = {  # our figure -> the poster's column
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


def beside(build: Builder, metric: str) -> Table | None:
    """Measured beside published at the same GPU and batch; None where neither has a figure."""
    mine = build.cells.filter((pl.col("workload") == published.WORKLOAD) & pl.col(metric).is_not_null())
    theirs = {
        (r["gpu"], r["batch"]): r for r in published.shown().filter(pl.col("metric") == metric).iter_rows(named=True)
    }
    rows, met, unequal = [], set(), False
    for row in mine.iter_rows(named=True):
        key = (row["gpu"], row["batch"])
        met.add(key)
        other = theirs.get(key)
        beside = ["\u2013", "\u2013", "\u2013"]
        if other and row["recipe"] != OPTIMIZED:  # the poster tuned one cell only: see `pipeline`
            alike = metric != "runtime_h" or row["poster_hours"]
            unequal = unequal or not alike
            ratio = number(row[metric] / other["value"]) if alike else "\u2013"
            beside = [f"{other['value']:g}", other["status"], ratio]
        rows.append(
            (
                key,
                [
                    row["series"],
                    str(row["batch"]),
                    spread(row, metric),
                    str(row[f"{metric}_n"]),
                    cards(row),
                    *beside,
                ],
            )
        )
    for key, other in theirs.items():
        if key not in met:
            cell = [gpu_label(key[0]), str(key[1]), "\u2013", "0", "\u2013", f"{other['value']:g}", other["status"]]
            rows.append((key, [*cell, "\u2013"]))
    if not rows:
        return None
    rows.sort(key=lambda pair: (gpu_order(pair[0][0]), pair[1][0], pair[0][1]))
    columns = ["GPU", "Batch", "Measured", "n", "Cards", "Published", "Status", "Ratio"]
    title = f"Beside the poster: {build.heading(metric)}"
    measured = ", ".join(mine["model"].drop_nulls().unique().sort().to_list()) or "none"
    note = f"Published: {published.SOURCE}. Model measured: {measured}. Ratio: measured over published."
    if unequal:
        note += f" No ratio where epochs times images are not {published.IMAGES:,}, as published."
    note = " ".join(words for words in (note, aggregate.mixed_note(mine), build.apart_note()) if words)
    if build.demonstration:
        note += " The measured side is a demonstration: the ratio says nothing about the GPU."
    return build.table(f"poster-{metric}", title, columns, [row for _, row in rows], note=note)


def pipeline(build: Builder) -> list[Table]:
    """The poster's second study: its two recipes on one GPU at one batch, once for each pair of them."""
    both = pl.col("recipe").is_in([BASELINE, OPTIMIZED]) & (pl.col("workload") == published.WORKLOAD)
    mine = build.runs.filter(both).with_columns(study.asked_batch())
    groups = [group for group in study.alike(mine) if group["recipe"].n_unique() == 2 and group["valid"].any()]
    groups.sort(key=lambda group: (gpu_order(group["gpu"][0]), group["asked_batch"][0].zfill(8), group["site"][0]))
    return [_change(build, group.to_dicts(), index) for index, group in enumerate(groups)]


def _change(build: Builder, rows: list[dict[str, Any]], index: int) -> Table:
    base, tuned = (
        Step(label=name, recipe=name, attempts=[row for row in rows if row["recipe"] == name])
        for name in (BASELINE, OPTIMIZED)
    )
    first = rows[0]
    same = (first["gpu"], first["asked_batch"]) == _PIPELINE_CELL
    lines = []
    for name, theirs in _PIPELINE.items():
        ours = [spread(step.figures(name), name) for step in (base, tuned)]
        printed = _printed(theirs) if same else ["\u2013"] * 3
        lines.append([build.heading(name), *ours, gain_words(change(tuned, base, name), len(tuned.runs)), *printed])
    columns = ["Figure", "Baseline", "Optimised", "Change", "Published baseline", "Published optimised"]
    where = f"{gpu_label(first['gpu'])}, batch {first['asked_batch']}, {first['site']}"
    words = [f"n = {len(base.runs)} and {len(tuned.runs)}."]
    words += [f"{step.label}: {step.state}." for step in (base, tuned) if step.state]
    words.append(
        "Five levers at once, so no lever's own gain: pinned memory, workers, prefetch, copies, channels_last."
    )
    words.append("Changes are ratios with 95 % intervals, of temperature too, as the poster prints them.")
    if same:
        words.append(
            f"Published: {published.SOURCE}, as printed, no error bars; hours for {published.IMAGES:,} images."
        )
    title = f"The poster's input pipeline: {where}"
    return build.table(f"pipeline-{index}", title, [*columns, "Change, printed"], lines, note=" ".join(words))


def _printed(column: str) -> list[str]:
    """Baseline, optimised and change as the poster prints them."""
    table = published.read("poster_input_pipeline.csv")
    values = dict(table.select("run", column).iter_rows())
    changed = f"{values['delta_pct_printed']:+g} %"
    return [f"{values['baseline']:g}", f"{values['optimized']:g}", changed]
