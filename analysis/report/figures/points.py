"""Figures of points: cells by throughput and energy, validation losses by optimizer step, and the roofline of runs.

The roofline has the same roof for every GPU, because both axes are relative: the ratio of MFU to DRAM activity is the
arithmetic intensity in units of the ridge point's.
FLOPs are those of the model, without recomputation, so a run can lie lower and further left than its kernels did.
"""

import json

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.stats.cells import WORK_KEYS
from analysis.stats.study import comparable_groups, requested_batch
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure, Limits

_X, _Y = "images_per_s", "joules_per_image"
_LABEL_PX = 16  # between two labels
NO_ROOFLINE = (
    "Roofline: no valid run has both a counter of memory traffic (GPM, on Hopper and later) and an MFU. "
    "A40 and A100 have counters from profile=ncu alone."
)


def draw_energy(cells: pl.DataFrame) -> list[Figure]:
    """Draw a figure per kind of work of several cells, largest first."""
    kinds = cells.drop_nulls([_X, _Y, "batch"]).partition_by(WORK_KEYS, maintain_order=True)
    kinds = sorted((kind for kind in kinds if kind.height > 1), key=lambda kind: -kind.height)
    return [_energy(kind, index) for index, kind in enumerate(kinds)]


def _energy(cells: pl.DataFrame, index: int) -> Figure:
    run_ids = base.run_ids_of(cells)
    limits = [_limits(cells[column].to_list()) for column in (_X, _Y)]
    caption = [
        "Lighter points: another cell is at least as fast by its mean and uses less energy.",
        *(base.zero_note(*limits), base.n_note(run_ids, cells.height)),
    ]
    title = f"Throughput against energy: {cells['model'][0] or 'unknown model'}"
    name = "fig-pareto" + (f"-{index}" if index else "")
    subtitle = "Better is down and to the right; labels: recipe and batch"
    return base.figure(name, title, subtitle, caption, _energy_chart(cells, *limits), run_ids)


def _energy_chart(cells: pl.DataFrame, limits_x: Limits, limits_y: Limits) -> alt.LayerChart:
    x = alt.X(f"{_X}:Q").title(METRICS[_X].heading).scale(domain=limits_x, nice=False, zero=False).axis(tickCount=6)
    y = alt.Y(f"{_Y}:Q").title(METRICS[_Y].heading).scale(domain=limits_y, nice=False, zero=False)
    colour = base.colour(list(base.gpu_colours(cells["gpu"])), "gpu")
    # From the fastest down: a cell is on the frontier if no faster one needs as little energy.
    ranked = cells.with_row_index("place").sort(_X, _Y, descending=[True, False], maintain_order=True)
    on_frontier = (pl.col(_Y) < pl.col(_Y).cum_min().shift(1)).fill_null(True)
    cells = ranked.with_columns(frontier=on_frontier).sort("place")
    text = pl.concat_str(pl.col(recipe_labels.COLUMN).str.slice(0, 24), "batch", separator=", ", ignore_nulls=True)
    rows = cells.select(_X, _Y, "gpu", "frontier", text=text)
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


def draw_validation(runs: pl.DataFrame) -> list[Figure]:
    """Draw a line per run, a figure for the runs that may be compared, of at most as many recipes as colours."""
    known = runs.filter(pl.col("valid") & pl.col("validation").is_not_null()).with_columns(requested_batch())
    groups = comparable_groups(recipe_labels.add_short_names(known))
    return [_validation(group, index) for index, group in enumerate(groups)]


def _validation(runs: pl.DataFrame, index: int) -> Figure:
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


def draw_roofline(runs: pl.DataFrame) -> Figure | str:
    """Draw a point per run; return the reason if no run has the counters."""
    known = recipe_labels.add_short_names(runs).filter(
        pl.col("valid") & (pl.col("dram_active_pct") > 0) & (pl.col("mfu_pct") > 0)
    )
    if known.is_empty():
        return NO_ROOFLINE
    gpu = pl.col("gpu").map_elements(gpu_label, pl.String)
    recipe = pl.col(recipe_labels.COLUMN)
    rows = known.select("mfu_pct", gpu=gpu, recipe=recipe, intensity=pl.col("mfu_pct") / pl.col("dram_active_pct"))
    lacking = runs.filter("valid").height - rows.height
    left = rows.filter(pl.col("intensity") < 1).height
    caption = [
        "x: FLOPs of the model per byte of memory traffic, over the GPU's peak FLOP/s per byte of peak bandwidth. "
        "Line: the roof, left of 1 by bandwidth, right of it by the dense peak: BF16, in fp32 that of TF32 or fp32. "
        "Only a run near it is limited by it.",
        f"{left} of {pluralize(rows.height, 'run')} left of the ridge.",
        f"{pluralize(lacking, 'run')} without counters or MFU omitted." if lacking else "",
        f"n = {pluralize(rows.height, 'run')}.",
    ]
    subtitle = "Each run in units of the peaks of its own GPU"
    return base.figure("fig-roofline", "Roofline", subtitle, caption, _roofline_chart(rows), known["run_id"])


def _roofline_chart(rows: pl.DataFrame) -> alt.LayerChart:
    # From 0.25 to 4 at least, so that the ridge at 1 is well inside the plot.
    left, right = min(0.25, 0.7 * min(rows["intensity"])), max(4.0, 1.4 * max(rows["intensity"]))
    low = min(5.0, 0.7 * min(rows["mfu_pct"]))
    x = alt.X("intensity:Q").title("Arithmetic intensity / ridge").scale(type="log", domain=[left, right], nice=False)
    x = x.axis(format="~g", values=[0.1, 0.2, 0.5, 1, 2, 5, 10])
    y = alt.Y("mfu_pct:Q").title("MFU [%]").scale(type="log", domain=[low, 130], nice=False)
    y = y.axis(format="~g", values=[1, 2, 5, 10, 20, 50, 100])
    # The roof begins where the slope of the bandwidth enters the plot: on two log scales it is then a straight line.
    corners = [(intensity, min(100.0, 100 * intensity)) for intensity in (max(left, low / 100), 1.0, right)]
    roof = alt.Chart(pl.DataFrame(corners, schema=["intensity", "mfu_pct"], orient="row"))
    points = alt.Chart(rows).mark_point(filled=True, size=50, opacity=0.7)
    colour = base.colour(list(base.gpu_colours(rows["gpu"])), "gpu")
    shape = alt.Shape("recipe:N").legend(orient="bottom", columns=2)
    return base.layer(roof.mark_line(color=svg.TEXT, strokeWidth=1.8).encode(x, y), points.encode(x, y, colour, shape))
