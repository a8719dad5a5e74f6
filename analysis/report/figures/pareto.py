"""Throughput against energy of every cell, and the Pareto frontier: the cells that no other beats in both."""

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.stats.cells import WORK_KEYS

from . import base, svg
from .base import Figure, Limits

_X, _Y = "images_per_s", "joules_per_image"
_LABEL_PX = 16  # between two labels


def draw(cells: pl.DataFrame) -> list[Figure]:
    """Draw a figure per kind of work of several cells, largest first."""
    kinds = cells.drop_nulls([_X, _Y, "batch"]).partition_by(WORK_KEYS, maintain_order=True)
    kinds = sorted((kind for kind in kinds if kind.height > 1), key=lambda kind: -kind.height)
    return [_figure(kind, index) for index, kind in enumerate(kinds)]


def frontier(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the cells with less J/image than every cell that has as many images/s or more; slowest first."""
    # From the fastest down: a cell is on the frontier if no faster one needs as little energy.
    ranked = cells.sort(_X, _Y, descending=[True, False], maintain_order=True)
    least_so_far = pl.col(_Y).cum_min().shift(1)
    return ranked.filter((pl.col(_Y) < least_so_far).fill_null(True)).reverse()


def _figure(cells: pl.DataFrame, index: int) -> Figure:
    best = frontier(cells)
    run_ids = base.run_ids_of(cells)
    limits = [_limits(cells[column].to_list()) for column in (_X, _Y)]
    caption = [
        "Lighter points: another cell is at least as fast by its mean and uses less energy.",
        *(base.zero_note(*limits), base.n_note(run_ids, cells.height)),
    ]
    title = f"Throughput against energy: {cells['model'][0] or 'unknown model'}"
    name = "fig-pareto" + (f"-{index}" if index else "")
    subtitle = "Better is down and to the right; labels: recipe and batch"
    return base.figure(name, title, subtitle, caption, _chart(cells, best, *limits), run_ids)


def _chart(cells: pl.DataFrame, best: pl.DataFrame, limits_x: Limits, limits_y: Limits) -> alt.LayerChart:
    x = alt.X(f"{_X}:Q").title(METRICS[_X].heading).scale(domain=limits_x, nice=False, zero=False).axis(tickCount=6)
    y = alt.Y(f"{_Y}:Q").title(METRICS[_Y].heading).scale(domain=limits_y, nice=False, zero=False)
    colour = base.colour(list(base.gpu_colours(cells["gpu"])), "gpu")
    on_frontier = pl.col("run_ids").list.first().is_in(best["run_ids"].list.first().to_list())
    text = pl.concat_str(pl.col(recipe_labels.COLUMN).str.slice(0, 24), "batch", separator=", ", ignore_nulls=True)
    rows = cells.select(_X, _Y, "gpu", frontier=on_frontier, text=text)
    # A label per row of pixels, from the fastest down: others would overlap.
    row_px = ((pl.col(_Y) - limits_y[0]) / (limits_y[1] - limits_y[0]) * svg.HEIGHT / _LABEL_PX).floor()
    labels = rows.filter("frontier").sort(-pl.col(_X)).unique(row_px, keep="first", maintain_order=True)
    line = alt.Chart(rows.filter("frontier")).mark_line(interpolate="step-before", color=svg.MUTED, strokeWidth=1.2)
    points = alt.Chart(rows.filter(~pl.col("frontier"))).mark_point(filled=True, size=45, opacity=0.4)
    return base.layer(
        line.encode(x, y, order=f"{_X}:Q"),
        points.encode(x, y, colour),
        alt.Chart(rows.filter("frontier")).mark_point(filled=True, size=80, opacity=1).encode(x, y, colour),
        alt.Chart(labels).mark_text(dx=-9, align="right", color=svg.TEXT).encode(x, y, text="text:N"),
    )


def _limits(values: list[float]) -> Limits:
    # At least 6 % of the largest value: noise must not fill the plot.
    margin = max(0.12 * (max(values) - min(values)), 0.06 * max(values))
    return max(0.0, min(values) - margin), max(values) + margin
