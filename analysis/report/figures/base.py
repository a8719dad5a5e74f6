"""Parts that the figures share: the record of a figure, its colours, axis limits, whiskers and caption sentences."""

import hashlib
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import altair as alt
import numpy as np
import polars as pl

from analysis import recipe_labels
from analysis.units import gpu_label, gpu_order, made
from inpaint_bench.core.console import pluralize

from . import svg

MAX_FILE_NAME = 120  # characters; with a hash and the suffix a name has to stay below 255 bytes
ROW_PX, BAR_PX, LINE_PX = 38, 14, 14.0  # height of a row and its label, of a bar, and of a line of text
BELOW = {"yOffset": 8}  # offset of a row's marks, because its label stands above them
MAX_EXCESS = 0.6  # an axis reaches at most this share beyond the means to show their intervals
MAX_LABEL, LONGEST_LABEL = 24, 34  # characters from which a label breaks into lines, and of a line
SEPARATOR = " \u00b7 "  # between the parts of a label
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "stroke"]
DASHES, WIDTHS = [[1, 0], [6, 5], [2, 4], [10, 9]], [2.6, 1.8, 1.4, 1.0]  # tell lines apart that can be equal
MIN_SPAN = 0.02  # least span of an axis that does not start at zero, as a share of its largest mean
HAS_RANGE = pl.col("low").is_null() & (pl.col("least") < pl.col("most"))  # too few runs for an interval, which differ
ENDS = {"low": "low", "high": "high", "least": "min", "most": "max"}  # ends of whiskers: suffix in a cell
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

    def made_by(self, workload_of: Mapping[str, str]) -> Self:
        """Return the figure with the units of what the workloads of its runs make."""
        workloads = {workload_of[run_id] for run_id in self.run_ids if run_id in workload_of}
        lines = [self.subtitle] if isinstance(self.subtitle, str) else self.subtitle
        subtitle = [made(line, workloads) for line in lines]
        title, caption = made(self.title, workloads), made(self.caption, workloads)
        spec = _with_titles(self.spec, workloads)
        return replace(self, title=title, subtitle=subtitle, caption=caption, spec=spec)


def _with_titles(part: Any, workloads: Collection[str]) -> Any:
    """Return a part of a specification, in which the titles of axes have the units of what these workloads make."""
    if isinstance(part, list):
        return [_with_titles(each, workloads) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: made(value, workloads) if key == "title" and isinstance(value, str) else _with_titles(value, workloads)
        for key, value in part.items()
    }


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
    return [run_id for ids in cells["run_ids"].to_list() for run_id in ids]


def colour(names: list[str], field: str, palette: Sequence[str] = svg.SERIES, **key: Any) -> alt.Color:
    """Return the encoding that gives each name a colour of the palette, `key` being its legend if there are several."""
    # As many columns as fit into the width of a figure: the rest would be cut off.
    longest = max(map(len, names), default=0)
    legend = {"columns": 4 if longest <= 12 else 2 if longest <= 30 else 1, "symbolOpacity": 1, **key}
    shades = [palette[i % len(palette)] for i in range(len(names))]
    return alt.Color(f"{field}:N").scale(domain=names, range=shades).legend(legend if len(names) > 1 else None)


def lines(names: list[str], field: str) -> tuple[alt.Color, alt.StrokeDash, alt.StrokeWidth]:
    """Return the encodings that give each name a colour, dashes and a width, so that a line shows below another."""
    patterns, widths = ([each[i % len(each)] for i in range(len(names))] for each in (DASHES, WIDTHS))
    dash = alt.StrokeDash(f"{field}:N").scale(domain=names, range=patterns).legend(None)
    width = alt.StrokeWidth(f"{field}:N").scale(domain=names, range=widths).legend(None)
    return colour(names, field, symbolType="stroke", symbolSize=500), dash, width


def gpu_colours(gpus: Iterable[str]) -> dict[str, str]:
    return {gpu: svg.SERIES[i % len(svg.SERIES)] for i, gpu in enumerate(sorted(set(gpus), key=gpu_order))}


def zero_note(*limits: Limits) -> str:
    """Return the sentence that says which axes do not start at zero; empty if all do."""
    above = sum(bottom > 0 for bottom, _ in limits)
    names = "The axis does" if len(limits) == 1 else "The axes do" if above == len(limits) else "One axis does"
    return f"{names} not start at zero." if above else ""


def run_title(run: Row) -> str:
    parts = (gpu_label(run["gpu"]), run[recipe_labels.COLUMN], run["batch"] and f"batch {run['batch']}", run["site"])
    return ", ".join(filter(None, parts))


def labelled_rows(labels: list[str]) -> tuple[alt.Y, alt.Chart]:
    """Return the encoding that gives each label a row in this order, and the labels, which stand above their rows.

    Marks of the rows are to be shifted by `BELOW`.
    """
    y = alt.Y("label:N").sort(labels).title(None).axis(None)
    rows = alt.Chart(alt.InlineData(values=[{"label": label} for label in labels]), height=alt.Step(ROW_PX))
    text = rows.mark_text(align="left", fontSize=12, yOffset=-BELOW["yOffset"], limit=svg.WIDTH + 30, color=svg.TEXT)
    return y, text.encode(y, alt.XValue(0), text="label:N")


def axis_limits(means: Iterable[float], ends: Iterable[float], *, zero: bool) -> Limits:
    """Return the ends of an axis that shows all means, and their intervals unless these dwarf the means.

    `ends` are the ends of the intervals: with few degrees of freedom they can be many times the differences between
    the means. What does not fit is cut off.
    """
    means, ends = list(means), list(ends)
    low, high = min(means), max(means)
    # In units of what the axis is to show: the largest mean if it starts at zero, else the spread of the means.
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


