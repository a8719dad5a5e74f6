"""Figures of a study: a ladder as bars, gains of single levers as dots with intervals."""

from __future__ import annotations

from typing import Any

from analysis.report.study_tables import against
from analysis.stats.study import LADDER, LEAVE_ONE_OUT, Comparison, Step

from . import base, by_batch, svg
from .base import Figure, layer

ROW = 30
_INK, _FAINT, _MARK = svg.TEXT, svg.MUTED, svg.SERIES[0]
Rows = list[dict[str, Any]]
Layers = Rows


def draw(comparisons: list[Comparison], *, demonstration: bool) -> list[Figure]:
    """One figure for each study on each GPU and batch that has any run that counts."""
    prefix = "Demonstration: " if demonstration else ""
    return [_figure(one, prefix) for one in comparisons if one.has_runs]


def _figure(one: Comparison, prefix: str) -> Figure:
    if one.kind == LADDER:
        title, subtitle, rows = "Ladder", "Images/s, mean; n beside each bar", _bars(one)
        inside = base.frame([row["value"] for row in rows], base.ends_of(rows), zero=True)
        layers = _ladder(one, rows, inside)
        caption = f"Each step keeps all levers before it. {by_batch.interval_words(rows, inside)}"
    else:
        without = one.kind == LEAVE_ONE_OUT
        title, rows = ("All levers but one" if without else "One lever at a time"), _gains(one)
        inside = base.frame([0.0, *(row["value"] for row in rows)], base.ends_of(rows), zero=False)
        layers = _dots(one, rows, inside)
        subtitle = f"Change of images/s against {'all levers' if without else 'the base'}; bar: 95 % interval"
        caption = "An interval that touches the line at 0 is no difference seen; hollow: too few runs for an interval."
        caption += f" {by_batch.ARROW.capitalize()}." if base.leaves(rows, inside) else ""
    run_ids = [row["run_id"] for step in one.steps for row in step.runs]
    caption = f"{caption} {one.workload_label}. {base.of_runs(run_ids, sum(bool(step.runs) for step in one.steps))}"
    width = max(220, base.WIDTH + 40 - base.label_px([step.label for step in one.steps]))
    spec: dict[str, Any] = {"layer": layers, "width": width, "height": {"step": ROW}}
    return base.figure(f"fig-{one.name}", f"{prefix}{title}: {one.setting}", subtitle, caption, spec, run_ids)


def _bars(one: Comparison) -> Rows:
    rows: Rows = []
    for step in one.steps:
        stats = step.summarise("images_per_s")
        if stats["images_per_s"] is not None:
            names = {"low": "low", "high": "high", "least": "min", "most": "max"}
            ends = {end: stats[f"images_per_s_{column}"] for end, column in names.items()} | {"n": len(step.runs)}
            words = f"n = {stats['images_per_s_n']}"
            rows.append({"label": step.label, "value": stats["images_per_s"], **ends, "words": words})
    return rows


def _ladder(one: Comparison, measured: Rows, inside: tuple[float, float]) -> Layers:
    lacking = _lacking(one.steps, measured)
    x: dict[str, Any] = {"field": "value", "type": "quantitative", "title": "Images/s"}
    x["axis"] = {"tickCount": 4}  # more would touch in the reader's font
    x["scale"] = {"domain": [0, 1.12 * inside[1]], "nice": True}
    y = base.row_axis([step.label for step in one.steps])
    ends = [{**row, "end": min(inside[1], max([row["value"], *base.ends_of([row])]))} for row in measured]
    return [
        layer(measured, {"type": "bar", "color": _MARK, "opacity": 0.9, "cornerRadiusEnd": 2}, x=x, y=y),
        *base.whiskers(measured, inside, {"color": _INK}, {"x": x, "y": y}, "x"),
        _text(ends, {**x, "field": "end"}, y, _FAINT),
        _text(lacking, x, y, _FAINT),
    ]


def _gains(one: Comparison) -> Rows:
    """Gain of each step in percent with its interval, largest first."""
    rows: Rows = []
    for index, step in enumerate(one.steps[1:], start=1):
        gain = against(one, index, 0)
        if gain is not None:
            low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
            row = {"label": step.label, "value": 100 * gain.value, "words": f"n = {gain.n}"}
            rows.append({**row, "low": low, "high": high})
    return sorted(rows, key=lambda row: -row["value"])


def _dots(one: Comparison, measured: Rows, inside: tuple[float, float]) -> Layers:
    """Sorted by gain; what has none stands below, with why."""
    lacking = _lacking(one.steps[1:], measured)
    x: dict[str, Any] = {"field": "value", "type": "quantitative", "title": "Change of images/s [%]"}
    x["axis"] = {"grid": True, "tickCount": 5}
    x["scale"] = {"domain": [inside[0], inside[1] + 0.16 * (inside[1] - inside[0])], "nice": True}
    y = base.row_axis([row["label"] for row in (*measured, *lacking)])
    sure, single = ([row for row in measured if (row["low"] is not None) is which] for which in (True, False))
    point = {"type": "point", "color": _MARK, "size": 80, "opacity": 1, "strokeWidth": 1.5}
    ends = [{**row, "end": row["value"] if row["high"] is None else min(inside[1], row["high"])} for row in measured]
    return [
        layer([{}], {"type": "rule", "color": _INK}, x=base.constant(0, x)),
        *base.whiskers(sure, inside, {"color": _MARK}, {"x": x, "y": y}, "x"),
        layer(sure, {**point, "filled": True}, x=x, y=y),
        layer(single, {**point, "filled": False}, x=x, y=y),
        _text(ends, {**x, "field": "end"}, y, _FAINT),
        _text(lacking, x, y, _FAINT),
    ]


def _lacking(steps: list[Step], measured: Rows) -> Rows:
    """Steps without a figure, with why."""
    known = {row["label"] for row in measured}
    return [{"label": step.label, "value": 0, "words": step.status} for step in steps if step.label not in known]


def _text(rows: Rows, x: dict[str, Any], y: dict[str, Any], colour: str) -> dict[str, Any]:
    mark = {"type": "text", "align": "left", "dx": 7, "color": colour}
    return layer(rows, mark, x=x, y=y, text={"field": "words", "type": "nominal"})
