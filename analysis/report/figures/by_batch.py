"""Figures against the batch size. Measured is filled or solid; published is hollow and dashed, never joined to it."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis import published, recipe_labels
from analysis.stats import best_batch
from analysis.stats import cells as aggregate
from analysis.units import METRICS, runtime_heading
from inpaint_bench.core.console import pluralize

from . import base as plate
from . import svg
from .base import Figure, Row, Spec, layer

_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "stroke"]
INTERVAL = (
    "Whiskers with caps: 95 % interval of the mean, over the runs of one card or over the cards where several ran"
)
RANGE = "without caps: lowest to highest of runs or cards too few for an interval"
ARROW = "an arrow: it goes on beyond the frame"
ASIDE_PX = 20  # over which the series of one batch are spread
_POSTER_RECIPES = ["baseline", "poster_baseline"]
MIXED_WORDS = 200  # characters; a longer list of cells stands below the tables alone
SINGLE = "n = 1 stands alone"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    metric: str
    title: str
    kind: str  # bars (from zero) or lines
    caption: str
    zero: bool = False  # lines: whether the axis starts there
    most: float | None = None  # what the figure cannot exceed


_PLANS = (
    _Plan(metric="runtime_h", title="Runtime", kind="bars", caption="Hours for the epochs asked; lower is faster."),
    _Plan(
        metric="images_per_s",
        title="Throughput against batch size",
        kind="lines",
        caption="Images per second.",
        zero=True,
    ),
    _Plan(
        metric="gpu_util_pct",
        title="GPU utilisation",
        kind="lines",
        caption="Share of time with at least one kernel running: a duty cycle, not how full the GPU was. "
        "The axis does not start at zero.",
        most=100,
    ),
    _Plan(metric="power_w", title="Mean power", kind="bars", caption="Energy over time, whole GPU board."),
    _Plan(
        metric="joules_per_image",
        title="Energy per image",
        kind="lines",
        caption="The inverse of images/s/W; lower is better. Published: one over the poster's images/s/W.",
        zero=True,
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
        most=100,
    ),
)


def draw(cells: pl.DataFrame, runs: pl.DataFrame, *, prefix: str) -> list[Figure]:
    """Every figure that has something measured. `runs` holds those that failed too: they show where memory ends."""
    cells, left_out = _readable(cells)
    return [_draw(plan, mine, cells, runs, prefix, left_out) for plan in _PLANS if (mine := _measured(cells, plan))]


def _draw(plan: _Plan, mine: list[Row], cells: pl.DataFrame, runs: pl.DataFrame, prefix: str, left_out: str) -> Figure:
    shown = cells.filter(pl.col(plan.metric).is_not_null())
    theirs = _published(shown, plan.metric, plan.kind)
    heading = runtime_heading(runs) if plan.metric == "runtime_h" else METRICS[plan.metric].heading
    inside = _frame(plan, mine, theirs)
    words = [plan.caption]
    if plan.metric == "images_per_s":
        walls = [_wall(row, runs) for row in shown.unique("series", keep="first", maintain_order=True).to_dicts()]
        spec = _with_wall(mine, theirs, heading, inside, walls)
        words.append(_wall_words(walls))
    else:
        drawn = _bars if plan.kind == "bars" else _lines
        spec = drawn(mine, theirs, heading, inside)
    words.append(interval_words(mine, inside))
    ids = plate.in_cells(shown)
    words += [plate.of_runs(ids, shown.height), left_out, _mixed(shown), recipe_labels.legend_text(shown)]
    subtitle = _legend_words(plan.kind, bool(theirs), any(row["n"] > 1 for row in mine))
    caption = " ".join(word for word in words if word)
    return plate.figure(f"fig-{plan.metric}", prefix + plan.title, subtitle, caption, spec, ids)


def _mixed(shown: pl.DataFrame) -> str:
    """The cells whose runs differ in more than the seed: by name where those are few."""
    note, several = aggregate.differences_note(shown), shown.filter(pl.col("differences") != "").height
    if len(note) <= MIXED_WORDS:
        return note
    listed = [part for cell in shown["differences"].drop_nulls() for part in cell.split(", ") if part]
    kinds = {part.split(" ", 1)[1] for part in listed}
    return f"{pluralize(several, 'cell')} mix {', '.join(sorted(kinds))}; the tables name them."


def interval_words(rows: list[Row], inside: tuple[float, float]) -> str:
    """What the whiskers of a figure are."""
    if all(row["n"] == 1 for row in rows):
        return "One run per cell: no intervals."
    words = [INTERVAL] if any(row.get("low") is not None for row in rows) else []
    words += [RANGE if words else f"Whiskers {RANGE}"] if any(map(plate.has_range, rows)) else []
    words += [ARROW] if plate.leaves(rows, inside) else []
    words += [SINGLE] if any(row["n"] == 1 for row in rows) else []
    return "; ".join(words) + "." if words else "Runs of a cell agree to the last digit: no whiskers."


def _readable(cells: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """No more series than colours: whole recipes are left out, those with the fewest cells first, then series."""
    recipes = cells.group_by("recipe", maintain_order=True).agg(pl.len(), pl.col("series").n_unique().alias("lines"))
    order = recipes.sort(pl.col("len"), pl.col("recipe") == "baseline", descending=True, maintain_order=True)
    kept: list[str] = []
    room = len(svg.SERIES)
    for recipe, _, lines in order.iter_rows():
        if not kept or lines <= room:
            kept.append(recipe)
            room -= lines
    words = ""
    if len(kept) < recipes.height:
        cells = aggregate.add_series(cells.filter(pl.col("recipe").is_in(kept)).drop("series"))
        words = (
            f"Recipes shown: {', '.join(map(plate.short, kept))}; {recipes.height - len(kept)} more are in the tables."
        )
    lines = cells.group_by("series", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    if lines.height > len(svg.SERIES):
        named = lines["series"].head(len(svg.SERIES)).to_list()
        cells = cells.filter(pl.col("series").is_in(named))
        words += f" Of {lines.height} series the {len(named)} with most batches; the rest is in the tables."
    return cells, words.strip()


def _legend_words(kind: str, with_published: bool, with_intervals: bool) -> str:
    solid, dashed = ("Filled", "dashed outline") if kind == "bars" else ("Solid", "dashed, hollow")
    words = f"{solid}: measured, n = 1"
    if with_intervals:
        words, dashed = f"{solid}: mean over runs", "dashed"
    return f"{words}; {dashed}: published" if with_published else words


def _measured(cells: pl.DataFrame, plan: _Plan) -> list[Row]:
    known = cells.filter(pl.col(plan.metric).is_not_null())
    names = {"low": "low", "high": "high", "least": "min", "most": "max"}
    ends = [pl.col(f"{plan.metric}_{column}").alias(end) for end, column in names.items()]
    n = pl.col(f"{plan.metric}_n").alias("n")
    return known.select("series", "batch", n, pl.col(plan.metric).alias("value"), *ends).to_dicts()


def _published(shown: pl.DataFrame, metric: str, kind: str) -> list[Row]:
    """Published figures of the GPUs measured; bars stand beside the first series of their GPU at each site."""
    source = "images_per_s_per_w" if metric == "joules_per_image" else metric
    theirs = published.shown().filter(pl.col("metric") == source).select("gpu", "batch", "value")
    if metric == "joules_per_image":
        theirs = theirs.with_columns((1 / pl.col("value")).alias("value"))
    alike = pl.col("workload") == published.WORKLOAD
    if metric == "runtime_h":
        alike &= published.same_training_images()
    plain = pl.col("recipe").is_in(_POSTER_RECIPES)  # the recipe that the poster's sweep ran, where it was measured
    slots = (
        shown.filter(alike)
        .sort(~plain, maintain_order=True)
        .unique(["gpu"] if kind == "lines" else ["gpu", "site"], maintain_order=True)
    )
    slots = slots.select("gpu", "series")
    beside = theirs.join(slots, on="gpu", maintain_order="right").sort("batch", maintain_order=True)
    return beside.select("series", "batch", "value").to_dicts()


def _frame(plan: _Plan, mine: list[Row], theirs: list[Row]) -> tuple[float, float]:
    ends = plate.ends_of(mine)
    zero = plan.zero or plan.kind == "bars"
    bottom, top = plate.frame([row["value"] for row in (*mine, *theirs)], ends, zero=zero)
    return (bottom, top if plan.most is None else min(top, plan.most) if plan.kind == "lines" else plan.most)


def _names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["series"] for row in rows))


def _bars(mine: list[Row], theirs: list[Row], heading: str, inside: tuple[float, float]) -> Spec:
    names = _names(mine)
    batches = sorted({row["batch"] for row in (*mine, *theirs)})
    x = {
        "field": "batch",
        "type": "ordinal",
        "title": "Batch size",
        "sort": batches,
        "scale": {"paddingInner": 0.25},
    }
    offset = {"field": "series", "type": "nominal", "sort": names, "scale": {"paddingInner": 0.12}}
    y: Spec = {"field": "value", "type": "quantitative", "title": heading, "scale": {"domain": list(inside)}}
    place = {"x": x, "xOffset": offset, "y": y}
    filled = {"type": "bar", "opacity": 0.9, "cornerRadiusEnd": 2}
    layers = [layer(mine, filled, **place, color=plate.colour(names))]
    if theirs:
        outline = {"stroke": svg.TEXT, "strokeDash": [3, 2], "strokeWidth": 1.2}
        layers.append(layer(theirs, {"type": "bar", "filled": False, **outline}, **place))
    return {"layer": [*layers, *plate.whiskers(mine, inside, {"color": svg.TEXT}, place)]}


def _lines(mine: list[Row], theirs: list[Row], heading: str, inside: tuple[float, float]) -> Spec:
    names = _names(mine)
    x = _batch_axis(sorted({row["batch"] for row in (*mine, *theirs)}))
    scale = {"domain": list(inside), "zero": False, "nice": False}
    y = {"field": "value", "type": "quantitative", "title": heading, "scale": scale}
    shape = {
        "field": "series",
        "type": "nominal",
        "legend": {"columns": plate.legend_columns(names)},
        "scale": {"domain": names, "range": [_SHAPES[i % len(_SHAPES)] for i in range(len(names))]},
    }
    base = {"x": x, "y": y, "color": plate.colour(names)}
    layers: list[Spec] = []
    if theirs:
        line = {"type": "line", "strokeDash": [4, 3], "strokeWidth": 1.3, "opacity": 0.85}
        hollow = {"type": "point", "filled": False, "size": 55, "strokeWidth": 1.3, "opacity": 1}
        layers += [layer(theirs, line, **base), layer(theirs, hollow, **base, shape=shape)]
    # Series stand side by side, by a few pixels, so that one interval does not hide another.
    step = min(5.0, ASIDE_PX / len(names))
    for index, name in enumerate(names):
        rows = [row for row in mine if row["series"] == name]
        aside = {"xOffset": step * (index - (len(names) - 1) / 2)}
        layers.append(layer(rows, {"type": "line", "strokeWidth": 2, **aside}, **base))
        point = {"type": "point", "filled": True, "size": 60, "opacity": 1, **aside}
        layers += plate.whiskers(rows, inside, aside, base)
        layers.append(layer(rows, point, **base, shape=shape))
    return {"layer": layers}


def _batch_axis(batches: list[int]) -> Spec:
    """Logarithmic: a doubling is one step, whatever batches were tried."""
    domain = [batches[0], batches[-1]] if batches[0] < batches[-1] else [batches[0] / 2, batches[0] * 2]
    scale = {"type": "log", "base": 2, "nice": False, "padding": 24, "domain": domain}
    axis = {"values": batches, "format": "d", "labelOverlap": True}
    return {"field": "batch", "type": "quantitative", "title": "Batch size", "scale": scale, "axis": axis}


def _wall(cell: Row, runs: pl.DataFrame) -> Row:
    ran, oom = best_batch.memory_limit(cell, runs)
    return {"series": cell["series"], "label": cell["series"], "ran": ran, "oom": oom}


def _wall_words(walls: list[Row]) -> str:
    if all(row["oom"] is None for row in walls):
        largest = max((row["ran"] for row in walls if row["ran"] is not None), default=None)
        return f"No run ran out of GPU memory: the memory wall lies beyond batch {largest}." if largest else ""
    unknown = [row["series"] for row in walls if row["oom"] is None]
    words = "Memory wall, below: a dot is the largest batch that ran to its end, a cross the smallest that ran out of "
    words += "GPU memory."
    return words + (f" Not reached: {', '.join(unknown)}." if unknown else "")


def _with_wall(mine: list[Row], theirs: list[Row], heading: str, inside: tuple[float, float], walls: list[Row]) -> Spec:
    """The curves over a strip that shows where memory ends; curves alone where it never did."""
    if all(row["oom"] is None for row in walls):
        return _lines(mine, theirs, heading, inside)
    tried = {row["batch"] for row in (*mine, *theirs)} | {row[end] for row in walls for end in ("ran", "oom")}
    x = _batch_axis(sorted(tried - {None}))
    curves = _lines(mine, theirs, heading, inside)
    for one in curves["layer"]:
        one["encoding"]["x"] = {**x, "title": None, "axis": {**x["axis"], "labels": False, "ticks": False}}
    names = [row["series"] for row in walls]
    y = {"field": "series", "type": "nominal", "sort": names, "title": "Memory", "axis": {"labels": False}}
    # The curves' own scale of colours, so that there is one legend.
    base = {"y": y, "color": {**plate.colour(_names(mine)), "legend": None}}
    ran, oom = ({**x, "field": field} for field in ("ran", "oom"))
    known = [row for row in walls if row["ran"] is not None]
    ended = [row for row in walls if row["oom"] is not None]
    both = [row for row in known if row["oom"] is not None]
    cross = {"type": "point", "shape": "M-1,-1L1,1M-1,1L1,-1", "size": 22, "strokeWidth": 2, "opacity": 1}
    strip = {
        "width": plate.WIDTH,
        "height": {"step": 14},
        "layer": [
            layer(both, {"type": "rule", "strokeDash": [2, 2]}, x=ran, x2={"field": "oom"}, **base),
            layer(known, {"type": "point", "filled": True, "size": 40, "opacity": 1}, x=ran, **base),
            layer(ended, {**cross, "filled": False}, x=oom, **base),
        ],
    }
    top = {"width": plate.WIDTH, "height": plate.HEIGHT, **curves}
    return {"vconcat": [top, strip], "spacing": 8, "resolve": {"scale": {"x": "shared", "color": "shared"}}}
