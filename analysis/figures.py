"""The report's figures as SVG. Measured is filled or solid; published is hollow and dashed, never joined to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import polars as pl

from . import aggregate, published, svg
from .metrics import METRICS, gpu_label, runtime_heading

WIDTH, HEIGHT = 400, 230
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "stroke"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    id: str
    title: str
    caption: str
    svg: str
    run_ids: list[str]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    metric: str
    title: str
    kind: str  # bars (from zero) or lines
    caption: str
    domain: tuple[float, float] | None = None


_PLANS = (
    _Plan(metric="runtime_h", title="Runtime", kind="bars", caption="Hours for the epochs asked; lower is faster."),
    _Plan(metric="images_per_s", title="Throughput against batch size", kind="lines", caption="Images per second."),
    _Plan(
        metric="gpu_util_pct",
        title="GPU utilisation",
        kind="lines",
        caption="Share of time with at least one kernel running: a duty cycle, not how full the GPU was. "
        "The axis does not start at zero.",
    ),
    _Plan(metric="power_w", title="Mean power", kind="bars", caption="Energy over time, whole GPU board."),
    _Plan(
        metric="joules_per_image",
        title="Energy per image",
        kind="lines",
        caption="The inverse of images/s/W; lower is better. Published: one over the poster's images/s/W.",
    ),
    _Plan(
        metric="temp_gpu_c_mean",
        title="GPU temperature",
        kind="lines",
        caption="Mean over the measure window. The axis does not start at zero.",
    ),
    _Plan(
        metric="vram_pct",
        title="VRAM in use",
        kind="bars",
        caption="Peak, share of what the driver does not reserve.",
        domain=(0, 100),
    ),
)


def draw(cells: pl.DataFrame, runs: pl.DataFrame, *, demonstration: bool) -> list[Figure]:
    """Every figure that has something measured to show."""
    figures = []
    prefix = "Demonstration: " if demonstration else ""
    cells, left_out = _readable(cells)
    for plan in _PLANS:
        mine = _measured(cells, plan.metric)
        if mine.is_empty():
            continue
        theirs = _published(mine, plan.metric, plan.kind)
        heading = runtime_heading(runs) if plan.metric == "runtime_h" else METRICS[plan.metric].heading
        layers = _bars if plan.kind == "bars" else _lines
        subtitle = _legend_words(plan.kind, bool(theirs.height), bool((mine["n"] > 1).any()))
        spec = layers(mine, theirs, heading, plan.domain)
        figures.append(_figure(plan.metric, prefix + plan.title, subtitle, plan.caption + left_out, spec, mine))
    both = cells.filter(pl.col("images_per_s").is_not_null() & pl.col("joules_per_image").is_not_null())
    if both.height:
        subtitle = "Numbers are batch sizes. Better is down and to the right"
        caption = "Each line follows one GPU from batch to batch." + left_out
        title = f"{prefix}Speed against energy"
        figures.append(_figure("tradeoff", title, subtitle, caption, _tradeoff(both), both))
    return figures


def _readable(cells: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """No more series than colours: whole recipes are left out, those with the fewest cells first, and it is said."""
    recipes = cells.group_by("recipe", maintain_order=True).agg(pl.len(), pl.col("series").n_unique().alias("lines"))
    order = recipes.sort(pl.col("len"), pl.col("recipe") == "baseline", descending=True, maintain_order=True)
    kept: list[str] = []
    room = len(svg.SERIES)
    for recipe, _, lines in order.iter_rows():
        if not kept or lines <= room:
            kept.append(recipe)
            room -= lines
    if len(kept) == recipes.height:
        return cells, ""
    shown = aggregate.with_series(cells.filter(pl.col("recipe").is_in(kept)).drop("series"))
    return shown, f" Recipes shown: {', '.join(kept)}; {recipes.height - len(kept)} more are in the tables."


def _figure(name: str, title: str, subtitle: str, caption: str, spec: dict[str, Any], mine: pl.DataFrame) -> Figure:
    spec = {**spec, "title": {"text": title, "subtitle": subtitle}, "width": WIDTH, "height": HEIGHT}
    run_ids = sorted(mine["run_ids"].explode().unique().to_list())
    drawn = svg.render(spec, f"fig-{name}", title)
    return Figure(
        id=f"fig-{name}",
        title=title,
        caption=f"{caption} {aggregate.mixed_note(mine)}".strip(),
        svg=drawn,
        run_ids=run_ids,
    )


def _legend_words(kind: str, with_published: bool, with_ranges: bool) -> str:
    solid, dashed = ("Filled", "dashed outline") if kind == "bars" else ("Solid", "dashed, hollow")
    words = f"{solid}: measured, n = 1"
    if with_ranges:
        words, dashed = f"{solid}: mean, whisker min\u2013max", "dashed"
    return f"{words}; {dashed}: published" if with_published else words


def _measured(cells: pl.DataFrame, metric: str) -> pl.DataFrame:
    known = cells.filter(pl.col(metric).is_not_null())
    return known.select(
        "series",
        "gpu",
        "site",
        "batch",
        pl.col(f"{metric}_n").alias("n"),
        "run_ids",
        "workload",
        "poster_hours",
        "mixes",
        pl.col(metric).alias("value"),
        pl.col(f"{metric}_min").alias("low"),
        pl.col(f"{metric}_max").alias("high"),
    )


def _published(mine: pl.DataFrame, metric: str, kind: str) -> pl.DataFrame:
    """Published figures of the GPUs measured; bars stand beside the first series of their GPU at each site."""
    source = "images_per_s_per_w" if metric == "joules_per_image" else metric
    theirs = published.shown().filter(pl.col("metric") == source).select("gpu", "batch", "value")
    if metric == "joules_per_image":
        theirs = theirs.with_columns((1 / pl.col("value")).alias("value"))
    alike = pl.col("workload") == published.WORKLOAD
    if metric == "runtime_h":
        alike &= pl.col("poster_hours")
    slots = mine.filter(alike).unique(["gpu"] if kind == "lines" else ["gpu", "site"], maintain_order=True)
    slots = slots.select("gpu", "series")
    return theirs.join(slots, on="gpu", maintain_order="right").sort("batch", maintain_order=True)


def _series(mine: pl.DataFrame) -> list[str]:
    return mine["series"].unique(maintain_order=True).to_list()


def _colour(names: list[str]) -> dict[str, Any]:
    return {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": names, "range": [svg.SERIES[i % len(svg.SERIES)] for i in range(len(names))]},
        "legend": {"columns": legend_columns(names)},
    }


def legend_columns(names: list[str]) -> int:
    """Four short names stand in a row, of long ones two: what is wider than the figure is cut off."""
    longest = max(map(len, names), default=0)
    return 4 if longest <= 12 else 2 if longest <= 30 else 1


def _data(frame: pl.DataFrame, *columns: str) -> dict[str, Any]:
    return {"values": frame.select(columns).to_dicts()}


def _bars(mine: pl.DataFrame, theirs: pl.DataFrame, heading: str, domain: tuple[float, float] | None) -> dict[str, Any]:
    names = _series(mine)
    batches = sorted({*mine["batch"], *theirs["batch"]})
    x = {
        "field": "batch",
        "type": "ordinal",
        "title": "Batch size",
        "sort": batches,
        "scale": {"paddingInner": 0.25},
    }
    offset = {"field": "series", "type": "nominal", "sort": names, "scale": {"paddingInner": 0.12}}
    y: dict[str, Any] = {"field": "value", "type": "quantitative", "title": heading}
    if domain:
        y["scale"] = {"domain": list(domain)}
    layers: list[dict[str, Any]] = [
        {
            "data": _data(mine, "series", "batch", "value"),
            "mark": {"type": "bar", "opacity": 0.9, "cornerRadiusEnd": 2},
            "encoding": {"x": x, "xOffset": offset, "y": y, "color": _colour(names)},
        }
    ]
    if theirs.height:
        layers.append(
            {
                "data": _data(theirs, "series", "batch", "value"),
                "mark": {
                    "type": "bar",
                    "filled": False,
                    "stroke": svg.TEXT,
                    "strokeDash": [3, 2],
                    "strokeWidth": 1.2,
                },
                "encoding": {"x": x, "xOffset": offset, "y": y},
            }
        )
    several = mine.filter(pl.col("n") > 1)
    if several.height:
        ends = {"y": {"field": "low", "type": "quantitative", "title": heading}, "y2": {"field": "high"}}
        layers.append(
            {
                "data": _data(several, "series", "batch", "low", "high"),
                "mark": {"type": "rule", "stroke": svg.TEXT, "strokeWidth": 1.5},
                "encoding": {"x": x, "xOffset": offset, **ends},
            }
        )
    return {"layer": layers}


def _lines(
    mine: pl.DataFrame, theirs: pl.DataFrame, heading: str, domain: tuple[float, float] | None
) -> dict[str, Any]:
    names = _series(mine)
    batches = sorted({*mine["batch"], *theirs["batch"]})
    x = _batch_axis(batches)
    zero = heading.startswith(("Images/s", "Energy"))
    scale: dict[str, Any] = {"zero": zero, "nice": True}
    if heading.startswith("GPU utilisation"):
        lowest = min([*mine["low"], *theirs["value"]])
        scale = {"domain": [max(0, 10 * math.floor((lowest - 1) / 10)), 100]}
    y = {"field": "value", "type": "quantitative", "title": heading, "scale": scale}
    shape = {
        "field": "series",
        "type": "nominal",
        "legend": {"columns": legend_columns(names)},
        "scale": {"domain": names, "range": [_SHAPES[i % len(_SHAPES)] for i in range(len(names))]},
    }
    base = {"x": x, "y": y, "color": _colour(names)}
    layers: list[dict[str, Any]] = []
    if theirs.height:
        data = _data(theirs, "series", "batch", "value")
        line = {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.3, "opacity": 0.85}
        hollow = {"type": "point", "filled": False, "size": 55, "strokeWidth": 1.3, "opacity": 1}
        layers += [
            {"data": data, "mark": line, "encoding": base},
            {"data": data, "mark": hollow, "encoding": {**base, "shape": shape}},
        ]
    data = _data(mine, "series", "batch", "value", "low", "high")
    layers += [
        {"data": data, "mark": {"type": "line", "strokeWidth": 2}, "encoding": base},
        {
            "data": data,
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {**base, "shape": shape},
        },
    ]
    if (mine["n"] > 1).any():
        ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers.append({"data": data, "mark": "rule", "encoding": {**base, **ends}})
    return {"layer": layers}


def _batch_axis(batches: list[int]) -> dict[str, Any]:
    """Logarithmic: a doubling is one step, whatever batches were tried."""
    scale = {"type": "log", "base": 2, "nice": False, "padding": 18}
    axis = {"values": batches, "format": "d", "labelOverlap": True}
    return {"field": "batch", "type": "quantitative", "title": "Batch size", "scale": scale, "axis": axis}


def _tradeoff(both: pl.DataFrame) -> dict[str, Any]:
    """Images/s against J/image. Only the ends of each line carry their batch: the middle ones would collide."""
    names = _series(both)
    batch = pl.col("batch")
    first, last = batch.min().over("series").alias("first"), batch.max().over("series").alias("last")
    ends = both.with_columns(first, last)
    one_end = pl.col("first") == pl.col("last")  # a single batch carries its number once
    axes = {
        axis: {"field": column, "type": "quantitative", "title": METRICS[column].heading}
        | {"scale": {"domain": [0, 1.12 * max(both[column])], "nice": True}}
        for axis, column in (("x", "images_per_s"), ("y", "joules_per_image"))
    }
    encoding = {**axes, "color": _colour(names)}
    columns = ("series", "batch", "images_per_s", "joules_per_image")
    labels = [
        {
            "data": _data(ends.filter((pl.col("batch") == pl.col(which)) & only), *columns),
            "mark": {"type": "text", "dx": shift, "dy": drop, "color": svg.TEXT},
            "encoding": {**axes, "text": {"field": "batch", "type": "quantitative"}},
        }
        for which, shift, drop, only in (("first", -8, -9, pl.lit(True)), ("last", 12, 8, one_end.not_()))
    ]
    order = {"field": "batch", "type": "quantitative"}
    line = {"type": "line", "strokeWidth": 1.3, "opacity": 0.7}
    layers: list[dict[str, Any]] = [
        {"mark": line, "encoding": {**encoding, "order": order}},
        {"mark": {"type": "point", "filled": True, "size": 55, "opacity": 1}, "encoding": encoding},
    ]
    return {"data": _data(both, *columns), "layer": [*layers, *labels]}


def series_title(row: dict[str, Any]) -> str:
    """What a timeline is called beside its run id."""
    return f"{gpu_label(row['gpu'])}, batch {row['batch']}, {row['site']}"


def gpu_colours(cells: pl.DataFrame) -> dict[str, str]:
    """Colour of each GPU's first series, so that other drawings can match."""
    colours: dict[str, str] = {}
    for index, series in enumerate(_series(cells)):
        gpu = cells.filter(pl.col("series") == series)["gpu"][0]
        colours.setdefault(gpu, svg.SERIES[index % len(svg.SERIES)])
    return colours
