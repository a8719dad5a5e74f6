"""Parts that the figures share: the record of a figure, its colours, axis limits, whiskers and caption sentences."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import svg

MAX_FILE_NAME = 120  # characters; with a hash and the suffix a name has to stay below 255 bytes
LABEL_PX = 230  # longest label beside a row; a longer one ends in an ellipsis
MAX_EXCESS = 0.6  # an axis reaches at most this share beyond the means to show their intervals
MIN_SPAN = 0.02  # of an axis that does not start at zero, as a share of its largest mean
HAS_RANGE = pl.col("low").is_null() & (pl.col("least") < pl.col("most"))  # too few runs for an interval, which differ
ENDS = {"low": "low", "high": "high", "least": "min", "most": "max"}  # of whiskers: suffix in a cell
CUT_NOTE = "Intervals that extend beyond the axis are cut off."
Row = dict[str, Any]
Spec = dict[str, Any]  # Vega-Lite, with the data of its marks
Limits = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the report. It is drawn when its SVG is first read."""

    id: str  # also the name of its files
    title: str
    subtitle: str | list[str]
    caption: str
    spec: Spec
    run_ids: list[str]

    @cached_property
    def svg(self) -> str:
        return svg.render(self.titled_spec, self.id, self.title)

    @property
    def titled_spec(self) -> Spec:
        return {**self.spec, "title": {"text": self.title, "subtitle": self.subtitle}}


def figure(
    name: str,
    title: str,
    subtitle: str | list[str],
    caption: Iterable[str],
    chart: alt.TopLevelMixin | Spec,
    run_ids: Iterable[str],
) -> Figure:
    """Make a figure of an Altair chart. `caption` is a list of sentences, of which empty ones are left out."""
    spec = chart if isinstance(chart, dict) else svg.to_spec(chart)
    text, ids = " ".join(filter(None, caption)), sorted(set(run_ids))
    return Figure(id=_file_name(name), title=title, subtitle=subtitle, caption=text, spec=spec, run_ids=ids)


def mark_demonstration(figures: list[Figure]) -> list[Figure]:
    """Return the figures with a title that says that their numbers are not of the GPUs that they name."""
    return [replace(figure, title=f"Demonstration: {figure.title}") for figure in figures]


def _file_name(name: str) -> str:
    """Return the name itself if it is safe as an id and a file name, else a safe one that is unique to it."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    if safe == name and len(name) <= MAX_FILE_NAME:
        return name
    return f"{safe[:MAX_FILE_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def shorten(text: str, longest: int = 60) -> str:
    """Return the text with an ellipsis in its middle if it is too long: both ends of a name are telling."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}\u2026{text[-half:]}"


def n_note(run_ids: Iterable[str], cells: int) -> str:
    """Return the sentence that says how many runs and cells a figure shows."""
    return f"n = {pluralize(len(set(run_ids)), 'run')} in {pluralize(cells, 'cell')}."


def run_ids_of(cells: pl.DataFrame) -> list[str]:
    """Return the ids of all runs behind these cells."""
    return [run_id for ids in cells["run_ids"].to_list() for run_id in ids]


def colour(names: list[str], field: str = "series") -> alt.Color:
    """Return the encoding that gives each name a colour of the palette, with a legend."""
    palette = [svg.SERIES[i % len(svg.SERIES)] for i in range(len(names))]
    legend = {"columns": legend_columns(names), "symbolOpacity": 1}
    return alt.Color(f"{field}:N").scale(domain=names, range=palette).legend(**legend)


def legend_columns(names: list[str]) -> int:
    """Return how many columns of the legend fit into the width of a figure: the rest would be cut off."""
    longest = max(map(len, names), default=0)
    return 4 if longest <= 12 else 2 if longest <= 30 else 1


def gpu_colours(cells: pl.DataFrame) -> dict[str, str]:
    """Return the colour of each GPU's first series, for figures that have a colour per GPU."""
    # Numbered as `colour` numbers the series, so that a GPU has the colour of its first one.
    first = cells.unique("series", keep="first", maintain_order=True).with_row_index("index")
    pairs = first.unique("gpu", keep="first", maintain_order=True).select("gpu", "index").iter_rows()
    return {gpu: svg.SERIES[index % len(svg.SERIES)] for gpu, index in pairs}


