"""The energy counter held against the integral of sampled power, run by run, with the limit of the audit."""

from __future__ import annotations

import polars as pl

from analysis.metrics.telemetry import MAX_COUNTER_DEVIATION
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.console import pluralize

from . import base as plate
from . import svg
from .base import Figure, Row, Spec, layer

ABSENT = "Energy audit: no run has both an energy counter and sampled instant power."
_COUNTS, _NOT = "counts", "does not count"


def draw(runs: pl.DataFrame, *, prefix: str) -> Figure | str:
    """A point per run that has both; where none has, the sentence that says so."""
    known = runs.filter(pl.col("energy_ratio").is_not_null() & pl.col("power_w").is_not_null())
    if known.is_empty():
        return ABSENT
    rows = [
        {
            "gpu": gpu_label(row["gpu"]),
            "power_w": row["power_w"] / (row["gpus"] or 1),
            "ratio": row["energy_ratio"],
            "state": _COUNTS if row["valid"] else _NOT,
        }
        for row in known.select("gpu", "gpus", "power_w", "energy_ratio", "valid").iter_rows(named=True)
    ]
    beyond = sum(abs(row["ratio"] - 1) > MAX_COUNTER_DEVIATION for row in rows)
    measured = runs.filter(pl.col("energy_j").is_not_null()).height
    ids = known["run_id"].to_list()
    limit = f"{100 * MAX_COUNTER_DEVIATION:.0f} %"
    words = [f"A point per run; shaded: within {limit} of each other, the limit from which on the audit warns."]
    words.append(f"{pluralize(beyond, 'run')} beyond it." if beyond else "No run is beyond it.")
    if measured > known.height:
        words.append(f"{pluralize(measured - known.height, 'run')} with energy from one of the two alone: not drawn.")
    if any(row["state"] == _NOT for row in rows):
        words.append("Hollow: the run does not count.")
    words.append(f"n = {pluralize(known.height, 'run')}.")
    order = sorted({*known["gpu"]}, key=gpu_order)
    spec = _spec(rows, [gpu_label(gpu) for gpu in order])
    title, subtitle = f"{prefix}Energy audit", "Counter over integral of sampled power, against mean power per GPU"
    return plate.figure("fig-energy-audit", title, subtitle, " ".join(words), spec, ids)


def _spec(rows: list[Row], names: list[str]) -> Spec:
    far = max([1.6 * MAX_COUNTER_DEVIATION, *(1.1 * abs(row["ratio"] - 1) for row in rows)])
    watts = [row["power_w"] for row in rows]
    edge = max(0.08 * (max(watts) - min(watts)), 0.02 * max(watts))
    x: Spec = {"field": "power_w", "type": "quantitative", "title": "Mean power per GPU [W]"}
    x["scale"] = {"domain": [max(0, min(watts) - edge), max(watts) + edge], "nice": False, "zero": False}
    y: Spec = {"field": "ratio", "type": "quantitative", "title": "Counter / integral"}
    y["scale"] = {"domain": [1 - far, 1 + far], "nice": False, "zero": False}
    low, high = 1 - MAX_COUNTER_DEVIATION, 1 + MAX_COUNTER_DEVIATION
    base = {"x": x, "y": y, "color": plate.colour(names, "gpu")}
    valid, invalid = ([row for row in rows if row["state"] == state] for state in (_COUNTS, _NOT))
    band = {"type": "rect", "color": svg.MUTED, "opacity": 0.1}
    limit = {"type": "rule", "color": svg.MUTED, "strokeDash": [4, 3]}
    text = {"type": "text", "align": "right", "dx": -3, "dy": -6, "x": "width", "color": svg.MUTED}
    return {
        "layer": [
            layer([{}], band, y=plate.constant(low, y), y2={"datum": high}),
            layer([{}], {"type": "rule", "color": svg.MUTED}, y=plate.constant(1, y)),
            *(layer([{}], limit, y=plate.constant(end, y)) for end in (low, high)),
            layer([{}], text, y=plate.constant(high, y), text={"value": f"limit: {100 * MAX_COUNTER_DEVIATION:.0f} %"}),
            layer(valid, {"type": "point", "filled": True, "size": 45, "opacity": 0.65}, **base),
            layer(invalid, {"type": "point", "filled": False, "size": 55, "strokeWidth": 1.5, "opacity": 1}, **base),
        ]
    }
