"""Figures over the batch size: a line per GPU and recipe."""

from collections.abc import Sequence

import altair as alt
import polars as pl

from analysis.columns import METRICS
from analysis.report import names
from analysis.stats.cells import Cell
from analysis.units import gpu_label, number

from . import base, svg
from .base import Figure, Limits

RATE = "images_per_s"
_PLOTS = {  # metric: title, whether the axis starts at zero, caption
    RATE: ("Throughput by batch size", True, ""),
    "joules_per_image": ("Energy per image", True, "The reciprocal of images/s/W; lower is better."),
    "power_w": ("Mean power", True, "Energy divided by time, for the whole GPU board."),
    "gpu_util_pct": ("GPU utilization", False, "Share of time in which any kernel ran, not how busy the SMs were."),
    "temp_gpu_c_mean": ("GPU temperature", False, "Mean over the measurement window."),
    "vram_pct": ("GPU memory in use", True, "Peak, as a share of what the driver does not reserve."),
}


def draw(cells: pl.DataFrame, suffix: str = "") -> list[Figure]:
    """Draw every metric that was measured at several batches."""
    return [_draw(name, cells, suffix) for name in _PLOTS if cells.drop_nulls(["batch", name])["batch"].n_unique() > 1]


def bars(cells: Sequence[Cell], suffix: str) -> list[Figure]:
    """Draw the images/s of these cells of one batch in their order, if there are several."""
    known = [cell for cell in cells if cell[RATE]]
    if len(known) < 2:
        return []
    colours = {gpu_label(gpu): shade for gpu, shade in base.gpu_colours(cell["gpu"] for cell in known).items()}
    keys = ({"label": cell["series"], "part": gpu_label(cell["gpu"]), "order": 0} for cell in known)
    rows = [key | {"value": cell[RATE], "text": number(cell[RATE])} for key, cell in zip(keys, known, strict=True)]
    chart = base.stacks(rows, rows, colours, METRICS[RATE].heading)
    run_ids = [run_id for cell in known for run_id in cell["run_ids"]]
    subtitle = f"{METRICS[RATE].heading} at batch {known[0]['batch']}, mean over runs"
    caption = [base.n_note(run_ids, len(rows))]
    return [base.figure(f"fig-rates{suffix}", "Throughput", subtitle, caption, chart, run_ids)]


def _draw(metric: str, cells: pl.DataFrame, suffix: str) -> Figure:
    title, zero, caption = _PLOTS[metric]
    ends = {name: f"{metric}_{end}" for name, end in base.ENDS.items()}
    lacking = cells.drop_nulls("batch").filter(pl.col(metric).is_null()).select("series", "batch").rows()
    named = names.join([f"{series} at batch {batch}" for series, batch in lacking])
    missing = f"No point, because there is no mean: {named}." if named else ""
    shown, omitted = _limit_series(cells.drop_nulls(["batch", metric]))
    rows = shown.select("series", "gpu", "recipe", "batch", value=metric, n=f"{metric}_n", **ends)
    bottom, top = base.axis_limits(rows["value"], base.interval_ends(rows), zero=zero)
    limits = bottom, min(top, METRICS[metric].upper_bound)
    y = alt.Y("value:Q").title(METRICS[metric].heading).scale(domain=limits, zero=False, nice=False)
    batches = sorted(set(rows["batch"]))
    # Logarithmic: each doubling is one step.
    x = alt.X("batch:Q").title("Batch size").axis(values=batches, format="d", labelOverlap=True)
    x = x.scale(type="log", base=2, nice=False, padding=16, domain=[batches[0], batches[-1]])
    run_ids = base.run_ids_of(shown)
    notes = [caption, interval_note(rows, limits), missing, omitted, base.zero_note(limits)]
    notes += [base.n_note(run_ids, shown.height)]
    subtitle = f"{METRICS[metric].heading}, " + ("mean over runs" if (rows["n"] > 1).any() else "one run each")
    return base.figure(f"fig-{metric}{suffix}", title, subtitle, notes, base.curves(rows, x, y, limits), run_ids)


def interval_note(rows: pl.DataFrame, limits: Limits) -> str:
    """Return the sentence that says what the whiskers of these rows are."""
    if (rows["n"] == 1).all():
        return "One run per cell: no intervals."
    texts = ["95 % confidence interval of the mean"] if rows["low"].is_not_null().any() else []
    texts += ["without caps the range of too few runs"] if rows.select(base.HAS_RANGE.any()).item() else []
    note = f"Whiskers: {', '.join(texts)}." if texts else ""
    return f"{note} {base.CUT_NOTE}" if base.is_cut(rows, limits) else note


def _limit_series(cells: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Return at most as many series as there are colours, those with the most batches; and what is omitted."""
    sizes = cells.group_by("series", maintain_order=True).agg(pl.len(), pl.col("recipe").first() != "baseline")
    ranked = sizes.sort("len", ~pl.col("recipe"), descending=True, maintain_order=True)
    if ranked.height > len(svg.SERIES):
        ranked = ranked.filter(pl.col("len") > 1).head(len(svg.SERIES))
    omitted = sizes.height - ranked.height
    note = f"The tables have {omitted} more series, of fewer batch sizes." if omitted else ""
    return cells.filter(pl.col("series").is_in(ranked["series"].to_list())), note
