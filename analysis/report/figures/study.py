"""Figures of a study: a ladder as bars, the gains of single levers as dots with intervals."""

from __future__ import annotations

import altair as alt
import polars as pl

from analysis.stats.intervals import Gain
from analysis.stats.study import LADDER, LEAVE_ONE_OUT, TITLES, Comparison, gain_over
from analysis.units import number

from . import base, by_batch, svg
from .base import Figure, Limits

_SCHEMA = {"label": pl.String, "text": pl.String, "n": pl.Int64}
_SCHEMA |= dict.fromkeys(("value", "low", "high", "least", "most"), pl.Float64)


def draw(study: Comparison) -> Figure | None:
    """Draw a study on one GPU and batch; None if no step has a valid run."""
    rows = _speeds(study) if study.kind == LADDER else _gains(study)
    if rows.is_empty():
        return None
    if study.kind == LADDER:
        limits = base.axis_limits(rows["value"], base.interval_ends(rows), zero=True)
        subtitle = "Images/s, and the gain over the previous step"
        notes = ["Each step keeps all levers of the steps before it.", by_batch.interval_note(rows, limits)]
    else:
        # Gains are read against 0, which must be on the axis.
        limits = base.axis_limits([0.0, *rows["value"]], base.interval_ends(rows), zero=False)
        reference = "all levers" if study.kind == LEAVE_ONE_OUT else "the base recipe"
        subtitle = f"Change of images/s relative to {reference}; bar: 95 % confidence interval"
        notes = ["Not significant if the interval contains 0. Hollow: too few runs for an interval."]
        notes += [base.CUT_NOTE] if base.is_cut(rows, limits) else []
    run_ids = [row["run_id"] for step in study.steps for row in step.runs]
    notes += [f"Workload: {study.workload_label}.", base.n_note(run_ids, sum(bool(step.runs) for step in study.steps))]
    title = f"{TITLES[study.kind]}: {study.setting}"
    return base.figure(f"fig-{study.name}", title, subtitle, notes, _chart(study, rows, limits), run_ids)


def _change(gain: Gain | None) -> str:
    return "" if gain is None else f"{100 * gain.value:+.1f} %"


def _speeds(study: Comparison) -> pl.DataFrame:
    metric, rows = "images_per_s", []
    for index, step in enumerate(study.steps):
        stats = step.summarise(metric)
        parts = number(stats[metric]), _change(gain_over(study, index, study.previous(index)))
        row = {"label": step.label, "text": ", ".join(filter(None, parts)), "n": len(step.runs), "value": stats[metric]}
        rows.append(row | {end: stats[f"{metric}_{column}"] for end, column in base.ENDS.items()})
    return pl.DataFrame(rows, schema=_SCHEMA).drop_nulls("value")


def _gains(study: Comparison) -> pl.DataFrame:
    """Return the gain of each step over the base in percent with its interval, largest first."""
    rows = []
    for index, step in enumerate(study.steps[1:], start=1):
        if gain := gain_over(study, index, 0):
            low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
            row = {"label": step.label, "text": _change(gain), "n": gain.n}
            rows.append(row | {"value": 100 * gain.value, "low": low, "high": high})
    return pl.DataFrame(rows, schema=_SCHEMA).sort("value", descending=True, maintain_order=True)


def _chart(study: Comparison, rows: pl.DataFrame, limits: Limits) -> alt.LayerChart:
    """Return the steps of a ladder in order, or gains sorted; steps that were not measured last."""
    is_ladder = study.kind == LADDER
    steps = study.steps if is_ladder else study.steps[1:]
    lacking = {step.label: step.status for step in steps if step.label not in set(rows["label"])}
    labels = [step.label for step in steps] if is_ladder else [*rows["label"], *lacking]
    y, texts = base.labelled_rows(labels)
    shift = base.BELOW
    room = 0.3 * (limits[1] - limits[0])  # for the text behind the largest value
    x = alt.X("value:Q").title("Images/s" if is_ladder else "Change of images/s [%]")
    x = x.axis(tickCount=4, grid=not is_ladder).scale(domain=[limits[0], limits[1] + room], nice=False)
    if is_ladder:
        bars = alt.Chart(rows).mark_bar(color=svg.SERIES[0], size=base.BAR_PX, **shift).encode(x, y)
        marks = [bars, *base.whiskers(rows, y, axis="x", color=svg.TEXT, **shift)]
    else:
        zero = alt.Chart(alt.InlineData(values=[{}])).mark_rule(color=svg.TEXT).encode(x=alt.datum(0))
        marks = [zero, *base.whiskers(rows, y, axis="x", color=svg.SERIES[0], **shift)]
        point = {"color": svg.SERIES[0], "size": 80, "opacity": 1, "strokeWidth": 1.5, **shift}
        for filled in (True, False):
            dots = rows.filter(pl.col("low").is_not_null() == filled)
            marks.append(alt.Chart(dots).mark_point(filled=filled, **point).encode(x, y))
    # The text begins behind the whisker, or where the axis cuts it off.
    end = pl.max_horizontal("value", pl.coalesce("high", "most")).clip(upper_bound=limits[1])
    reasons = [{"label": label, "text": text, "end": max(0.0, limits[0])} for label, text in lacking.items()]
    for data in (rows.with_columns(end=end), pl.DataFrame(reasons)):
        text = alt.Chart(data).mark_text(align="left", dx=7, color=svg.TEXT, **shift)
        marks += [text.encode(alt.X("end:Q"), y, text="text:N")] if data.height else []
    return base.layer(*marks, texts).properties(width=svg.WIDTH, height=alt.Step(base.ROW_PX))
