"""The validation loss by optimizer step."""

from __future__ import annotations

import json

import altair as alt
import polars as pl

from analysis.stats.study import comparable_groups, comparisons, is_study_run, requested_batch
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure, Row

_Recipes = list[tuple[str, list[Row]]]  # names with their runs


def draw(runs: pl.DataFrame) -> list[Figure]:
    """Draw a line per run: of every study, and of the recipes that ran outside studies."""
    known = pl.col("valid") & pl.col("validation").is_not_null()
    groups: list[tuple[str, _Recipes]] = [
        (study.setting, [(step.label, step.runs) for step in study.steps]) for study in comparisons(runs)
    ]
    for group in comparable_groups(runs.filter(known & ~is_study_run()).with_columns(requested_batch())):
        first = group.row(0, named=True)
        parts = group.partition_by("recipe", as_dict=True, maintain_order=True)
        where = f"{gpu_label(first['gpu'])}, batch {first['requested_batch']}, {first['site']}"
        groups.append((where, [(str(recipe), part.to_dicts()) for (recipe,), part in parts.items()]))
    figures: list[Figure] = []
    others = len(svg.SERIES) - 1  # recipes of one figure beside the first, which is in all of them
    for where, recipes in groups:
        validated = [(name, [row for row in rows if row["validation"]]) for name, rows in recipes]
        drawn = [(name, rows) for name, rows in validated if rows]
        # More recipes than colours make several figures, a single recipe makes one.
        for start in range(1, max(2, len(drawn)), others) if drawn else []:
            figures.append(_figure([drawn[0], *drawn[start : start + others]], where, len(figures)))
    return figures


def _figure(recipes: _Recipes, where: str, index: int) -> Figure:
    run_ids = [run["run_id"] for _, runs in recipes for run in runs]
    points = [
        {"run": run["run_id"], "recipe": name, **point}
        for name, runs in recipes
        for run in runs
        for point in json.loads(run["validation"])
    ]
    counts = sorted({point["n"] for point in points if point.get("n")})
    images = "\u2013".join(dict.fromkeys(map(str, (counts[0], counts[-1])))) if counts else "an unknown number of"
    base_chart = alt.Chart(alt.InlineData(values=points)).encode(
        alt.X("step:Q").title("Optimizer step"),
        alt.Y("loss:Q").title("Validation loss").scale(zero=False, nice=True),
        base.colour([name for name, _ in recipes], "recipe"),
        detail="run:N",
    )
    lines = base_chart.mark_line(strokeWidth=1.5, opacity=0.85)
    dots = base_chart.mark_point(filled=True, size=28, opacity=1)
    count = pluralize(len(run_ids), "run")
    notes = "The axis does not start at zero. Every point uses the same images, noise and timesteps."
    subtitle = f"{count}, a line each; {images} images per point"
    name, title = f"fig-validation-{index}", f"Validation loss: {where}"
    return base.figure(name, title, subtitle, [notes, f"n = {count}."], alt.layer(lines, dots), run_ids)
