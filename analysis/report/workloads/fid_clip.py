"""FID against CLIP score over guidance: a table, and the curve."""

from __future__ import annotations

import altair as alt
import polars as pl

from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure
from analysis.report.tables import Table, TableBuilder
from analysis.units import gpu_label, number

from . import Section

_CURVE = ["label", "recipe", "precision", "sampler", "sampler_steps", "images", "reference", "judges"]


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of all runs, and a curve per model, recipe, sampler and reference set."""
    names = runs.select("run_id", model=pl.col("model").str.replace(r", guidance .*$", ""))
    rows = results.join(names, on="run_id").sort("guidance", "run_id")
    rows = rows.with_columns(label=pl.concat_str("model", "recipe", "variant", separator=", ", ignore_nulls=True))
    curves = rows.partition_by(_CURVE, maintain_order=True)
    sets = sorted({f"{row['real_images']:,} images ({row['reference']})" for row in rows.to_dicts()})
    counts = sorted({f"{count:,}" for count in rows["images"]})
    texts = [f"{' or '.join(counts)} generated images per point; reference set: {', '.join(sets)}."]
    if (rows["judges"] == "tiny").any():
        texts.append("Judged by tiny random networks, as in tests: these figures say nothing about the model.")
    figures = [_figure(curve, number) for number, curve in enumerate(curves)]
    return Section(
        title="FID and CLIP score over guidance",
        answer=_answer(rows),
        best=f"FID {number(rows['fid'].min())}",  # type: ignore[arg-type]
        paragraphs=texts,
        tables=[_table(build, rows)],
        figures=figures,
    )


def _answer(rows: pl.DataFrame) -> str:
    fid, clip = rows.sort("fid").row(0, named=True), rows.sort("clip_mean", descending=True).row(0, named=True)
    return (
        f"Lowest FID: {number(fid['fid'])} at guidance {fid['guidance']:g} ({fid['label']}); highest CLIP score: "
        f"{clip['clip_mean']:.4f} at guidance {clip['guidance']:g} ({clip['label']})."
    )


def _table(build: TableBuilder, rows: pl.DataFrame) -> Table:
    columns = ["Guidance", "FID", "CLIP score", "Standard deviation", "Images", "Reference images", "Reference set"]
    columns += ["Model", "Recipe", "GPU", "Run"]
    cells = []
    for row in rows.iter_rows(named=True):
        figures = [f"{row['guidance']:g}", number(row["fid"]), f"{row['clip_mean']:.4f}", f"{row['clip_std']:.4f}"]
        keys = [row["reference"], row["model"], row["recipe"], gpu_label(row["gpu"]), row["run_id"]]
        cells.append([*figures, f"{row['images']:,}", f"{row['real_images']:,}", *keys])
    note = "CLIP score: cosine of image and prompt, mean over the images, with its standard deviation over them."
    lead, last = (*columns[:3], "Images", "Model", "Recipe"), len(columns) - 1
    return build.table("fid-clip", "FID and CLIP score", columns, cells, note=note, run_column=last, lead_columns=lead)


def _figure(curve: pl.DataFrame, index: int) -> Figure:
    first = curve.row(0, named=True)
    points = curve.group_by("guidance", maintain_order=True).agg(pl.col("fid", "clip_mean").mean(), n=pl.len())
    points = points.with_columns(text=pl.col("guidance").map_elements(lambda value: f"{value:g}", pl.String))
    limits = {name: base.axis_limits(points[name], points[name], zero=False) for name in ("fid", "clip_mean")}
    x = alt.X("clip_mean:Q").title("CLIP score (cosine)").scale(domain=limits["clip_mean"], nice=False, zero=False)
    y = alt.Y("fid:Q").title("FID").scale(domain=limits["fid"], nice=False, zero=False)
    chart = alt.Chart(points)
    line = chart.mark_line(color=svg.MUTED, strokeWidth=1.2).encode(x, y, order="guidance:Q")
    dots = chart.mark_point(filled=True, size=60, opacity=1, color=svg.SERIES[0]).encode(x, y)
    labels = chart.mark_text(dx=7, dy=9, align="left", color=svg.TEXT).encode(x, y, text="text:N")
    title = f"FID against CLIP score: {first['label']}"
    caption = [
        f"{first['sampler'].upper()}, {first['sampler_steps']} steps, {first['images']:,} images per point; reference "
        f"set {first['reference']}, {first['real_images']:,} images.",
        "Points are joined in the order of guidance.",
        base.zero_note(*limits.values()),
        base.n_note(curve["run_id"], points.height),
    ]
    subtitle = "Better is down and to the right; labels are guidance"
    layers = base.layer(line, dots, labels)
    return base.figure(f"fig-fid-clip-{index}", title, subtitle, caption, layers, curve["run_id"])
