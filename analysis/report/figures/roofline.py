"""Roofline of every run with counters, in units of its own card's peaks.

MFU is achieved over peak FLOP/s, DRAM activity is achieved over peak bandwidth. Their ratio is the arithmetic
intensity over that of the ridge, where compute and memory would both be full. In these units every card has the
same roof, and no figure is needed that a run does not carry. FLOPs are the model's (no recomputation), so that a
run may stand lower and further left than its kernels did.
"""

from __future__ import annotations

import polars as pl

from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.console import pluralize

from . import base as plate
from . import svg
from .base import Figure, Row, Spec, layer

COUNTERS = ("dram_active_pct", "tensor_active_pct")
ABSENT = (
    "Roofline: no run that counts has counters of memory traffic (GPM on Hopper and later, or DCGM) and an MFU to "
    "hold against them, so none is drawn."
)


def draw(runs: pl.DataFrame, *, prefix: str) -> Figure | str:
    """A point per run; where no run has the counters, the sentence that says so."""
    if not set(COUNTERS) <= set(runs.columns):
        return ABSENT
    known = runs.filter(pl.col("valid") & (pl.col("dram_active_pct") > 0) & (pl.col("mfu_pct") > 0))
    if known.is_empty():
        return ABSENT
    rows = points(known)
    ids = known["run_id"].to_list()
    lacking = runs.filter("valid").height - known.height
    bound = sum(row["intensity"] < 1 for row in rows)
    words = [
        "Across: FLOPs per byte of memory traffic, over the card's ratio of peak FLOP/s to peak bandwidth; left of 1 "
        "memory ends first, right of it compute. Up: MFU. Line: the roof of peak bandwidth and dense BF16 peak.",
        f"{bound} of {pluralize(len(rows), 'run')} left of the ridge.",
        "FLOPs are the model's, without recomputation; traffic is the counter's mean over the measure window.",
    ]
    if lacking:
        words.append(f"{pluralize(lacking, 'run')} without counters or without an MFU left out.")
    words.append(f"n = {pluralize(len(rows), 'run')}.")
    names = [gpu_label(gpu) for gpu in sorted({*known["gpu"]}, key=gpu_order)]
    title, subtitle = f"{prefix}Roofline", "Each run in units of its own card's peaks"
    return plate.figure("fig-roofline", title, subtitle, " ".join(words), _spec(rows, names), ids)


def points(known: pl.DataFrame) -> list[Row]:
    """Intensity over the ridge's, MFU in % and what the counters say, of runs that have both."""
    return [
        {
            "gpu": gpu_label(row["gpu"]),
            "batch": row["batch"],
            "mfu_pct": row["mfu_pct"],
            "intensity": row["mfu_pct"] / row["dram_active_pct"],
        }
        for row in known.iter_rows(named=True)
    ]


def _spec(rows: list[Row], names: list[str]) -> Spec:
    left = min([0.25, *(0.7 * row["intensity"] for row in rows)])
    right = max([4.0, *(1.4 * row["intensity"] for row in rows)])
    low = min([5.0, *(0.7 * row["mfu_pct"] for row in rows)])
    x: Spec = {"field": "intensity", "type": "quantitative", "title": "Arithmetic intensity / ridge"}
    x |= {
        "scale": {"type": "log", "domain": [left, right], "nice": False},
        "axis": {"format": "~g", "values": [0.1, 0.2, 0.5, 1, 2, 5, 10]},
    }
    y: Spec = {"field": "mfu_pct", "type": "quantitative", "title": "MFU [%]"}
    y |= {"scale": {"type": "log", "domain": [low, 130], "nice": False}}
    y["axis"] = {"values": [1, 2, 5, 10, 20, 50, 100], "format": "~g"}
    # From where the bandwidth's slope enters the picture, so that a straight line on both scales stays one.
    corner = max(left, low / 100)
    roof = [{"intensity": at, "mfu_pct": min(100.0, 100 * at)} for at in (corner, 1.0, right)]
    base = {"x": x, "y": y, "color": plate.colour(names, "gpu")}
    ridge = {"type": "rule", "color": svg.MUTED, "strokeDash": [3, 3], "opacity": 0.7}
    point = {"type": "point", "filled": True, "size": 50, "opacity": 0.7}
    return {
        "layer": [
            layer([{}], ridge, x=plate.constant(1, x)),
            layer(roof, {"type": "line", "color": svg.TEXT, "strokeWidth": 1.8}, x=x, y=y),
            layer(rows, point, **base),
        ]
    }
