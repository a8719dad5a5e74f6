"""The validation loss by optimizer step."""

import json

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.stats.study import comparable_groups, requested_batch
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure


def draw(runs: pl.DataFrame) -> list[Figure]:
    """Draw a line per run, a figure for the runs that may be compared, of at most as many recipes as colours."""
    known = runs.filter(pl.col("valid") & pl.col("validation").is_not_null()).with_columns(requested_batch())
    groups = comparable_groups(recipe_labels.add_short_names(known))
    return [_figure(group, index) for index, group in enumerate(groups)]


def _figure(runs: pl.DataFrame, index: int) -> Figure:
    names = runs[recipe_labels.COLUMN].unique(maintain_order=True).to_list()
    omitted = len(names[len(svg.SERIES) :])
    runs = runs.filter(pl.col(recipe_labels.COLUMN).is_in(names[: len(svg.SERIES)]))
    points = [
        {"run": run["run_id"], "recipe": run[recipe_labels.COLUMN], **point}
        for run in runs.to_dicts()
        for point in json.loads(run["validation"])
    ]
    counts = sorted({point["n"] for point in points if point.get("n")})
    images = "\u2013".join(dict.fromkeys(map(str, (counts[0], counts[-1])))) if counts else "an unknown number of"
    losses = [point["loss"] for point in points]
    limits = base.axis_limits(losses, losses, zero=False)
    y = alt.Y("loss:Q").title("Validation loss").scale(domain=limits, nice=False, zero=False)
    colour = base.colour(names[: len(svg.SERIES)], "recipe")
    chart = alt.Chart(alt.InlineData(values=points)).encode(alt.X("step:Q").title("Optimizer step"), y, colour)
    lines = chart.mark_line(strokeWidth=1.5, opacity=0.85).encode(detail="run:N")
    dots = chart.mark_point(filled=True, size=28, opacity=1)
    count, first = pluralize(runs.height, "run"), runs.row(0, named=True)
    notes = [base.zero_note(limits), "Every point uses the same images, noise and timesteps.", f"n = {count}."]
    notes += [f"{pluralize(omitted, 'recipe')} more in the table."] if omitted else []
    title = f"Validation loss: {gpu_label(first['gpu'])}, batch {first['requested_batch']}, {first['site']}"
    subtitle = f"{count}, a line each; {images} images per point"
    return base.figure(f"fig-validation-{index}", title, subtitle, notes, alt.layer(lines, dots), runs["run_id"])
