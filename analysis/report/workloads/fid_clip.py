"""FID against CLIP score over guidance: a table, and the curve."""

import altair as alt
import polars as pl

from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure
from analysis.report.tables import DASH, Table, TableBuilder
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize

from . import Section

_SETTING = ["sampler", "sampler_steps", "images", "reference", "judges", "prompts_sha256"]  # the same in a figure
_DIGEST = r"(?:, )?weights=([0-9a-f]+)"  # in a run's variant


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return the table of all runs, and a figure per sampler and reference set with a curve per checkpoint."""
    names = runs.select("run_id", "overrides", model=pl.col("model").str.replace(r", guidance .*$", ""))
    rows = results.join(names, on="run_id").sort("guidance", "run_id").with_columns(checkpoint=_checkpoint())
    parts = ["checkpoint", "model", "recipe", pl.col("variant").str.replace(_DIGEST, "").replace("", None)]
    rows = rows.with_columns(label=pl.concat_str(parts, separator=", ", ignore_nulls=True))
    settings = rows.partition_by(_SETTING, maintain_order=True)
    sets = sorted({f"{row['real_images']:,} images ({row['reference']})" for row in rows.to_dicts()})
    counts = sorted({f"{count:,}" for count in rows["images"]})
    texts = [f"{' or '.join(counts)} generated images per point; reference set: {', '.join(sets)}."]
    if (rows["judges"] == "tiny").any():
        texts.append("Judged by tiny random networks, as in tests: these figures say nothing about the model.")
    figures = [_figure(curves, number) for number, curves in enumerate(settings)]
    return Section(
        title="FID and CLIP score over guidance",
        answer=_answer(rows),
        best=f"FID {number(rows['fid'].min())}",  # type: ignore[arg-type]
        paragraphs=texts,
        tables=[_table(build, rows)],
        figures=figures,
    )


def _checkpoint() -> pl.Expr:
    """Return the end of the path of a run's weights, else its model, with the digest of their content, if any."""
    digest = pl.col("variant").str.extract(_DIGEST)
    path = pl.col("overrides").str.extract(r"model\.weights=([^\s'\"]+)").str.extract(r"([^/]+(?:/[^/]+)?)/*$")
    return pl.format("{} ({})", pl.coalesce(path, "model").first().over(digest), digest)


def _answer(rows: pl.DataFrame) -> str:
    fid, clip = rows.sort("fid").row(0, named=True), rows.sort("clip_mean", descending=True).row(0, named=True)
    return (
        f"Lowest FID: {number(fid['fid'])} at guidance {fid['guidance']:g} ({fid['label']}); highest CLIP score: "
        f"{clip['clip_mean']:.4f} at guidance {clip['guidance']:g} ({clip['label']})."
    )


def _table(build: TableBuilder, rows: pl.DataFrame) -> Table:
    columns = ["Guidance", "FID", "CLIP score", "Standard deviation", "Images", "Reference images", "Reference set"]
    columns += ["Model", "Checkpoint", "Recipe", "GPU", "Run"]
    cells = []
    for row in rows.iter_rows(named=True):
        figures = [f"{row['guidance']:g}", number(row["fid"]), f"{row['clip_mean']:.4f}", f"{row['clip_std']:.4f}"]
        keys = [row["reference"], row["model"], row["checkpoint"] or DASH, row["recipe"]]
        keys += [gpu_label(row["gpu"]), row["run_id"]]
        cells.append([*figures, f"{row['images']:,}", f"{row['real_images']:,}", *keys])
    note = "CLIP score: cosine of image and prompt, mean over the images, with its standard deviation over them."
    lead, last = (*columns[:3], "Images", "Model", "Checkpoint", "Recipe"), len(columns) - 1
    return build.table("fid-clip", "FID and CLIP score", columns, cells, note=note, run_column=last, lead_columns=lead)


def _figure(curves: pl.DataFrame, index: int) -> Figure:
    names = curves["label"].unique(maintain_order=True).to_list()
    omitted = len(names[len(svg.SERIES) :])
    curves = curves.filter(pl.col("label").is_in(names[: len(svg.SERIES)]))
    first = curves.row(0, named=True)
    points = curves.group_by("label", "guidance", maintain_order=True).agg(pl.col("fid", "clip_mean").mean())
    points = points.with_columns(text=pl.col("guidance").map_elements(lambda value: f"{value:g}", pl.String))
    limits = {name: base.axis_limits(points[name], points[name], zero=False) for name in ("fid", "clip_mean")}
    x = alt.X("clip_mean:Q").title("CLIP score (cosine)").scale(domain=limits["clip_mean"], nice=False, zero=False)
    y = alt.Y("fid:Q").title("FID").scale(domain=limits["fid"], nice=False, zero=False)
    chart, colour = alt.Chart(points), base.colour(names[: len(svg.SERIES)], "label")
    line = chart.mark_line(strokeWidth=1.2).encode(x, y, colour, order="guidance:Q")
    dots = chart.mark_point(filled=True, size=60, opacity=1).encode(x, y, colour)
    labels = chart.mark_text(dx=7, dy=9, align="left", color=svg.TEXT).encode(x, y, text="text:N")
    title = f"FID against CLIP score: {pluralize(len(names), 'curve') if len(names) > 1 else names[0]}"
    caption = [
        f"{first['sampler'].upper()}, {first['sampler_steps']} steps, {first['images']:,} images per point of the same "
        f"prompts; reference set {first['reference']}, {first['real_images']:,} images.",
        "Points are joined in the order of guidance.",
        f"{pluralize(omitted, 'curve')} more in the table." if omitted else "",
        base.zero_note(*limits.values()),
        base.n_note(curves["run_id"], points.height),
    ]
    subtitle = "Better is down and to the right; labels are guidance"
    layers = base.layer(line, dots, labels)
    return base.figure(f"fig-fid-clip-{index}", title, subtitle, caption, layers, curves["run_id"])
