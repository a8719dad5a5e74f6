"""How well a run still trains: validation loss by step, and metrics with what is unavailable."""

from __future__ import annotations

import json
from typing import Any

import polars as pl

from analysis.report.tables import Builder, Table
from analysis.stats import cells as aggregate
from analysis.stats.study import comparable_groups, comparisons, is_study_run, requested_batch
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize

from . import base as plate
from . import svg
from .base import Figure, legend_columns

_LINES = 7  # recipes of one figure beside the first: the palette has eight colours


def table(build: Builder) -> Table | None:
    """Validation loss and metrics per cell, over the runs that count; None where no run has any."""
    known = build.runs.filter(
        pl.col("valid") & (pl.col("validation").is_not_null() | pl.col("quality_metrics").is_not_null())
    )
    if known.is_empty():
        return None
    # Losses on other images, or after another number of steps, are other figures.
    cells = known.partition_by([*aggregate.CELL_KEYS, "data_identity", "validation_last_step"], maintain_order=True)
    cells.sort(key=lambda cell: (str(cell["gpu"][0]), cell["batch"][0], str(cell["site"][0])))
    several = known["data_identity"].n_unique() > 1
    found = [json.loads(text or "{}") for text in known["quality_metrics"]]
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = []
    for cell in cells:
        first = cell.row(0, named=True)
        given = [json.loads(text or "{}") for text in cell["quality_metrics"]]
        keys = [gpu_label(first["gpu"]), str(first["batch"]), first["recipe"], first["site"]]
        keys += [(first["data_identity"] or "unknown")[:8]] if several else []
        keys += [str(cell.height)]
        losses = [_loss(cell, which) for which in ("first", "last")]
        rows.append([*keys, *losses, *(_metric([one.get(name) for one in given]) for name in names)])
    columns = ["GPU", "Batch", "Recipe", "Site", *(["Data set"] if several else []), "n"]
    columns += ["Validation loss, first", "last", *names]
    note = (
        "Mean (min\u2013max) over n runs; [images] behind a metric are those it rests on, per run. Validation uses "
        "fixed images, noise and timesteps, so its losses may be compared between recipes"
        + (" on one data set, which its digest names." if several else ".")
    )
    return build.table("training-quality", "Training quality", columns, rows, note=note)


def _loss(cell: pl.DataFrame, which: str) -> str:
    values = cell[f"validation_{which}_loss"].drop_nulls().to_list()
    steps = cell[f"validation_{which}_step"].drop_nulls().unique().sort().to_list()
    return _range(values) + (f" at step {', '.join(map(str, steps))}" if steps else "")


def _metric(given: list[dict[str, Any] | None]) -> str:
    """The figure, or why there is none: never an empty cell where somebody asked for one."""
    values = [one["value"] for one in given if one and one.get("value") is not None]
    reasons = dict.fromkeys(str(one["unavailable"]) for one in given if one and one.get("unavailable"))
    counts = sorted({one["n"] for one in given if one and one.get("value") is not None and one.get("n")})
    words = [_range(values) + (f" [{', '.join(map(str, counts))}]" if counts else "")] if values else []
    words += [f"unavailable: {why}" for why in reasons]
    return "; ".join(words) or "\u2013"


def _range(values: list[float]) -> str:
    if not values:
        return "\u2013"
    mean = number(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({number(min(values))}\u2013{number(max(values))})"


def draw(runs: pl.DataFrame, *, demonstration: bool) -> list[Figure]:
    """Validation loss by step, a line per run: of every study, and of what was sent outside studies."""
    known = pl.col("valid") & pl.col("validation").is_not_null()
    sets = [(one.setting, [(step.label, step.runs) for step in one.steps]) for one in comparisons(runs)]
    for group in comparable_groups(runs.filter(known & ~is_study_run()).with_columns(requested_batch())):
        head = group.row(0, named=True)
        where = f"{gpu_label(head['gpu'])}, batch {head['requested_batch']}, {head['site']}"
        parts = group.partition_by("recipe", as_dict=True, maintain_order=True)
        sets.append((where, [(str(recipe), part.to_dicts()) for (recipe,), part in parts.items()]))
    figures: list[Figure] = []
    prefix = "Demonstration: " if demonstration else ""
    for where, lines in sets:
        drawn = [(name, mine) for name, rows in lines if (mine := [row for row in rows if row["validation"]])]
        for start in range(1, max(2, len(drawn)), _LINES) if drawn else []:
            figures.append(_figure([drawn[0], *drawn[start : start + _LINES]], where, len(figures), prefix))
    return figures


def _figure(lines: list[tuple[str, list[dict[str, Any]]]], where: str, index: int, prefix: str) -> Figure:
    names = [name for name, _ in lines]
    runs = [run for _, mine in lines for run in mine]
    rows = [
        {"run": run["run_id"], "recipe": name, **point}
        for name, mine in lines
        for run in mine
        for point in json.loads(run["validation"])
    ]
    counts = sorted({point["n"] for point in rows if point.get("n")})
    images = "\u2013".join(dict.fromkeys(map(str, (counts[0], counts[-1])))) if counts else "an unknown number of"
    colour = {
        "field": "recipe",
        "type": "nominal",
        "scale": {"domain": names, "range": list(svg.SERIES[: len(names)])},
        "legend": {"columns": legend_columns(names)},
    }
    x = {"field": "step", "type": "quantitative", "title": "Optimiser step"}
    y = {"field": "loss", "type": "quantitative", "title": "Validation loss", "scale": {"zero": False, "nice": True}}
    base = {"x": x, "y": y, "color": colour, "detail": {"field": "run", "type": "nominal"}}
    title = f"{prefix}Validation loss: {where}"
    spec = {
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.5, "opacity": 0.85}, "encoding": base},
            {"mark": {"type": "point", "filled": True, "size": 28, "opacity": 1}, "encoding": base},
        ],
    }
    name = f"fig-validation-{index}"
    caption = "The axis does not start at zero. Fixed images, noise and timesteps at every point. "
    caption += f"n = {pluralize(len(runs), 'run')}."
    subtitle = f"{pluralize(len(runs), 'run')}, a line each; {images} images per point"
    run_ids = [run["run_id"] for run in runs]
    return plate.figure(name, title, subtitle, caption, spec, run_ids)
