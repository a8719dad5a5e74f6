"""Making images: latency by stages, rate and energy, the agreement of images, and the NeMo page's figures."""

from collections.abc import Callable
from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.report import names
from analysis.report.estimate import few_runs, mean_of_runs
from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure, Row
from analysis.report.sections import nemo
from analysis.report.tables import COUNTS, DASH, Table, TableBuilder, count_runs, counts
from analysis.units import gpu_label, gpu_order, number
from inpaint_bench.core.schema import WindowKind

from . import Section

STAGES = {"text_ms": "Text [ms]", "image_ms": "Masked image [ms]"}
STAGES |= {"sampling_ms": "Sampling [ms]", "decode_ms": "Decoding [ms]"}
_METRICS = ("images_per_s", "joules_per_image", "energy_error_pct", "vram_used_mib_peak", "vram_run_mib_peak")
_WORK = ["inpaints", "sampler", "sampler_steps", "guidance", "resolution_px", "model", "variant"]
# How an answer names what several kinds of work differ in, beside the model.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "inpaints": lambda inpaints: "inpainting" if inpaints else "text to image",
    "sampler": str,
    "sampler_steps": "{} steps".format,
    "guidance": "guidance {:g}".format,
    "resolution_px": "{} px".format,
    "variant": lambda variant: variant or "",
}
_PLACE = ["site", "gpu", "demonstration", "comparability_key"]
_CELL = ["batch", *_PLACE, *_WORK, "precision", "recipe"]


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of latency and stages, and the published ones."""
    per_run = _per_run(results, build.runs.filter(pl.col("run_id").is_in(runs["run_id"].to_list())))
    cells = sorted(per_run.partition_by(_CELL, maintain_order=True), key=_order)
    broken = int(per_run["not_finite"].sum())
    return Section(
        title="Making images",
        answer=_answer(cells),
        best=f"{number(min(map(_seconds, cells)))} s per image",
        paragraphs=[_METHOD, *([f"{broken} calls gave pixels that are NaN or infinite."] if broken else [])],
        tables=[_table(build, cells), nemo.latency(build)],
        figures=[_figure(sorted(cells, key=_seconds))],
    )


_METHOD = (
    "A call makes one batch, from the prompt to the decoded images; the device is idle before and after it. Times lie "
    "between CUDA events at the boundaries of the stages, on a CPU between readings of the host's clock. PLMS "
    "evaluates the UNet once more than it has steps; with guidance every image is predicted twice."
)


def _seconds(cell: pl.DataFrame) -> float:
    """Return the mean over the runs of the median seconds for one image."""
    return float(cell["p50_ms"].mean()) / 1000 / cell["batch"][0]  # type: ignore[arg-type]


def _answer(cells: list[pl.DataFrame]) -> str:
    """Return the seconds for an image at the smallest and at the best batch, and how much faster than plain that is.

    If there are several kinds of work, the result covers each.
    """
    texts: dict[tuple[str, str], None] = {}
    models: dict[str, list[pl.DataFrame]] = {}
    varying = [name for name in _TEXTS if len({cell[name][0] for cell in cells}) > 1]

    def work(cell: pl.DataFrame) -> str:
        parts = [names.model(cell["model"][0]), *(_TEXTS[name](cell[name][0]) for name in varying)]
        return ", ".join(filter(None, parts))

    for cell in cells:
        models.setdefault(work(cell), []).append(cell)
    smallest = {model: min(cell["batch"][0] for cell in own) for model, own in models.items()}
    at_smallest = ([cell for cell in own if cell["batch"][0] == smallest[model]] for model, own in models.items())
    for chosen in (*at_smallest, *models.values()):
        cell = min(chosen, key=_seconds)
        row, seconds, same = cell.row(0, named=True), _seconds(cell), cell.select("batch", *_PLACE, *_WORK).row(0)
        few = few_runs(cell.to_dicts(), "p50_ms")
        of = f" of {work(cell)}" if len(models) > 1 else ""
        text = f"{number(seconds)} s per image{of} at batch {row['batch']}"
        setting = f" with {row[recipe_labels.COLUMN]} on {names.gpu(row['gpu'])}{few}"
        alike = (other for other in cells if other.select("batch", *_PLACE, *_WORK).row(0) == same)
        plain = next((other for other in alike if other["recipe"][0] in (recipe_labels.BASELINE, "cpu")), cell)
        ratio = names.versus(_seconds(plain) / seconds, "the plain pipeline", of_times=True)
        texts[text, f"{setting}{f', {ratio}' if plain is not cell else ''}"] = None
    settings = {setting for _, setting in texts}
    if len(settings) == 1 < len(texts):  # said once
        return f"Making images{settings.pop()} takes {'; '.join(text for text, _ in texts)}."
    return f"Making images takes {'; '.join(map(''.join, texts))}."


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
    columns += [recipe_labels.COLUMN, "resolution_px", "demonstration", "comparability_key"]
    columns += ["steady", *_METRICS]
    joined = timed.join(runs.select(columns), on="run_id").sort("run_id")
    return joined.with_columns(per_image_ms=pl.col("p50_ms") / pl.col("batch"))


def _table(build: TableBuilder, cells: list[pl.DataFrame]) -> Table:
    columns = ["GPU", "Site", "Model", "Task", "Batch", "Recipe", "Precision", *COUNTS, "Calls"]
    columns += ["Per image [ms]", "p50 [ms]", "p95 [ms]"]
    columns += ["Images/s", *(METRICS[name].heading for name in _METRICS[1:]), *STAGES.values(), "PSNR [dB]"]
    metrics = ("per_image_ms", "p50_ms", "p95_ms", *_METRICS, *STAGES)
    rows = []
    for cell in cells:
        row, own = cell.row(0, named=True), cell.to_dicts()
        task = "inpainting" if row["inpaints"] else "text to image"
        task += f", {row['resolution_px']} px, {row['sampler']} {row['sampler_steps']}, guidance {row['guidance']:g}"
        task += f", {row['variant']}" if row["variant"] else ""
        keys = [gpu_label(row["gpu"]), row["site"], names.model(row["model"]), task, str(row["batch"])]
        keys += [row[recipe_labels.COLUMN] or DASH, row["precision"] or DASH, *counts(count_runs(cell))]
        keys.append(str(cell["calls"].sum()))
        psnr = number(min(cell["psnr_db"].drop_nulls(), default=None))
        rows.append([*keys, *(mean_of_runs(own, name) or DASH for name in metrics), psnr])
    note = (
        "Mean over n runs of each run's percentile of a call, and of the medians of its stages. Per image: the median "
        "call, over the batch. PSNR: the lowest of any image of the first batch against the eager baseline with the "
        "same weights, prompts and noise; at most 100 dB."
    )
    lead = ("GPU", "Model", "Batch", "Recipe", "Per image [ms]", "Images/s", "Energy [J/image]", "PSNR [dB]")
    order = tuple(sorted(range(len(cells)), key=lambda i: _seconds(cells[i])))
    title = "Latency, stages, rate and energy of making images"
    return build.table("inference-latency", title, columns, rows, note=note, lead_columns=lead, lead_rows=order)


def _figure(cells: list[pl.DataFrame]) -> Figure:
    stages = {column: heading.removesuffix(" [ms]") for column, heading in STAGES.items()}
    firsts = [cell.row(0, named=True) for cell in cells]
    # What is the same in all cells needs no place in the label; `model` has sampler, steps and guidance in it.
    keys = ["model", "variant", "resolution_px", "precision", "site", "comparability_key"]
    varying = [key for key in keys if len({first[key] for first in firsts}) > 1]
    rows: list[Row] = []
    totals: list[Row] = []
    for cell, first in zip(cells, firsts, strict=True):
        more = [str(first[key]) for key in varying if first[key] is not None]
        label = ", ".join([gpu_label(first["gpu"]), str(first[recipe_labels.COLUMN]), *more, f"batch {first['batch']}"])
        means = cell.select(pl.col(*stages).mean().fill_null(0.0) / first["batch"]).row(0)
        rows += [
            {"label": label, "part": stage, "value": ms, "order": order}
            for order, (stage, ms) in enumerate(zip(stages.values(), means, strict=True))
        ]
        totals.append({"label": label, "value": sum(means), "text": f"{number(sum(means))} ms"})
    run_ids = [run_id for cell in cells for run_id in cell["run_id"]]
    text = "Medians of each stage over the calls of a run, mean over runs; their sum is not the median call."
    caption = [text, base.n_note(run_ids, len(cells))]
    chart = base.stacks(rows, totals, dict(zip(stages.values(), svg.SERIES, strict=False)), "ms per image")
    return base.figure("fig-inference", "Time per image by stage", "Milliseconds per image", caption, chart, run_ids)
