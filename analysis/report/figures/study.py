"""Figures of a study: a ladder as bars, the gains of single levers as dots with intervals."""

from __future__ import annotations

import altair as alt
import polars as pl

from analysis.stats.study import LADDER, LEAVE_ONE_OUT, TITLES, Comparison, Step, gain_over

from . import base, by_batch, svg
from .base import Figure, Limits

_SCHEMA = {"label": pl.String, "text": pl.String, "n": pl.Int64}
_SCHEMA |= dict.fromkeys(("value", "low", "high", "least", "most"), pl.Float64)


def draw(studies: list[Comparison]) -> list[Figure]:
    """Draw a figure for each study on each GPU and batch that has a valid run."""
    return [_figure(study) for study in studies if any(step.runs for step in study.steps)]


def _figure(study: Comparison) -> Figure:
    is_ladder = study.kind == LADDER
    rows = _speeds(study) if is_ladder else _gains(study)
    # Gains are read against 0, which must be on the axis.
    means = rows["value"].to_list() if is_ladder else [0.0, *rows["value"]]
    limits = base.axis_limits(means, base.interval_ends(rows), zero=is_ladder)
    if is_ladder:
        subtitle = "Images/s, mean; n beside each bar"
        notes = ["Each step keeps all levers of the steps before it.", by_batch.interval_note(rows, limits)]
    else:
        reference = "all levers" if study.kind == LEAVE_ONE_OUT else "the base recipe"
        subtitle = f"Change of images/s relative to {reference}; bar: 95 % confidence interval"
        notes = ["Not significant if the interval contains 0. Hollow: too few runs for an interval."]
        notes += [base.CUT_NOTE] if base.is_cut(rows, limits) else []
    run_ids = [row["run_id"] for step in study.steps for row in step.runs]
    notes += [f"Workload: {study.workload_label}.", base.n_note(run_ids, sum(bool(step.runs) for step in study.steps))]
    chart = _chart(study, rows, limits).properties(height=alt.Step(30))
    return base.figure(f"fig-{study.name}", f"{TITLES[study.kind]}: {study.setting}", subtitle, notes, chart, run_ids)


def _speeds(study: Comparison) -> pl.DataFrame:
    metric, rows = "images_per_s", []
    for step in study.steps:
        stats = step.summarise(metric)
        row = {"label": step.label, "text": f"n = {stats[f'{metric}_n']}", "n": len(step.runs), "value": stats[metric]}
        rows.append(row | {end: stats[f"{metric}_{column}"] for end, column in base.ENDS.items()})
    return pl.DataFrame(rows, schema=_SCHEMA).drop_nulls("value")


def _gains(study: Comparison) -> pl.DataFrame:
    """Return the gain of each step over the base in percent with its interval, largest first."""
    rows = []
    for index, step in enumerate(study.steps[1:], start=1):
        if gain := gain_over(study, index, 0):
            low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
            text = f"n = {gain.n}"
            rows.append({"label": step.label, "text": text, "value": 100 * gain.value, "low": low, "high": high})
    return pl.DataFrame(rows, schema=_SCHEMA).sort("value", descending=True, maintain_order=True)


def _chart(study: Comparison, rows: pl.DataFrame, limits: Limits) -> alt.LayerChart:
    """Return the steps of a ladder in order, or gains sorted with the unmeasured steps last."""
    labels = [step.label for step in study.steps]
    if study.kind == LADDER:
        unmeasured = _unmeasured(study.steps, rows)
        # More ticks would touch in the reader's font.
        x = alt.X("value:Q").title("Images/s").axis(tickCount=4).scale(domain=[0, 1.12 * limits[1]], nice=True)
        y = base.row_axis(labels)
        bars = alt.Chart(rows).mark_bar(color=svg.SERIES[0], opacity=0.9, cornerRadiusEnd=2).encode(x, y)
        marks = [bars, *base.whiskers(rows, y, axis="x", color=svg.TEXT)]
    else:
        unmeasured = _unmeasured(study.steps[1:], rows)
        domain = [limits[0], limits[1] + 0.16 * (limits[1] - limits[0])]
        x = alt.X("value:Q").title("Change of images/s [%]").axis(grid=True, tickCount=5)
        x = x.scale(domain=domain, nice=True)
        y = base.row_axis([*rows["label"], *unmeasured["label"]])
        zero = alt.Chart(alt.InlineData(values=[{}])).mark_rule(color=svg.TEXT).encode(x=alt.datum(0))
        marks = [zero, *base.whiskers(rows, y, axis="x", color=svg.SERIES[0])]
        point = {"color": svg.SERIES[0], "size": 80, "opacity": 1, "strokeWidth": 1.5}
        for filled in (True, False):
            dots = rows.filter(pl.col("low").is_not_null() == filled)
            marks.append(alt.Chart(dots).mark_point(filled=filled, **point).encode(x, y))
    text = alt.Chart().mark_text(align="left", dx=7, color=svg.MUTED).encode(alt.X("end:Q"), y, text="text:N")
    # The text begins behind the whisker, or where the axis cuts it off.
    end = pl.max_horizontal("value", pl.coalesce("high", "most")).clip(upper_bound=limits[1])
    chart = base.layer(*marks, text.properties(data=rows.with_columns(end=end)), text.properties(data=unmeasured))
    return chart.properties(width=base.plot_width(labels))


def _unmeasured(steps: list[Step], rows: pl.DataFrame) -> pl.DataFrame:
    known = set(rows["label"])
    reasons = [(step.label, step.status, 0.0) for step in steps if step.label not in known]
    return pl.DataFrame(reasons, schema={"label": pl.String, "text": pl.String, "end": pl.Float64}, orient="row")