def run_title(run: Row) -> str:
    """Return what a run is called beside its id."""
    return ", ".join(
        filter(None, (gpu_label(run["gpu"]), run[recipe_labels.COLUMN], f"batch {run['batch']}", run["site"]))
    )


def label_width(labels: list[str]) -> float:
    """Return the pixels for the labels of rows, in a font that may be wider than ours."""
    return min(LABEL_PX, 7.6 * max(map(len, labels), default=0))


def plot_width(labels: list[str]) -> float:
    """Return the width of a plot that shares the figure's width with the labels of its rows."""
    return max(220, svg.WIDTH + 40 - label_width(labels))


def row_axis(labels: list[str], /, **axis: Any) -> alt.Y:
    """Return the encoding that gives each label a row, in this order."""
    style = {"labelLimit": LABEL_PX, "domain": False, "ticks": False, "minExtent": label_width(labels)}
    return alt.Y("label:N").sort(labels).title(None).axis(**style | axis)


def axis_limits(means: Iterable[float], ends: Iterable[float], *, zero: bool) -> Limits:
    """Return the ends of an axis that shows all means, and their intervals unless these dwarf the means.

    `ends` are the ends of the intervals: with few degrees of freedom they can be many times the differences between
    the means. What does not fit is cut off.
    """
    means, ends = list(means), list(ends)
    low, high = min(means), max(means)
    # In units of what the axis is to show: the largest mean where it starts at zero, else the spread of the means.
    excess = MAX_EXCESS * (high if zero else max(high - low, 0.05 * abs(high)))
    bottom = max(low - excess, min([low, *ends]))
    top = min(high + excess, max([high, *ends]))
    if not zero:  # differences of a few in ten thousand are not to look like steep slopes
        widening = max(0.0, MIN_SPAN * abs(high) - (top - bottom)) / 2
        bottom, top = bottom - widening, top + widening
    margin = 0.05 * (top - (0 if zero else bottom)) or 1.0
    return (0.0 if zero else bottom - margin), top + margin


def interval_ends(rows: pl.DataFrame) -> list[float]:
    """Return the ends of all intervals and ranges that `whiskers` draws."""
    ranges = rows.filter(HAS_RANGE)
    ends = pl.concat([rows["low"], rows["high"], ranges["least"], ranges["most"]])
    return ends.drop_nulls().to_list()


def is_cut(rows: pl.DataFrame, limits: Limits) -> bool:
    """Return whether any interval extends beyond the axis."""
    return bool(((rows["low"] < limits[0]) | (rows["high"] > limits[1])).any())


def layer(*charts: alt.Chart) -> alt.LayerChart:
    """Layer the charts that have data: one without would still change the symbols of the legend."""
    return alt.layer(*(c for c in charts if not (isinstance(c.data, pl.DataFrame) and c.data.is_empty())))


def whiskers(rows: pl.DataFrame, *channels: Any, axis: str = "y", **mark: Any) -> list[alt.Chart]:
    """Return the layers of all intervals: bars from `low` to `high` with caps, cut off where the axis ends.

    Rows without an interval get a thin bar without caps from `least` to `most` of their runs. `axis` is the one of
    the values, `channels` are the other encodings, `mark` applies to every mark.
    """
    cap = {"orient": "horizontal" if axis == "y" else "vertical", "size": 8, "thickness": 1.4, "opacity": 1, **mark}
    intervals = rows.drop_nulls("low")
    layers = []
    # Only intervals get the caps below.
    for data, width, start, end in ((rows.filter(HAS_RANGE), 1, "least", "most"), (intervals, 1.4, "low", "high")):
        bars = alt.Chart(data).mark_rule(strokeWidth=width, opacity=0.8, clip=True, **mark)
        layers.append(bars.encode(*channels, **{axis: f"{start}:Q", f"{axis}2": f"{end}:Q"}))
    caps = alt.Chart(intervals).mark_tick(clip=True, **cap)
    return [*layers, *(caps.encode(*channels, **{axis: f"{end}:Q"}) for end in ("low", "high"))]