def curves(rows: pl.DataFrame, x: alt.X, y: alt.Y, limits: Limits, *, log: bool = False) -> alt.LayerChart:
    """Draw a line per `series`: its colour is the `gpu`, its marker the `recipe`, both stand with its name at its end.

    `rows` have these columns, the field of `x`, the values as `value` and the ends of their whiskers; `ideal`, if there
    is one, is drawn dashed. A name that cannot stand at the end of its line is joined to it by dots.
    """
    colours = gpu_colours(rows["gpu"])
    recipes = rows["recipe"].unique(maintain_order=True).to_list()
    colour = alt.Color("gpu:N").scale(domain=list(colours), range=list(colours.values())).legend(None)
    shape = alt.Shape("recipe:N").scale(domain=recipes, range=SHAPES).legend(None)
    keys, labels = _end_labels(rows, limits, *((math.log, math.exp) if log else (float, float)))
    width = max(180.0, svg.WIDTH + 18 - 7.0 * max(map(len, labels["text"])))
    text = alt.Chart(labels).mark_text(align="left", dx=21, x="width", color=svg.TEXT)
    key = alt.Chart(keys).mark_point(filled=True, size=60, opacity=1, x="width", xOffset=12)
    at = x.shorthand.partition(":")[0]
    away = keys.filter((pl.col(at) < rows[at].max()) | (pl.col("moved_px").abs() > LINE_PX))
    dots = alt.Chart(away).mark_rule(strokeDash=[1, 3], strokeWidth=1.2)
    chart, layers = alt.Chart(rows), []
    if "ideal" in rows.columns:
        dashed = chart.mark_line(strokeDash=[4, 3], strokeWidth=1.2)
        layers.append(dashed.encode(x, colour, detail="series:N", y="ideal:Q"))
    layers += [chart.mark_line(strokeWidth=2).encode(x, y, colour, detail="series:N"), *whiskers(rows, x, colour)]
    layers += [dots.encode(x, colour, x2=alt.value(width + 6), y="value:Q", y2="place:Q")]
    layers += [chart.mark_point(filled=True, size=60, opacity=1).encode(x, y, colour, shape)]
    layers += [key.encode(alt.Y("place:Q"), colour, shape), text.encode(alt.Y("place:Q"), text="text:N")]
    return layer(*layers).properties(width=width)


def _end_labels(
    rows: pl.DataFrame, limits: Limits, scale: Callable[[float], float], undo: Callable[[float], float]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the last point of each series with the `place` of its label, and (text, place) of its lines.

    None is over another; `moved_px` is how far a label is above its point.
    """
    bottom, top = map(scale, limits)
    ends = rows.group_by("series", maintain_order=True).last().sort("value")
    longest = max(len(part) for name in ends["series"] for part in name.split(SEPARATOR))
    texts = [_wrap(name, min(max(MAX_LABEL, longest), LONGEST_LABEL)) for name in ends["series"]]
    wanted = np.array([(scale(value) - bottom) / (top - bottom) * svg.HEIGHT for value in ends["value"]])
    stacked = np.cumsum([0.0, *(LINE_PX * (len(a) + len(b)) / 2 + 3 for a, b in pairwise(texts))])
    # What would overlap moves half up, half down, and then into the figure.
    free = wanted - stacked
    free = (np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]) / 2
    heights = np.clip(free, 0.0, svg.HEIGHT - stacked[-1]) + stacked
    lines = [
        {"text": shorten(text, LONGEST_LABEL), "place": height + LINE_PX * ((len(label) - 1) / 2 - index)}
        for label, height in zip(texts, heights, strict=True)
        for index, text in enumerate(label)
    ]
    keys = ends.with_columns(place=heights, moved_px=heights - wanted)
    place = pl.col("place").map_elements(lambda px: undo(bottom + px / svg.HEIGHT * (top - bottom)), pl.Float64)
    return keys.with_columns(place), pl.DataFrame(lines).with_columns(place)


def _wrap(name: str, longest: int) -> list[str]:
    """Return the parts of a name in as few lines as hold them."""
    parts = name.replace(" ", "\u00a0").replace(SEPARATOR.replace(" ", "\u00a0"), SEPARATOR)
    lines = textwrap.wrap(parts, longest, break_long_words=False, break_on_hyphens=False)
    return [text.replace("\u00a0", " ") for line in lines if (text := line.strip(SEPARATOR))]


def stacks(rows: list[Row], totals: list[Row], colours: dict[str, str], title: str) -> alt.LayerChart:
    """Draw a stacked bar per label. `rows` have label, part, value and order, `totals` label, value and text."""
    y, labels = labelled_rows([row["label"] for row in totals])
    # Beyond the longest bar there is room for its text.
    room = 7.0 * max(len(row["text"]) for row in totals) + 10
    domain = [0, max(row["value"] for row in totals) * svg.WIDTH / (svg.WIDTH - room)]
    x = alt.X("value:Q").title(title).axis(tickCount=4).scale(domain=domain, nice=False)
    bars = alt.Chart(alt.InlineData(values=rows)).mark_bar(size=BAR_PX, **BELOW)
    text = alt.Chart(alt.InlineData(values=totals)).mark_text(align="left", dx=6, color=svg.TEXT, **BELOW)
    part = colour(list(colours), "part", list(colours.values()))
    layers = bars.encode(x.stack("zero"), y, part, order="order:Q"), text.encode(x, y, text="text:N"), labels
    return alt.layer(*layers).properties(width=svg.WIDTH, height=alt.Step(ROW_PX))
