"""What every figure of the page is made of: its colours, the frame of its intervals, its caption, its SVG."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import svg

WIDTH, HEIGHT = 400, 230
LONGEST_NAME = 120  # of a file; with its ending it has to stay below 255 bytes
LABEL_PX = 230  # longest label beside a row; what is longer ends in an ellipsis
ROOM = 0.6  # how much further than its means a frame may reach for the sake of their intervals
Row = dict[str, Any]
Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    id: str
    title: str
    caption: str
    svg: str
    run_ids: list[str]
    spec: Spec  # Vega-Lite, with the data behind the marks


def figure(name: str, title: str, subtitle: str | list[str], caption: str, spec: Spec, run_ids: list[str]) -> Figure:
    """Draw a specification. A single view without a size gets the usual one."""
    size = {} if "vconcat" in spec or "hconcat" in spec else {"width": WIDTH, "height": HEIGHT}
    whole = {**size, **spec, "title": {"text": title, "subtitle": subtitle}}
    safe = _safe(name)
    drawn = svg.render(whole, safe, title)
    return Figure(id=safe, title=title, caption=caption, svg=drawn, run_ids=sorted(set(run_ids)), spec=whole)


def _safe(name: str) -> str:
    """For an id and a file name: harmless in both, not too long, and still another one for every other name."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    if safe == name and len(name) <= LONGEST_NAME:
        return name
    return f"{safe[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def short(text: str, longest: int = 60) -> str:
    """With an ellipsis in the middle where it is too long: both ends of a name tell it from others."""
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}\u2026{text[-half:]}"


def of_runs(run_ids: list[str], cells: int) -> str:
    """The n of a caption."""
    return f"n = {pluralize(len(set(run_ids)), 'run')} in {pluralize(cells, 'cell')}."


def in_cells(cells: pl.DataFrame) -> list[str]:
    """Ids of all runs behind these cells."""
    return [run_id for ids in cells["run_ids"].to_list() for run_id in ids]


def names_of(cells: pl.DataFrame) -> list[str]:
    """Series in the order of the table."""
    return cells["series"].unique(maintain_order=True).to_list()


def colour(names: list[str], field: str = "series") -> Spec:
    """A colour per name, with a legend whose rows are no wider than the figure."""
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": names, "range": [svg.SERIES[i % len(svg.SERIES)] for i in range(len(names))]},
        "legend": {"columns": legend_columns(names), "symbolOpacity": 1},
    }


def legend_columns(names: list[str]) -> int:
    """Four short names stand in a row, of long ones two: what is wider than the figure is cut off."""
    longest = max(map(len, names), default=0)
    return 4 if longest <= 12 else 2 if longest <= 30 else 1


def gpu_colours(cells: pl.DataFrame) -> dict[str, str]:
    """Colour of each GPU's first series, so that other drawings can match."""
    colours: dict[str, str] = {}
    for index, series in enumerate(names_of(cells)):
        gpu = cells.filter(pl.col("series") == series)["gpu"][0]
        colours.setdefault(gpu, svg.SERIES[index % len(svg.SERIES)])
    return colours


def series_title(row: Row) -> str:
    """What a timeline is called beside its run id."""
    return f"{gpu_label(row['gpu'])}, batch {row['batch']}, {row['site']}"


def layer(rows: list[Row], mark: Spec, **encoding: Any) -> Spec:
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def constant(value: float, axis: Spec) -> Spec:
    """A place on the axis that is the same for all rows, on its scale."""
    return {"datum": value, **{key: part for key, part in axis.items() if key != "field"}}


def label_px(names: list[str]) -> float:
    """Room for the labels of rows in the reader's font, which may be wider than ours."""
    return min(LABEL_PX, 7.6 * max(map(len, names), default=0))


def row_axis(names: list[str], **axis: Any) -> Spec:
    """A row per name, in this order."""
    look = {"labelLimit": LABEL_PX, "domain": False, "ticks": False, "minExtent": label_px(names)}
    return {"field": "label", "type": "nominal", "sort": names, "title": None, "axis": {**look, **axis}}


def frame(means: list[float], ends: list[float], *, zero: bool) -> tuple[float, float]:
    """Lowest and highest value of an axis: all means, and of their intervals what does not dwarf them.

    Two cards give intervals many times as long as the difference that one wants to see.
    """
    low, high = min(means), max(means)
    room = ROOM * (high if zero else max(high - low, 0.05 * abs(high)))
    reach = [end for end in ends if low - room <= end <= high + room]
    bottom, top = min([low, *reach]), max([high, *reach])
    if any(end > high + room for end in ends):
        top = high + room
    if any(end < low - room for end in ends):
        bottom = low - room
    edge = 0.05 * (top - (0 if zero else bottom)) or 1.0
    return (0.0 if zero else bottom - edge), top + edge


def whiskers(rows: list[Row], inside: tuple[float, float], look: Spec, encoding: Spec, axis: str = "y") -> list[Spec]:
    """Layers of intervals from `low` to `high`: a bar with caps, or with an arrow where it leaves the frame.

    Rows without an interval get a thin bar without caps from `least` to `most` of their runs, if they have those.
    `axis` is that of the values, whose encoding gives the scale.
    """
    bottom, top = inside
    known = [row for row in rows if row.get("low") is not None]
    spans = [row for row in rows if has_range(row)]
    value, others = encoding[axis], {name: part for name, part in encoding.items() if name != axis}
    layers = []
    if spans:
        span = {axis: {**value, "field": "least"}, f"{axis}2": {"field": "most"}}
        layers.append(layer(spans, {"type": "rule", "strokeWidth": 1, "opacity": 0.8, **look}, **span, **others))
    if not known:
        return layers
    cut = [{**row, "low": max(row["low"], bottom), "high": min(row["high"], top)} for row in known]
    between = {axis: {**value, "field": "low"}, f"{axis}2": {"field": "high"}}
    layers.append(layer(cut, {"type": "rule", "strokeWidth": 1.4, "opacity": 0.8, **look}, **between, **others))
    cap = {"type": "tick", "orient": "horizontal" if axis == "y" else "vertical", "size": 8, "thickness": 1.4}
    arrows = ("triangle-down", "triangle-up") if axis == "y" else ("triangle-left", "triangle-right")
    for end, arrow in zip(("low", "high"), arrows, strict=True):
        place = {**value, "field": end}
        whole = [row for row, drawn in zip(known, cut, strict=True) if row[end] == drawn[end]]
        rest = [drawn for row, drawn in zip(known, cut, strict=True) if row[end] != drawn[end]]
        if whole:
            layers.append(layer(whole, {**cap, **look, "opacity": 1}, **{axis: place}, **others))
        if rest:
            mark = {"type": "point", "shape": arrow, "filled": True, "size": 60, "opacity": 1, **look}
            layers.append(layer(rest, mark, **{axis: place}, **others))
    return layers


def has_range(row: Row) -> bool:
    """Runs that differ and are too few for an interval."""
    return row.get("low") is None and row.get("least") is not None and row["least"] < row["most"]


def ends_of(rows: list[Row]) -> list[float]:
    """Ends of all that `whiskers` draws."""
    return [end for row in rows for end in _ends(row)]


def _ends(row: Row) -> list[float]:
    if row.get("low") is not None:
        return [row["low"], row["high"]]
    return [row["least"], row["most"]] if has_range(row) else []


def leaves(rows: list[Row], inside: tuple[float, float]) -> bool:
    """Whether any interval goes on beyond the frame."""
    bottom, top = inside
    return any(row.get("low") is not None and (row["low"] < bottom or row["high"] > top) for row in rows)
