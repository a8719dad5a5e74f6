"""Throughput against energy of every cell, and the Pareto frontier: the cells that no other beats in both."""

from __future__ import annotations

import altair as alt
import polars as pl

from analysis import published, recipe_labels
from analysis.columns import METRICS
from analysis.stats.cells import WORK_KEYS
from analysis.units import gpu_label, number

from . import base, svg
from .base import Figure, Limits, Row

MAX_LABELS = 24  # cells up to which those off the frontier have their batch size as label, too
MAX_NAMED = 6  # cells of the frontier that the caption names
_X, _Y = "images_per_s", "joules_per_image"
_MIN_DISTANCE = 0.045  # between labels, as a share of the plot's width; closer ones would overlap
OTHERS = "other recipes"
ABSENT = "Throughput against energy: no run has both images/s and J/image."


def draw(cells: pl.DataFrame) -> list[Figure] | str:
    """Draw a figure per kind of work, largest first; return the reason if no cell has both metrics."""
    kinds = cells.drop_nulls([_X, _Y, "batch"]).partition_by(WORK_KEYS, maintain_order=True)
    kinds.sort(key=lambda kind: -kind.height)
    return [_figure(kind, index, len(kinds)) for index, kind in enumerate(kinds)] or ABSENT


def frontier(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the cells with less J/image than every cell that has as many images/s or more; slowest first."""
    # From the fastest down: a cell is on the frontier if no faster one needs as little energy.
    ranked = cells.sort(_X, _Y, descending=[True, False], maintain_order=True)
    least_so_far = pl.col(_Y).cum_min().shift(1)
    return ranked.filter((pl.col(_Y) < least_so_far).fill_null(True)).reverse()


def _figure(cells: pl.DataFrame, index: int, kinds: int) -> Figure:
    best = frontier(cells)
    field, names = _colour_key(cells, best)
    key = pl.col(field).cast(pl.String)
    if field == "gpu":
        key = key.map_elements(gpu_label, pl.String)
    columns = ["series", "gpu", "recipe", "site", "batch", _X, _Y]
    on_frontier = pl.col("run_ids").list.first().is_in(best["run_ids"].list.first().to_list())
    rows = cells.select(
        *columns, key=pl.when(key.is_in(names)).then(key).otherwise(pl.lit(OTHERS)), frontier=on_frontier
    )
    first = cells.row(0, named=True)
    poster = _published(cells)
    if field == "gpu":
        names += [name for name in poster["key"].unique(maintain_order=True) if name not in names]
    else:  # the colours are recipes, to which the poster's points do not belong
        poster = poster.filter(pl.col("key") == gpu_label(first["gpu"])).with_columns(key=pl.lit(None, pl.String))
    title = "Throughput against energy"
    if kinds > 1:
        px = first["resolution_px"]
        title += f": {first['model'] or 'unknown model'}" + (f", {px} px" if px else "")
    run_ids = base.run_ids_of(cells)
    caption = [
        _frontier_note(best),
        "The frontier compares means. Lighter points: another cell is at least as fast and uses less energy.",
        "Hollow: published." if poster.height else "",
        "The axes do not start at zero.",
        base.n_note(run_ids, cells.height),
        recipe_labels.legend_text(cells),
    ]
    subtitle = "Better is down and to the right; labels are batch sizes"
    name = "fig-pareto" + (f"-{index}" if index else "")
    return base.figure(name, title, subtitle, caption, _chart(rows, poster, names), run_ids)


def _colour_key(cells: pl.DataFrame, best: pl.DataFrame) -> tuple[str, list[str]]:
    """Return the column that sets the colour, and its values: recipes if there are several on one GPU, else GPUs."""
    if cells["gpu"].n_unique() > 1 or cells["recipe"].n_unique() == 1:
        return "gpu", [gpu_label(gpu) for gpu in cells["gpu"].unique(maintain_order=True)]
    fastest_first = pl.concat([best.reverse(), cells.sort(_X, descending=True)])[recipe_labels.COLUMN]
    names = [str(recipe) for recipe in fastest_first.unique(maintain_order=True)]
    return recipe_labels.COLUMN, names if len(names) <= len(svg.SERIES) else [*names[: len(svg.SERIES) - 1], OTHERS]


def _published(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the poster's points (key, batch, images/s, J/image), of every GPU with both; none for other work."""
    values = published.shown().filter(pl.col("metric").is_in([_X, _Y]))
    points = values.pivot("metric", index=["gpu", "batch"], values="value").drop_nulls()
    points = points.filter(pl.lit(cells.select(published.is_comparable().any()).item()))
    return points.select("batch", _X, _Y, key=pl.col("gpu").map_elements(gpu_label, pl.String))


def _frontier_note(best: pl.DataFrame) -> str:
    named = [
        f"{base.shorten(row['series'])} at batch {row['batch']} ({number(row[_X])} images/s, {number(row[_Y])} J/image)"
        for row in best.reverse().head(MAX_NAMED).to_dicts()
    ]
    rest = best.height - len(named)
    return f"On the frontier: {', '.join(named)}" + (f" and {rest} more." if rest else ".")


def _chart(rows: pl.DataFrame, poster: pl.DataFrame, names: list[str]) -> alt.LayerChart:
    limits_x, limits_y = (_limits([*rows[column], *poster[column]]) for column in (_X, _Y))
    x = alt.X(f"{_X}:Q").title(METRICS[_X].heading).scale(domain=limits_x, nice=False, zero=False).axis(tickCount=6)
    y = alt.Y(f"{_Y}:Q").title(METRICS[_Y].heading).scale(domain=limits_y, nice=False, zero=False)
    colour = base.colour(names, "key")
    if OTHERS in names:
        palette = [code for code in svg.SERIES if code != svg.SERIES_GREY]
        colour = colour.scale(domain=names, range=[*palette, svg.MUTED])
    best, others = rows.filter("frontier"), rows.filter(~pl.col("frontier"))
    # Nothing known is better than the ends of the frontier: it continues level to the left and up to the top.
    corners = best.select(_X, _Y).sort(_X)
    left = {_X: limits_x[0], _Y: corners[0, _Y]}
    top = {_X: corners[-1, _X], _Y: limits_y[1]}
    edge = pl.concat([pl.DataFrame([left]), corners, pl.DataFrame([top])])
    step = alt.Chart(edge).mark_line(interpolate="step-before", color=svg.MUTED, strokeWidth=1.2, clip=True)
    hollow = alt.Chart(poster).mark_point(filled=False, size=45, strokeWidth=1.2, opacity=0.9, color=svg.TEXT)
    coloured = poster["key"].null_count() == 0
    layers = [
        step.encode(x, y, order=f"{_X}:Q"),
        hollow.encode(x, y, colour) if coloured else hollow.encode(x, y),
        alt.Chart(others).mark_point(filled=True, size=45, opacity=0.4).encode(x, y, colour),
        alt.Chart(best).mark_point(filled=True, size=80, opacity=1).encode(x, y, colour),
    ]
    labelled = [*(others.to_dicts() if rows.height <= MAX_LABELS else []), *poster.to_dicts()]
    placed: list[tuple[float, float]] = []
    # The frontier's labels take their places first; others that would overlap them are left out.
    for points, style in ((best.to_dicts(), {"color": svg.TEXT, "fontWeight": 600}), (labelled, {"color": svg.MUTED})):
        free = [point for point in points if _reserve(point, placed, limits_x, limits_y)]
        text = alt.Chart(alt.InlineData(values=free)).mark_text(dx=7, dy=9, align="left", **style)
        layers.append(text.encode(x, y, text="batch:Q"))
    return base.layer(*layers)


def _limits(values: list[float]) -> Limits:
    # At least 6 % of the largest value: noise must not fill the plot.
    margin = max(0.12 * (max(values) - min(values)), 0.06 * max(values))
    return max(0.0, min(values) - margin), max(values) + margin


def _reserve(point: Row, placed: list[tuple[float, float]], limits_x: Limits, limits_y: Limits) -> bool:
    """Reserve the place of a point's label; return False if it would overlap another."""
    x = (point[_X] - limits_x[0]) / (limits_x[1] - limits_x[0])
    y = (point[_Y] - limits_y[0]) / (limits_y[1] - limits_y[0])
    if any(abs(x - a) < _MIN_DISTANCE and abs(y - b) < 1.5 * _MIN_DISTANCE for a, b in placed):
        return False
    placed.append((x, y))
    return True
