"""The energy counter against the integral of the sampled power, run by run, with the limit of the audit."""

from __future__ import annotations

import altair as alt
import polars as pl

from analysis.metrics.energy import MAX_COUNTER_DEVIATION
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure

ABSENT = "Energy audit: no run has both an energy counter and sampled instant power."
_LIMIT = f"{100 * MAX_COUNTER_DEVIATION:.0f} %"


def draw(runs: pl.DataFrame) -> Figure | str:
    """Draw a point per run that has both; return the reason if none has."""
    rows = runs.drop_nulls(["energy_ratio", "power_w"]).select(
        "run_id",
        "valid",
        gpu=pl.col("gpu").map_elements(gpu_label, pl.String),
        power_w=pl.col("power_w") / pl.when(pl.col("gpus") > 0).then("gpus").otherwise(1),
        ratio="energy_ratio",
    )
    if rows.is_empty():
        return ABSENT
    beyond = rows.filter((pl.col("ratio") - 1).abs() > MAX_COUNTER_DEVIATION).height
    incomplete = runs["energy_j"].count() - rows.height
    caption = [
        f"A point per run. Shaded: the two differ by {_LIMIT} or less; beyond that the audit warns.",
        f"{pluralize(beyond, 'run')} beyond the limit." if beyond else "No run is beyond the limit.",
        f"{pluralize(incomplete, 'run')} with only one of the two not drawn." if incomplete > 0 else "",
        "" if rows["valid"].all() else "Hollow: invalid run.",
        f"n = {pluralize(rows.height, 'run')}.",
    ]
    subtitle = "Counter divided by integral of sampled power, over mean power per GPU"
    return base.figure("fig-energy-audit", "Energy audit", subtitle, caption, _chart(rows), rows["run_id"])


def _chart(rows: pl.DataFrame) -> alt.LayerChart:
    # The shaded band is in full view even where all points lie on 1.
    far = max(1.6 * MAX_COUNTER_DEVIATION, *(1.1 * abs(ratio - 1) for ratio in rows["ratio"]))
    least, most = min(rows["power_w"]), max(rows["power_w"])
    margin = max(0.08 * (most - least), 0.02 * most)
    domain = [max(0, least - margin), most + margin]
    x = alt.X("power_w:Q").title("Mean power per GPU [W]").axis(tickCount=6)
    x = x.scale(domain=domain, nice=False, zero=False)
    y = alt.Y("ratio:Q").title("Counter / integral").scale(domain=[1 - far, 1 + far], nice=False, zero=False)
    colour = base.colour(sorted(rows["gpu"].unique(), key=gpu_order), "gpu")
    low, high = alt.datum(1 - MAX_COUNTER_DEVIATION), alt.datum(1 + MAX_COUNTER_DEVIATION)
    line = alt.Chart(alt.InlineData(values=[{}])).mark_rule(color=svg.MUTED)
    limits = line.mark_rule(color=svg.MUTED, strokeDash=[4, 3])
    label = line.mark_text(align="right", dx=-3, dy=-6, x="width", color=svg.MUTED)
    filled = alt.Chart(rows.filter("valid")).mark_point(filled=True, size=45, opacity=0.65)
    hollow = alt.Chart(rows.filter(~pl.col("valid"))).mark_point(filled=False, size=55, strokeWidth=1.5, opacity=1)
    return base.layer(
        line.mark_rect(color=svg.MUTED, opacity=0.1).encode(y=low, y2=high),
        line.encode(y=alt.datum(1)),
        limits.encode(y=low),
        limits.encode(y=high),
        label.encode(y=high, text=alt.value(f"limit: {_LIMIT}")),
        filled.encode(x, y, colour),
        hollow.encode(x, y, colour),
    )
