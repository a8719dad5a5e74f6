"""How much cards of one kind differ: each run divided by the mean of its cell, by the card that it ran on."""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from analysis.columns import METRICS

from . import base, svg
from .base import Figure

MAX_CARDS = 24  # rows of one figure
_METRICS = ("images_per_s", "power_w")
_MIN_SPAN = 0.02  # of an axis on either side of 1: a narrower one would magnify noise
ABSENT = "Variation between cards: no cell has runs on several cards or nodes."


def draw(cells: pl.DataFrame, runs: pl.DataFrame) -> Figure | str:
    """Draw a row per card; return the reason if no cell has several cards."""
    rows = ratios(cells, runs)
    if rows.is_empty():
        return ABSENT
    # The cards of which the mean of any metric is furthest from 1 come first.
    distance = pl.max_horizontal((pl.col(metric).mean() - 1).abs() for metric in _METRICS).fill_null(0.0)
    distances = rows.group_by("label").agg(distance=distance).sort("distance", "label", descending=[True, False])
    labels = distances["label"].to_list()
    shown = rows.filter(pl.col("label").is_in(labels[:MAX_CARDS]))
    caption = [
        "Each dot is a run divided by the mean of its cell; the tick is the mean of the card.",
        "Only cells with runs on several cards or nodes.",
        f"Of {len(labels)} cards the {MAX_CARDS} furthest from 1." if len(labels) > MAX_CARDS else "",
        base.n_note(shown["run_id"], shown["cell"].n_unique()),
    ]
    subtitle = "Ratio to the mean of the cell; rows: node, first digits of the card's UUID"
    title = "Variation between cards"
    return base.figure("fig-variation", title, subtitle, caption, _chart(shown), shown["run_id"])


def ratios(cells: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return (run_id, cell, label, series, a ratio per metric) of every run in cells with several cards or nodes."""
    each = cells.with_row_index("cell").explode("run_ids").rename({"run_ids": "run_id"})
    of_runs = runs.select("run_id", "node", "gpu_uuid", *_METRICS)
    each = each.join(of_runs, on="run_id", suffix="_run", maintain_order="left")
    # By node as well: where no UUID was recorded, another node is another card.
    several = pl.struct("node", "gpu_uuid").n_unique().over("cell") > 1
    label = pl.struct("node", "gpu_uuid").map_elements(lambda at: _label(at["node"], at["gpu_uuid"]), pl.String)
    quotients = {metric: pl.col(f"{metric}_run") / pl.col(metric) for metric in _METRICS}
    return each.filter(several).select("run_id", "cell", "series", label=label, **quotients)


def _label(node: str | None, gpu_uuid: str | None) -> str:
    """Return the node and the first group of the UUID, which is enough to find it in the table of runs."""
    uuids = [uuid.removeprefix("GPU-").split("-")[0][:8] for uuid in (gpu_uuid or "").split(", ") if uuid]
    card = uuids[0] + (f" and {len(uuids) - 1} more" if len(uuids) > 1 else "") if uuids else "unknown card"
    return f"{node or 'unknown node'}, {card}"


def _ticks(far: float) -> list[float]:
    """Return 1 and a round number on either side: more labels would overlap in the reader's font."""
    power = 10.0 ** math.floor(math.log10(far))
    step = max(digit * power for digit in (1, 2, 5) if digit * power <= far)
    return [round(1 - step, 9), 1.0, round(1 + step, 9)]


def _chart(rows: pl.DataFrame) -> alt.HConcatChart:
    labels = sorted(rows["label"].unique())
    panels: list[alt.LayerChart] = []
    for metric in _METRICS:
        # Symmetric, so that 1 is in the middle of every panel.
        far = max(_MIN_SPAN, *(1.1 * abs(ratio - 1) for ratio in rows[metric].drop_nulls()))
        x = alt.X(f"{metric}:Q").title(f"{METRICS[metric].label}, ratio")
        x = x.scale(domain=[1 - far, 1 + far], nice=False, zero=False).axis(grid=True, values=_ticks(far), format="~g")
        y = base.row_axis(labels, **({"labels": False, "minExtent": 0} if panels else {}))
        known = alt.Chart(rows.drop_nulls(metric))
        mean = alt.Chart(rows.group_by("label", maintain_order=True).agg(pl.col(metric).mean()))
        panel = base.layer(
            alt.Chart(alt.InlineData(values=[{}])).mark_rule(color=svg.MUTED).encode(x=alt.datum(1)),
            known.mark_point(filled=True, size=34, opacity=0.55, color=svg.SERIES[0]).encode(x, y),
            mean.mark_tick(color=svg.TEXT, thickness=2, size=13, opacity=1).encode(x, y),
        )
        panels.append(panel.properties(width=max(110, base.plot_width(labels) / 2 - 15), height=alt.Step(20)))
    return alt.hconcat(*panels, spacing=18)
