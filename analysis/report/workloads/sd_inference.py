"""Making images: latency by stages, rate and energy, the agreement of images, and the NeMo page's figures."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.report.estimate import mean_of_runs
from analysis.report.figures import base
from analysis.report.figures.base import Figure
from analysis.report.sections import nemo
from analysis.report.tables import DASH, ONE_RUN, Table, TableBuilder
from analysis.units import gpu_label, gpu_order, number
from inpaint_bench.core.schema import WindowKind

from . import Section

STAGES = {
    "text_ms": "Text [ms]",
    "image_ms": "Masked image [ms]",
    "sampling_ms": "Sampling [ms]",
    "decode_ms": "Decoding [ms]",
}
_WORK = ["inpaints", "sampler", "sampler_steps", "guidance", "resolution_px", "model", "variant"]
_CELL = ["site", "gpu", "batch", *_WORK, "precision", "recipe", "demonstration", "comparability_key"]


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return tables of latency and of the stages, and the published ones."""
    per_run = _per_run(results, build.runs.filter(pl.col("run_id").is_in(runs["run_id"].to_list())))
    cells = per_run.partition_by(_CELL, maintain_order=True)
    cells.sort(key=_order)
    return Section(
        title="Making images",
        paragraphs=_paragraphs(per_run),
        tables=[_latency(build, cells), _stages(build, cells), nemo.latency(build)],
        figures=[_figure(cells)],
    )


def _order(cell: pl.DataFrame) -> tuple[Any, ...]:
    row = cell.row(0, named=True)
    return (gpu_order(row["gpu"]), *(str(row[name]) for name in _WORK), row["batch"], str(row["recipe"]), row["site"])


def _per_run(results: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return a row per run: median and 95th percentile of its measured calls, median of each stage, lowest PSNR."""
    measured = results.filter(pl.col("window_id").str.starts_with(WindowKind.MEASURE.value))
    timed = measured.group_by("run_id").agg(
        pl.len().alias("calls"),
        pl.col("total_ms").median().alias("p50_ms"),
        pl.col("total_ms").quantile(0.95, "linear").alias("p95_ms"),
        *(pl.col(name).median() for name in STAGES),
        pl.col("psnr_db").min(),
        (~pl.col("finite")).sum().alias("not_finite"),
        pl.col("inpaints", "sampler", "sampler_steps", "guidance").first(),
    )
    columns = ["run_id", "seed", "gpu_uuid", "node", "site", "gpu", "batch", "model", "variant", "precision", "recipe"]
    columns += [recipe_labels.COLUMN, "resolution_px", "demonstration", "comparability_key", "joules_per_image"]
    columns += ["vram_used_mib_peak", "images_per_s"]
    return timed.join(runs.select(columns), on="run_id").sort("run_id")


def _paragraphs(per_run: pl.DataFrame) -> list[str]:
    texts = [
        "A call makes one batch, from the prompt to the decoded images; the device is idle before and after it. Times "
        "lie between CUDA events at the boundaries of the stages, on a CPU between readings of the host's clock. PLMS "
        "evaluates the UNet once more than it has steps; with guidance every image is predicted twice."
    ]
    if count := int(per_run["not_finite"].sum()):
        texts.append(f"{count} calls gave images with pixels that are NaN or infinite.")
    return texts


def _latency(build: TableBuilder, cells: list[pl.DataFrame]) -> Table:
    columns = ["GPU", "Site", "Task", "Batch", "Recipe", "Precision", "n", "Calls", "p50 [ms]", "p95 [ms]"]
    columns += ["Images/s", "Energy [J/image]", "VRAM peak [MiB]", "PSNR [dB]"]
    rows = []
    for cell in cells:
        estimates = [_mean(cell, name) for name in ("p50_ms", "p95_ms", "images_per_s", "joules_per_image")]
        lowest = cell["psnr_db"].min()
        psnr = DASH if lowest is None else number(lowest)  # type: ignore[arg-type]
        calls = str(cell["calls"].sum())
        rows.append([*_keys(cell), calls, *estimates, _mean(cell, "vram_used_mib_peak"), psnr])
    note = (
        "Mean over n runs of each run's percentile; in parentheses the 95 % interval, or with fewer than three runs "
        "their range. PSNR: the lowest of any image of the first batch against the eager baseline with the same "
        "weights, prompts and noise; at most 100 dB."
    )
    if all(cell.height == 1 for cell in cells):
        note += f" {ONE_RUN}"
    return build.table("inference-latency", "Latency, rate and energy of making images", columns, rows, note=note)


def _stages(build: TableBuilder, cells: list[pl.DataFrame]) -> Table:
    columns = ["GPU", "Site", "Task", "Batch", "Recipe", "Precision", "n", *STAGES.values()]
    rows = [[*_keys(cell), *(_mean(cell, name) for name in STAGES)] for cell in cells]
    note = "Medians over the calls of a run, mean over runs. Encoding of the masked image: inpainting only."
    return build.table("inference-stages", "Stages of making images", columns, rows, note=note)


def _figure(cells: list[pl.DataFrame]) -> Figure:
    names = [heading.removesuffix(" [ms]") for heading in STAGES.values()]
    firsts = [cell.row(0, named=True) for cell in cells]
    # What is the same in all cells needs no place in the label; `model` has sampler, steps and guidance in it.
    keys = ["model", "variant", "resolution_px", "precision", "site", "comparability_key"]
    varying = [key for key in keys if len({first[key] for first in firsts}) > 1]
    rows: list[dict[str, Any]] = []
    labels = []
    for cell, first in zip(cells, firsts, strict=True):
        more = [str(first[key]) for key in varying if first[key] is not None]
        labels.append(
            ", ".join([gpu_label(first["gpu"]), str(first[recipe_labels.COLUMN]), *more, str(first["batch"])])
        )
        for order, (column, stage) in enumerate(zip(STAGES, names, strict=True)):
            mean = cell[column].drop_nulls().mean()
            ms = 0.0 if mean is None else float(mean) / first["batch"]  # type: ignore[arg-type]
            rows.append({"label": labels[-1], "stage": stage, "ms": ms, "order": order})
    data = pl.DataFrame(rows)
    x = alt.X("ms:Q").title("ms per image").scale(nice=False)
    bars = alt.Chart(data).mark_bar().encode(x, base.row_axis(labels), base.colour(names, "stage"), order="order:Q")
    run_ids = [run_id for cell in cells for run_id in cell["run_id"]]
    caption = ["Medians over the calls of a run, mean over runs.", base.n_note(run_ids, len(cells))]
    chart = base.layer(bars).properties(width=base.plot_width(labels))
    return base.figure("fig-inference", "Time per image by stage", "Labels end with the batch", caption, chart, run_ids)


def _keys(cell: pl.DataFrame) -> list[str]:
    row = cell.row(0, named=True)
    task = "inpainting" if row["inpaints"] else "text to image"
    task += f", {row['resolution_px']} px, {row['sampler']} {row['sampler_steps']}, guidance {row['guidance']:g}"
    task += f", {row['variant']}" if row["variant"] else ""
    recipe = row[recipe_labels.COLUMN] or DASH
    keys = [gpu_label(row["gpu"]), row["site"], task, str(row["batch"]), recipe, row["precision"] or DASH]
    return [*keys, str(cell.height)]


def _mean(cell: pl.DataFrame, column: str) -> str:
    return mean_of_runs(cell.to_dicts(), column) or DASH
