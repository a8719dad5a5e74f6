"""What was measured beside what the poster prints: its figures over batches, and its change of input pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

from analysis import published
from analysis.stats import cells, study
from analysis.stats.study import Step, step_gain
from analysis.units import gpu_label, gpu_order, number

from .study_tables import gain_words
from .tables import BRACKETS, Builder, Table, cards, spread

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
    mine = mine.with_columns(published.same_training_images().alias("same_images"))
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
            alike = metric != "runtime_h" or row["same_images"]
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
    note += f" {BRACKETS}" if (mine[f"{metric}_n"] > 1).any() else ""
    if unequal:
        note += f" No ratio where epochs times images are not {published.IMAGES:,}, as published."
    note = " ".join(words for words in (note, cells.differences_note(mine), build.apart_note()) if words)
    if build.demonstration:
        note += " The measured side is a demonstration: the ratio says nothing about the GPU."
    return build.table(f"poster-{metric}", title, columns, [row for _, row in rows], note=note)


def pipeline(build: Builder) -> list[Table]:
    """The poster's second study: its two recipes on one GPU at one batch, once for each pair of them."""
    both = pl.col("recipe").is_in([BASELINE, OPTIMIZED]) & (pl.col("workload") == published.WORKLOAD)
    mine = build.runs.filter(both).with_columns(study.requested_batch())
    groups = [
        group for group in study.comparable_groups(mine) if group["recipe"].n_unique() == 2 and group["valid"].any()
    ]
    groups.sort(key=lambda group: (gpu_order(group["gpu"][0]), group["requested_batch"][0].zfill(8), group["site"][0]))
    return [_change(build, group.to_dicts(), index) for index, group in enumerate(groups)]


def _change(build: Builder, rows: list[dict[str, Any]], index: int) -> Table:
    base, tuned = (
        Step(label=name, recipe=name, attempts=[row for row in rows if row["recipe"] == name])
        for name in (BASELINE, OPTIMIZED)
    )
    first = rows[0]
    same = (first["gpu"], first["requested_batch"]) == _PIPELINE_CELL
    lines = []
    for name, theirs in _PIPELINE.items():
        ours = [spread(step.summarise(name), name) for step in (base, tuned)]
        printed = _printed(theirs) if same else ["\u2013"] * 3
        lines.append([build.heading(name), *ours, gain_words(step_gain(tuned, base, name), len(tuned.runs)), *printed])
    columns = ["Figure", "Baseline", "Optimised", "Change", "Published baseline", "Published optimised"]
    where = f"{gpu_label(first['gpu'])}, batch {first['requested_batch']}, {first['site']}"
    words = [f"n = {len(base.runs)} and {len(tuned.runs)}."]
    words += [f"{step.label}: {step.failures}." for step in (base, tuned) if step.failures]
    words.append(
        "Five levers at once, so no lever's own gain: pinned memory, workers, prefetch, copies, channels_last."
    )
    words.append(f"{BRACKETS} Changes are ratios with 95 % intervals, of temperature too, as the poster prints them.")
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


def partings(build: Builder) -> Table:
    """Where what the poster says and its own figures part: worked out from its figures, absent where they agree."""
    rows = [row for finding in _PARTINGS if (row := finding()) is not None]
    columns = ["The poster says", "Its figures", "What they show"]
    note = f"Published: {published.SOURCE}. Worked out from its figures; rates assume {_RATE_IMAGES:,} images per run."
    return build.table("poster-partings", "Where the poster's text and its numbers part", columns, rows, note=note)


_RATE_IMAGES = 103_600  # behind poster_derived.csv


def _per_gpu(table: pl.DataFrame, value: str, form: Callable[[float], str] = number) -> str:
    pairs = sorted(table.select("gpu", value).iter_rows(), key=lambda pair: gpu_order(pair[0]))
    return ", ".join(f"{gpu} {form(figure)}" for gpu, figure in pairs)


def _memory() -> list[str] | None:
    """The share of each card's memory at batch 16, in GB."""
    used = published.read("poster_mem_util.csv").filter(
        (pl.col("batch") == 16) & (pl.col("source") != "pipeline_table_optimized")
    )
    used = used.join(published.read("poster_gpu_arch.csv"), on="gpu")
    used = used.with_columns((pl.col("vram_pct") / 100 * pl.col("memory_gb")).alias("gb"))
    least, most = min(used["gb"]), max(used["gb"])
    if most / least < 1.5:
        return None
    shares = _per_gpu(used, "vram_pct", lambda share: f"{share:g} %")
    words = f"{_per_gpu(used, 'gb', lambda gb: f'{gb:.1f} GB')}: {most / least:.1f} times as much on one card"
    return ["Memory in use at batch 16, a share of each card", shares, f"{words}, so it was set up differently there."]


