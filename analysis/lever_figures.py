"""Figures of a study: a ladder as bars, gains of single levers as dots with intervals."""

from __future__ import annotations

from typing import Any

from . import svg
from .figures import Figure
from .lever_tables import against
from .study import LADDER, LEAVE_ONE_OUT, Comparison

WIDTH, ROW = 380, 30
_INK, _FAINT, _MARK = svg.TEXT, svg.MUTED, svg.SERIES[0]
Rows = list[dict[str, Any]]
Layers = Rows


def draw(comparisons: list[Comparison], *, demonstration: bool) -> list[Figure]:
    """One figure for each study on each GPU and batch that has any run that counts."""
    prefix = "Demonstration: " if demonstration else ""
    return [_figure(one, prefix) for one in comparisons if one.measured]


def _figure(one: Comparison, prefix: str) -> Figure:
    if one.kind == LADDER:
        title, layers = "Ladder", _bars(one)
        subtitle = "Images/s, mean; whisker min\u2013max; n beside each bar"
        caption = "Each step keeps all levers before it."
    else:
        without = one.kind == LEAVE_ONE_OUT
        title, layers = ("All levers but one" if without else "One lever at a time"), _dots(one)
        subtitle = f"Change of images/s against {'all levers' if without else 'the base'}; bar: 95 % interval"
        caption = "An interval that touches the line at 0 is no difference seen; hollow: n = 1, no interval."
    title, caption = f"{prefix}{title}: {one.where}", f"{caption} {one.what}."
    spec: dict[str, Any] = {
        "layer": layers,
        "width": WIDTH,
        "height": {"step": ROW},
        "title": {"text": title, "subtitle": subtitle},
    }
    name = f"fig-{one.name}"
    run_ids = sorted(row["run_id"] for step in one.steps for row in step.runs)
    return Figure(id=name, title=title, caption=caption, svg=svg.render(spec, name, title), run_ids=run_ids)


def _bars(one: Comparison) -> Layers:
    measured: Rows = []
    lacking: Rows = []
    for step in one.steps:
        stats = step.figures("images_per_s")
        if stats["images_per_s"] is None:
            lacking.append({"label": step.label, "value": 0, "words": step.word})
            continue
        ends = {"low": stats["images_per_s_min"], "high": stats["images_per_s_max"]}
        n = stats["images_per_s_n"]
        measured.append({"label": step.label, "value": stats["images_per_s"], **ends, "words": f"n = {n}"})
    x: dict[str, Any] = {"field": "value", "type": "quantitative", "title": "Images/s"}
    x["scale"] = {"domain": [0, 1.12 * max(row["high"] for row in measured)], "nice": True}
    y = _labels([step.label for step in one.steps])
    ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
    return [
        _layer(measured, {"type": "bar", "color": _MARK, "opacity": 0.9, "cornerRadiusEnd": 2}, x=x, y=y),
        _layer([row for row in measured if row["low"] < row["high"]], _rule(_INK), **ends, y=y),
        _text(measured, {**x, "field": "high"}, y, _FAINT),
        _text(lacking, x, y, _FAINT),
    ]


def _dots(one: Comparison) -> Layers:
    """Sorted by gain; what has none stands below, with why."""
    measured: Rows = []
    lacking: Rows = []
    for index, step in enumerate(one.steps[1:], start=1):
        gain = against(one, index, 0)
        if gain is None:
            lacking.append({"label": step.label, "value": 0, "words": step.word})
            continue
        row = {"label": step.label, "value": 100 * gain.value, "words": f"n = {gain.n}", "sure": gain.low is not None}
        low, high = (gain.value if end is None else end for end in (gain.low, gain.high))
        measured.append({**row, "low": 100 * low, "high": 100 * high})
    measured.sort(key=lambda row: -row["value"])
    x: dict[str, Any] = {
        "field": "value",
        "type": "quantitative",
        "title": "Change of images/s [%]",
        "axis": {"grid": True},
    }
    furthest = max([1.0, *(row["high"] for row in measured)])
    nearest = min([0.0, *(row["low"] for row in measured)])
    x["scale"] = {"domain": [nearest, furthest + 0.16 * (furthest - nearest)], "nice": True}
    y = _labels([row["label"] for row in (*measured, *lacking)])
    ends = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
    sure, single = ([row for row in measured if row["sure"] is which] for which in (True, False))
    point = {"type": "point", "color": _MARK, "size": 80, "opacity": 1, "strokeWidth": 1.5}
    return [
        {
            "data": {"values": [{}]},
            "mark": {"type": "rule", "color": _INK},
            "encoding": {"x": {"datum": 0, **_zero(x)}},
        },
        _layer(sure, _rule(_MARK), **ends, y=y),
        _layer(sure, {**point, "filled": True}, x=x, y=y),
        _layer(single, {**point, "filled": False}, x=x, y=y),
        _text(measured, {**x, "field": "high"}, y, _FAINT),
        _text(lacking, x, y, _FAINT),
    ]


def _labels(names: list[str]) -> dict[str, Any]:
    """A row per name, in this order. Room for the labels in the reader's font, which may be wider than ours."""
    axis = {"labelLimit": 220, "domain": False, "ticks": False, "minExtent": min(220, 7.6 * max(map(len, names)))}
    return {"field": "label", "type": "nominal", "sort": names, "title": None, "axis": axis}


def _zero(x: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in x.items() if key != "field"}


def _layer(rows: Rows, mark: dict[str, Any], **encoding: Any) -> dict[str, Any]:
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def _rule(colour: str) -> dict[str, Any]:
    return {"type": "rule", "color": colour, "strokeWidth": 1.8}


def _text(rows: Rows, x: dict[str, Any], y: dict[str, Any], colour: str) -> dict[str, Any]:
    mark = {"type": "text", "align": "left", "dx": 7, "color": colour}
    return _layer(rows, mark, x=x, y=y, text={"field": "words", "type": "nominal"})
