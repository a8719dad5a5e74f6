"""Figures over the batch size: measured cells filled and solid; published values hollow and dashed, never joined."""

from __future__ import annotations

from typing import Any, NamedTuple

import altair as alt
import polars as pl

from analysis import published, recipe_labels
from analysis.columns import METRICS
from analysis.stats import best_batch
from analysis.stats.cells import add_series
from analysis.units import runtime_heading
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure, Limits

_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "stroke"]
_CROSS = "M-1,-1L1,1M-1,1L1,-1"  # an SVG path
SPREAD_PX = 20  # series of one batch are drawn side by side over this width, so that no interval hides another
_POSTER_RECIPES = ["baseline", "poster_baseline"]


class _Plot(NamedTuple):
    metric: str
    title: str
    kind: str  # bars (from zero), lines, or lines from zero
    caption: str
    maximum: float | None = None


_CUT_AXIS = "The axis does not start at zero."
_PLOTS = (
    _Plot("runtime_h", "Runtime", "bars", "Hours for the requested epochs; lower is better."),
    _Plot("images_per_s", "Throughput by batch size", "lines from zero", "Images per second."),
    _Plot(
        "gpu_util_pct",
        "GPU utilization",
        "lines",
        f"Share of time in which any kernel was running; it does not tell how busy the SMs were. {_CUT_AXIS}",
        maximum=100,
    ),
    _Plot("power_w", "Mean power", "bars", "Energy divided by time, for the whole GPU board."),
    _Plot(
        "joules_per_image",
        "Energy per image",
        "lines from zero",
        "The reciprocal of images/s/W, also for the published values; lower is better.",
    ),
    _Plot("temp_gpu_c_mean", "GPU temperature", "lines", f"Mean over the measurement window. {_CUT_AXIS}"),
    _Plot(
        "vram_pct", "GPU memory in use", "bars", "Peak, as a share of what the driver does not reserve.", maximum=100
    ),
)


def draw(cells: pl.DataFrame, runs: pl.DataFrame) -> list[Figure]:
    """Draw every metric that was measured. `runs` includes failed ones: they show which batches ran out of memory."""
    cells, omitted = _limit_series(cells.drop_nulls("batch"))  # runs of `watch` have no batch
    known = [(plot, cells.drop_nulls(plot.metric)) for plot in _PLOTS]
    return [_draw(plot, shown, runs, omitted) for plot, shown in known if shown.height]


def _draw(plot: _Plot, cells: pl.DataFrame, runs: pl.DataFrame, omitted: str) -> Figure:
    metric, bars = plot.metric, plot.kind == "bars"
    ends = {name: f"{metric}_{end}" for name, end in base.ENDS.items()}
    measured = cells.select("series", "batch", value=metric, n=f"{metric}_n", **ends)
    poster = _published(cells, metric, bars=bars)
    heading = runtime_heading(runs) if metric == "runtime_h" else METRICS[metric].heading
    limits = _limits(plot, measured, poster)
    y = alt.Y("value:Q").title(heading).scale(domain=limits, zero=False, nice=False)
    memory_note = ""
    if metric == "images_per_s":
        chart, memory_note = _with_memory_limits(measured, poster, y, _memory_limits(cells, runs))
    else:
        chart = _bars(measured, poster, y) if bars else _lines(measured, poster, y)
    run_ids = base.run_ids_of(cells)
    caption = [plot.caption, memory_note, interval_note(measured, limits), base.n_note(run_ids, cells.height)]
    caption += [omitted, _mix_note(cells), recipe_labels.legend_text(cells)]
    return base.figure(f"fig-{metric}", plot.title, _subtitle(measured, poster, bars=bars), caption, chart, run_ids)


def _subtitle(measured: pl.DataFrame, poster: pl.DataFrame, *, bars: bool) -> str:
    value = "mean over runs" if (measured["n"] > 1).any() else "one run each"
    legend = f"Filled: {value}" if bars else f"Solid, filled: {value}"
    return f"{legend}; {'dashed outline' if bars else 'dashed, hollow'}: published" if poster.height else legend


def _mix_note(cells: pl.DataFrame) -> str:
    mixed = cells.filter(pl.col("differences") != "")
    kinds = {part.split(" ", 1)[1] for differences in mixed["differences"] for part in differences.split(", ")}
    count = pluralize(mixed.height, "cell")
    return f"Runs differ within {count} ({', '.join(sorted(kinds))}): see the tables." if kinds else ""