def _batch_32() -> list[str] | None:
    hours = dict(
        published.read("poster_runtime_hours.csv").filter(pl.col("gpu") == "H200").select("batch", "hours").rows()
    )
    rates = published.read("poster_derived.csv").filter(pl.col("gpu") == "H200")
    steps, images = (dict(rates.select("batch", name).rows()) for name in ("steps_per_s", "images_per_s"))
    if hours[32] >= hours[16]:
        return None
    more = 100 * (images[32] / images[16] - 1)
    shown = f"{hours[16]:g} h at batch 16, {hours[32]:g} h at batch 32"
    words = (
        f"{shown}: not slower. Steps/s {number(steps[16])} and {number(steps[32])} fall because a step is twice as "
        f"large; images/s {number(images[16])} and {number(images[32])} ({more:+.1f} %)."
    )
    return ["Batch 32 lowers training speed", shown, words]


def _cheapest() -> list[str] | None:
    """Images per joule rise to the largest batch on every card."""
    rates = published.read("poster_derived.csv").filter(~pl.col("gpu").str.contains("_"))
    best = {
        gpu: part.sort("images_per_s_per_w").row(-1, named=True)
        for (gpu,), part in rates.group_by("gpu", maintain_order=True)
    }
    top = best["H200"]
    at_16 = rates.filter((pl.col("gpu") == "H200") & (pl.col("batch") == 16)).row(0, named=True)
    if top["batch"] <= 24:
        return None
    more = 100 * (top["images_per_s_per_w"] / at_16["images_per_s_per_w"] - 1)
    shown = ", ".join(f"{gpu} batch {row['batch']}: {row['images_per_s_per_w']:g}" for gpu, row in best.items())
    words = (
        f"Images/s/W are best at the largest batch of every card: {shown}; on the H200 {more:.1f} % more than batch 16."
    )
    return ["Batches of 16 to 24 are preferable", "images/s/W, from hours and power", words]


def _busy() -> list[str] | None:
    """Utilisation is a share of time: alike on cards whose speeds are far apart."""
    at_16 = pl.col("batch") == 16
    util = published.read("poster_gpu_util_pct.csv").filter(at_16)
    speed = published.read("poster_derived.csv").filter(at_16 & ~pl.col("gpu").str.contains("_"))
    if max(util["gpu_util_pct"]) - min(util["gpu_util_pct"]) > 5:
        return None
    shown = _per_gpu(util, "gpu_util_pct", lambda share: f"{share:g} %")
    speeds = _per_gpu(speed, "images_per_s")
    words = f"{shown} busy at images/s of {speeds}: a share of time with any kernel running, not a share of compute."
    return ["Limited by compute, read off the GPU utilisation", "GPU utilisation at batch 16", words]


def _peak() -> list[str] | None:
    peaks = published.read("poster_gpu_arch.csv")
    off = (pl.col("bf16_tflops_poster") / pl.col("bf16_tflops_dense_vendor") - 1).abs() > 0.02
    wrong = [
        f"{row['gpu']} {row['bf16_tflops_poster']:g} against {row['bf16_tflops_dense_vendor']:g}"
        for row in peaks.filter(off).iter_rows(named=True)
    ]
    if not wrong:
        return None
    return [
        "Peak BF16 of the cards, TFLOPS",
        "; ".join(wrong),
        "As printed against the vendor's dense figure, which MFU here is counted over.",
    ]


def _power() -> list[str] | None:
    power = published.read("poster_power_w.csv").filter(pl.col("status").str.starts_with("text_equal_pair"))
    pairs = power.group_by("batch", "power_w", maintain_order=True).agg(pl.col("gpu"), pl.len().alias("cards"))
    shared = pairs.filter(pl.col("cards") > 1)
    if shared.is_empty():
        return None
    cards = " and ".join(sorted({gpu for gpus in shared["gpu"].to_list() for gpu in gpus}, key=gpu_order))
    shown = ", ".join(f"{watts:g} W at batch {batch}" for batch, watts in shared.select("batch", "power_w").rows())
    suspect = power.filter(pl.col("status").str.ends_with("suspect"))["gpu"].unique().sort().to_list()
    words = f"The same for {cards}, and too much for a PCIe {', '.join(suspect)}: not shown beside a measurement."
    return ["Power, a figure for each card", shown, words]


_PARTINGS: tuple[Callable[[], list[str] | None], ...] = (_memory, _batch_32, _cheapest, _busy, _peak, _power)
