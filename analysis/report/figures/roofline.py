"""Roofline of every run that has counters, in units of the peaks of its own GPU.

In these units every GPU has the same roof. FLOPs are those of the model, without recomputation, so a run can lie lower
and further left than its kernels did.
"""

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure

ABSENT = (
    "Roofline: no valid run has both a counter of memory traffic (GPM, on Hopper and later) and an MFU. "
    "A40 and A100 have counters from profile=ncu alone."
)


def draw(runs: pl.DataFrame) -> Figure | str:
    """Draw a point per run; return the reason if no run has the counters."""
    known = recipe_labels.add_short_names(runs).filter(
        pl.col("valid") & (pl.col("dram_active_pct") > 0) & (pl.col("mfu_pct") > 0)
    )
    if known.is_empty():
        return ABSENT
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
    return base.figure("fig-roofline", "Roofline", subtitle, caption, _chart(rows), known["run_id"])


def _chart(rows: pl.DataFrame) -> alt.LayerChart:
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
