"""Speed against energy of every cell, and the frontier: the cells that no other beats in both."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from analysis import published, recipe_labels
from analysis.stats import cells as aggregate
from analysis.units import METRICS, gpu_label, number

from . import base as plate
from . import svg
from .base import Figure, Row, Spec, layer

PICTURES = 3  # of kinds of work; the rest is in the tables
LABELLED = 24  # cells up to which the dominated ones carry their batch, too
NAMED = 6  # cells of a frontier that a caption names
_AXES = ("images_per_s", "joules_per_image")
_NEAR = 0.045  # of the picture's width and height: closer labels would lie on each other
OTHERS = "other recipes"
ABSENT = "Speed against energy: no run has both images/s and J/image."


def draw(cells: pl.DataFrame, *, prefix: str) -> list[Figure] | str:
    """A figure per kind of work, largest first; where nothing has both figures, the sentence that says so."""
    both = cells.filter(pl.col("images_per_s").is_not_null() & pl.col("joules_per_image").is_not_null())
    kinds = both.partition_by(aggregate.WORK_KEYS, maintain_order=True)
    kinds.sort(key=lambda kind: -kind.height)
    drawn = [_figure(kind, index, len(kinds), prefix) for index, kind in enumerate(kinds[:PICTURES])]
    return drawn or ABSENT


def frontier(cells: pl.DataFrame) -> pl.DataFrame:
    """Cells that no other beats or equals in images/s while it needs less J/image; slowest first."""
    kept, least = [], float("inf")
    order = cells.sort("images_per_s", "joules_per_image", descending=[True, False], maintain_order=True)
    for row in order.with_row_index("place").iter_rows(named=True):
        if row["joules_per_image"] < least:
            kept.append(row["place"])
            least = row["joules_per_image"]
    return order[kept].reverse()


def _figure(cells: pl.DataFrame, index: int, kinds: int, prefix: str) -> Figure:
    front = frontier(cells)
    best = {ids[0] for ids in front["run_ids"]}
    key, names = _key(cells, front)
    columns = ("series", "gpu", "recipe", "site", "batch", *_AXES)
    rows = [
        {name: row[name] for name in columns} | {"key": key(row), "frontier": row["run_ids"][0] in best}
        for row in cells.to_dicts()
    ]
    first = cells.row(0, named=True)
    theirs = _published(first)
    if _by_gpu(cells):
        names += [name for name in dict.fromkeys(row["key"] for row in theirs) if name not in names]
    else:  # colours are recipes or sites, and the poster's points belong to none of them
        theirs = [{**row, "key": None} for row in theirs if row["key"] == gpu_label(first["gpu"])]
    title = f"{prefix}Speed against energy"
    if kinds > 1:
        title += f": {first['model'] or 'model unknown'}, {first['resolution_px'] or '?'} px"
    subtitle = "Better is down and to the right. Numbers: batch sizes"
    ids = plate.in_cells(cells)
    words = [
        _frontier_words(front),
        "Frontier by the means; lighter: another cell is at least as fast with less energy.",
    ]
    words += ["Hollow: published."] if theirs else []
    words.append("The axes do not start at zero.")
    if kinds > PICTURES and not index:
        words.append(f"Of {kinds} kinds of work, the {PICTURES} with most cells are drawn.")
    words += [plate.of_runs(ids, cells.height), recipe_labels.legend_text(cells)]
    spec = _spec(rows, theirs, names)
    name = "fig-pareto" + (f"-{index}" if index else "")
    return plate.figure(name, title, subtitle, " ".join(filter(None, words)), spec, ids)


def _by_gpu(cells: pl.DataFrame) -> bool:
    alone = cells["recipe"].n_unique() == 1 and cells["site"].n_unique() == 1
    return cells["gpu"].n_unique() > 1 or alone


def _key(cells: pl.DataFrame, front: pl.DataFrame) -> tuple[Callable[[Row], str], list[str]]:
    """What the colours stand for: GPUs where there are several, else recipes (the frontier's first), else sites."""
    if _by_gpu(cells):
        names = [gpu_label(gpu) for gpu in cells["gpu"].unique(maintain_order=True).to_list()]
        return lambda row: gpu_label(row["gpu"]), names
    if cells["recipe"].n_unique() > 1:
        fastest = pl.concat([front.reverse(), cells.sort("images_per_s", descending=True)])["recipe_short"]
        names = [str(recipe) for recipe in fastest.unique(maintain_order=True)]
        if len(names) > len(svg.SERIES):
            names = [*names[: len(svg.SERIES) - 1], OTHERS]
        return lambda row: str(row["recipe_short"]) if str(row["recipe_short"]) in names else OTHERS, names
    return lambda row: str(row["site"]), [str(site) for site in cells["site"].unique(maintain_order=True)]


def _published(cell: Row) -> list[Row]:
    """The poster's points, of every GPU for which it gives speed and power."""
    if cell["workload"] != published.WORKLOAD:
        return []
    shown = published.shown()
    speed, per_watt = (
        shown.filter(pl.col("metric") == metric).select("gpu", "batch", pl.col("value").alias(metric))
        for metric in ("images_per_s", "images_per_s_per_w")
    )
    both = speed.join(per_watt, on=["gpu", "batch"], maintain_order="left")
    return [
        {
            "key": gpu_label(row["gpu"]),
            "batch": row["batch"],
            "images_per_s": row["images_per_s"],
            "joules_per_image": 1 / row["images_per_s_per_w"],
        }
        for row in both.to_dicts()
    ]


def _frontier_words(front: pl.DataFrame) -> str:
    rows = front.reverse().to_dicts()
    said = [
        f"{plate.short(row['series'])} at batch {row['batch']} ({number(row['images_per_s'])} images/s, "
        f"{number(row['joules_per_image'])} J/image)"
        for row in rows[:NAMED]
    ]
    rest = len(rows) - len(said)
    return "On the frontier: " + ", ".join(said) + (f" and {rest} more." if rest else ".")


def _spec(rows: list[Row], theirs: list[Row], names: list[str]) -> Spec:
    frames = {column: _frame([row[column] for row in (*rows, *theirs)]) for column in _AXES}
    x, y = (
        {"field": column, "type": "quantitative", "title": METRICS[column].heading}
        | {"scale": {"domain": list(inside), "nice": False, "zero": False}}
        for column, inside in frames.items()
    )
    colour = plate.colour(names, "key")
    if OTHERS in names:
        colour["scale"]["range"] = [*colour["scale"]["range"][: len(names) - 1], svg.MUTED]
    base = {"x": x, "y": y, "color": colour}
    best, rest = ([row for row in rows if row["frontier"] is which] for which in (True, False))
    ends = [  # nothing known is better than the frontier's ends: it goes on level to the left and up to the top
        {"images_per_s": frames["images_per_s"][0], "joules_per_image": best[0]["joules_per_image"]},
        *({column: row[column] for column in _AXES} for row in best),
        {"images_per_s": best[-1]["images_per_s"], "joules_per_image": frames["joules_per_image"][1]},
    ]
    ends.sort(key=lambda row: (row["images_per_s"], row["joules_per_image"]))
    edge = {"type": "line", "interpolate": "step-before", "color": svg.MUTED, "strokeWidth": 1.2, "clip": True}
    order = {"field": "images_per_s", "type": "quantitative"}
    layers = [layer(ends, edge, x=x, y=y, order=order)]
    if theirs:
        hollow = {"type": "point", "filled": False, "size": 45, "strokeWidth": 1.2, "opacity": 0.9}
        inked = base if theirs[0]["key"] else {"x": x, "y": y}
        layers.append(layer(theirs, {**hollow, "color": svg.TEXT}, **inked))
    layers += [
        layer(rest, {"type": "point", "filled": True, "size": 45, "opacity": 0.4}, **base),
        layer(best, {"type": "point", "filled": True, "size": 80, "opacity": 1}, **base),
    ]
    every = [*best, *(rest if len(rows) <= LABELLED else []), *theirs]
    taken: list[tuple[float, float]] = []
    for group, look in ((best, {"color": svg.TEXT, "fontWeight": 600}), (every[len(best) :], {"color": svg.MUTED})):
        free = [row for row in group if _free(row, taken, frames)]
        text = {"type": "text", "dx": 7, "dy": 9, "align": "left", **look}
        layers.append(layer(free, text, x=x, y=y, text={"field": "batch", "type": "quantitative"}))
    return {"layer": layers}


def _frame(values: list[float]) -> tuple[float, float]:
    edge = max(0.12 * (max(values) - min(values)), 0.06 * max(values))  # noise must not fill the picture
    return max(0.0, min(values) - edge), max(values) + edge


def _free(row: Row, taken: list[tuple[float, float]], frames: dict[str, tuple[float, float]]) -> bool:
    """Takes the place of the row's label, unless another label is there already."""
    x, y = ((row[column] - low) / (high - low) for column, (low, high) in frames.items())
    if any(abs(x - a) < _NEAR and abs(y - b) < 1.5 * _NEAR for a, b in taken):
        return False
    taken.append((x, y))
    return True