def interval_note(rows: pl.DataFrame, limits: Limits) -> str:
    """Return the sentence that says what the whiskers of these rows are."""
    if (rows["n"] == 1).all():
        return "One run per cell: no intervals."
    notes = []
    if rows["low"].is_not_null().any():
        notes.append("Whiskers with caps: 95 % confidence interval of the mean (over cards if several were used).")
    if rows.select(base.HAS_RANGE.any()).item():
        notes.append("Whiskers without caps: range of the runs where there are too few for an interval.")
    notes += ["No whisker: a single run."] if (rows["n"] == 1).any() else []
    return " ".join([*notes, base.CUT_NOTE] if base.is_cut(rows, limits) else notes)


def _limit_series(cells: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Return at most as many series as there are colours, and the sentence about those omitted.

    Whole recipes are omitted first, those with the fewest cells before others, then single series.
    """
    recipes = cells.group_by("recipe", maintain_order=True).agg(pl.len(), pl.col("series").n_unique())
    ranked = recipes.sort(pl.col("len"), pl.col("recipe") == "baseline", descending=True, maintain_order=True)
    chosen: list[str] = []
    room = len(svg.SERIES)
    for recipe, _, series in ranked.iter_rows():
        # The first recipe always, even if it has more series than there are colours: these are reduced below.
        if not chosen or series <= room:
            chosen.append(recipe)
            room -= series
    note = ""
    if omitted := recipes.height - len(chosen):
        # Labelled anew: a key that does not vary any more is left out of the labels.
        cells = add_series(cells.filter(pl.col("recipe").is_in(chosen)).drop("series"))
        note = f"Recipes shown: {', '.join(map(base.shorten, chosen))}; the tables have {omitted} more."
    sizes = cells.group_by("series", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    if sizes.height > len(svg.SERIES):
        cells = cells.filter(pl.col("series").is_in(sizes["series"].head(len(svg.SERIES)).to_list()))
        note += f" Of {sizes.height} series the {len(svg.SERIES)} with the most batch sizes; the tables have the rest."
    return cells, note.strip()


def _published(cells: pl.DataFrame, metric: str, *, bars: bool) -> pl.DataFrame:
    """Return the poster's values for the GPUs measured, each under the series that it is drawn with.

    That is the series of the recipe that the poster used, if it was measured, else the first of that GPU. Bars are
    drawn beside it at each site.
    """
    comparable = published.is_comparable()
    if metric == "runtime_h":
        # Hours of training on another number of images cannot stand beside the published ones.
        comparable &= published.same_training_images()
    series = cells.filter(comparable).sort(~pl.col("recipe").is_in(_POSTER_RECIPES), maintain_order=True)
    series = series.unique(["gpu", "site"] if bars else ["gpu"], maintain_order=True).select("gpu", "series")
    values = published.shown().filter(pl.col("metric") == metric).join(series, on="gpu", maintain_order="right")
    return values.select("series", "batch", "value").sort("batch", maintain_order=True)


def _limits(plot: _Plot, measured: pl.DataFrame, poster: pl.DataFrame) -> Limits:
    means = [*measured["value"], *poster["value"]]
    bottom, top = base.axis_limits(means, base.interval_ends(measured), zero=plot.kind != "lines")
    if plot.maximum is None:
        return bottom, top
    # A share has its whole scale as bars, as lines only the part that is used.
    return bottom, plot.maximum if plot.kind == "bars" else min(top, plot.maximum)


def _series(rows: pl.DataFrame) -> list[str]:
    return rows["series"].unique(maintain_order=True).to_list()


def _batches(*columns: pl.Series) -> list[int]:
    return sorted({batch for column in columns for batch in column.drop_nulls()})


def _bars(measured: pl.DataFrame, poster: pl.DataFrame, y: alt.Y) -> alt.LayerChart:
    series = _series(measured)
    batches = _batches(measured["batch"], poster["batch"])
    x = alt.X("batch:O").title("Batch size").sort(batches).scale(paddingInner=0.25)
    offset = alt.XOffset("series:N").sort(series).scale(paddingInner=0.12)
    bars = alt.Chart(measured).mark_bar(opacity=0.9, cornerRadiusEnd=2).encode(x, offset, y, base.colour(series))
    outline = {"filled": False, "stroke": svg.TEXT, "strokeDash": [3, 2], "strokeWidth": 1.2}
    outlines = alt.Chart(poster).mark_bar(**outline).encode(x, offset, y)
    return base.layer(bars, outlines, *base.whiskers(measured, x, offset, color=svg.TEXT))


def _lines(measured: pl.DataFrame, poster: pl.DataFrame, y: alt.Y, x: alt.X | None = None) -> alt.LayerChart:
    series = _series(measured)
    x = x or _batch_axis("batch", _batches(measured["batch"], poster["batch"]))
    colour = base.colour(series)
    shapes = [_SHAPES[i % len(_SHAPES)] for i in range(len(series))]
    shape = alt.Shape("series:N").scale(domain=series, range=shapes).legend(columns=base.legend_columns(series))
    published_line = alt.Chart(poster).mark_line(strokeDash=[4, 3], strokeWidth=1.3, opacity=0.85)
    published_point = alt.Chart(poster).mark_point(filled=False, size=55, strokeWidth=1.3, opacity=1)
    layers = [published_line.encode(x, y, colour), published_point.encode(x, y, colour, shape)]
    step_px = min(5.0, SPREAD_PX / len(series))
    # A layer per series, because the offset belongs to the mark, not to its data.
    for index, name in enumerate(series):
        rows = measured.filter(pl.col("series") == name)
        shift: dict[str, Any] = {"xOffset": step_px * (index - (len(series) - 1) / 2)}
        layers.append(alt.Chart(rows).mark_line(strokeWidth=2, **shift).encode(x, y, colour))
        layers += base.whiskers(rows, x, colour, **shift)
        layers.append(alt.Chart(rows).mark_point(filled=True, size=60, opacity=1, **shift).encode(x, y, colour, shape))
    return base.layer(*layers)


def _batch_axis(field: str, batches: list[int]) -> alt.X:
    """Return a logarithmic encoding of the batch size: each doubling is one step."""
    # A single batch would give an axis without length.
    domain = [batches[0], batches[-1]] if len(batches) > 1 else [batches[0] / 2, batches[0] * 2]
    axis = alt.Axis(values=batches, format="d", labelOverlap=True)
    scale = alt.Scale(type="log", base=2, nice=False, padding=24, domain=domain)
    return alt.X(f"{field}:Q", title="Batch size", axis=axis, scale=scale)


def _memory_limits(cells: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return (series, fits, oom): the largest batch that completed and the smallest that ran out of GPU memory."""
    each = cells.unique("series", keep="first", maintain_order=True).to_dicts()
    rows = [(cell["series"], *best_batch.memory_limit(cell, runs)) for cell in each]
    return pl.DataFrame(rows, schema={"series": pl.String, "fits": pl.Int64, "oom": pl.Int64}, orient="row")


def _with_memory_limits(
    measured: pl.DataFrame, poster: pl.DataFrame, y: alt.Y, memory: pl.DataFrame
) -> tuple[alt.TopLevelMixin, str]:
    """Return the curves over a strip that shows where memory ends, or alone if it never did; and the sentence."""
    if memory["oom"].is_null().all():
        largest = max(memory["fits"].drop_nulls(), default=None)
        note = f"No run exceeded GPU memory, up to batch {largest}." if largest else ""
        return _lines(measured, poster, y), note
    batches = _batches(measured["batch"], poster["batch"], memory["fits"], memory["oom"])
    # The strip below has the labels: both share one scale.
    bare = _batch_axis("batch", batches).title(None).axis(values=batches, labels=False, ticks=False)
    curves = _lines(measured, poster, y, bare)
    row = alt.Y("series:N").sort(_series(memory)).title("Memory").axis(labels=False)
    colour = base.colour(_series(measured)).legend(None)  # the curves' scale, so that there is one legend
    fits, oom = _batch_axis("fits", batches), _batch_axis("oom", batches)
    both = alt.Chart(memory.drop_nulls()).mark_rule(strokeDash=[2, 2]).encode(fits, row, colour, x2="oom:Q")
    dots = alt.Chart(memory.drop_nulls("fits")).mark_point(filled=True, size=40, opacity=1).encode(fits, row, colour)
    cross = {"shape": _CROSS, "size": 22, "strokeWidth": 2, "filled": False, "opacity": 1}
    crosses = alt.Chart(memory.drop_nulls("oom")).mark_point(**cross).encode(oom, row, colour)
    strip = base.layer(both, dots, crosses).properties(height=alt.Step(14))
    note = "Memory, below: a dot is the largest batch that completed, a cross the smallest that ran out of GPU memory."
    if unknown := memory.filter(pl.col("oom").is_null())["series"].to_list():
        note += f" No run out of memory: {', '.join(unknown)}."
    return alt.vconcat(curves, strip, spacing=8).resolve_scale(x="shared", color="shared"), note
