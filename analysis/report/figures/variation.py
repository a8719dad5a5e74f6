"""How much cards of one kind differ: each run over the mean of its cell, by the card that it ran on."""

from __future__ import annotations

import math

import polars as pl

from analysis.units import METRICS

from . import base, svg
from .base import Figure, Row, Spec, layer

CARDS = 24  # rows of one figure
_METRICS = ("images_per_s", "power_w")
_NARROWEST = 0.02  # of an axis either side of 1: less would show noise as if it were much
ABSENT = "Variation between cards: no cell has runs of several cards or nodes, so nothing tells a card from its kind."


def draw(cells: pl.DataFrame, runs: pl.DataFrame, *, prefix: str) -> Figure | str:
    """A strip per card and figure; where no cell has several cards, the sentence that says so."""
    rows = ratios(cells, runs)
    if not rows:
        return ABSENT
    order = _order(rows)
    kept = order[:CARDS]
    shown = [row for row in rows if row["label"] in kept]
    ids = [row["run_id"] for row in shown]
    words = ["Each dot is a run over the mean of its cell's runs; the tick is the mean of the card."]
    words.append("Only cells with runs of several cards or nodes.")
    if len(kept) < len(order):
        words.append(f"Of {len(order)} cards the {len(kept)} that are furthest from 1.")
    words.append(base.of_runs(ids, len({row["cell"] for row in shown})))
    title = f"{prefix}Variation between cards"
    subtitle = "Ratio to the mean of the cell; rows: node, first digits of the card's UUID"
    return base.figure("fig-variation", title, subtitle, " ".join(words), _spec(shown, sorted(kept)), ids)


def ratios(cells: pl.DataFrame, runs: pl.DataFrame) -> list[Row]:
    """A row per run of every cell with several cards or nodes: card, node and its figures over the cell's means."""
    where = {row[0]: row[1:] for row in runs.select("run_id", "node", "gpu_uuid").iter_rows()}
    found = []
    for index, cell in enumerate(cells.to_dicts()):
        places = [where[run_id] for run_id in cell["run_ids"]]
        if len(set(places)) < 2:
            continue
        for at, (run_id, (node, card)) in enumerate(zip(cell["run_ids"], places, strict=True)):
            row: Row = {"run_id": run_id, "cell": index, "label": _label(node, card), "series": cell["series"]}
            for metric in _METRICS:
                value, mean = cell[f"{metric}_runs"][at], cell[metric]
                row[metric] = value / mean if value is not None and mean else None
            found.append(row)
    return found


def _label(node: str | None, card: str | None) -> str:
    """Node and cards, short: of a UUID the first group is enough to find it in the table of runs."""
    cards = [uuid.removeprefix("GPU-").split("-")[0][:8] for uuid in (card or "").split(", ") if uuid]
    words = cards[0] + (f" and {len(cards) - 1} more" if len(cards) > 1 else "") if cards else "card unknown"
    return f"{node or 'node unknown'}, {words}"


def _order(rows: list[Row]) -> list[str]:
    """Cards by how far their mean is from that of their cells, in any figure; furthest first."""
    far: dict[str, float] = {}
    for (label,), group in pl.DataFrame(rows, infer_schema_length=None).group_by("label", maintain_order=True):
        means = [group[metric].cast(pl.Float64).mean() for metric in _METRICS]
        far[str(label)] = max((abs(float(mean) - 1) for mean in means if isinstance(mean, float)), default=0.0)
    return sorted(far, key=lambda label: (-far[label], label))


def _ticks(far: float) -> list[float]:
    """1 and a round number either side: more would touch in the reader's font."""
    power = 10.0 ** math.floor(math.log10(far))
    step = max(digit * power for digit in (1, 2, 5) if digit * power <= far)
    return [round(1 - step, 9), 1.0, round(1 + step, 9)]


def _spec(rows: list[Row], labels: list[str]) -> Spec:
    panels = []
    for metric in _METRICS:
        known = [row for row in rows if row[metric] is not None]
        far = max([_NARROWEST, *(1.1 * abs(row[metric] - 1) for row in known)])
        x: Spec = {"field": metric, "type": "quantitative", "title": f"{METRICS[metric].label}, ratio"}
        x |= {
            "scale": {"domain": [1 - far, 1 + far], "nice": False},
            "axis": {"grid": True, "values": _ticks(far), "format": "~g"},
        }
        y = base.row_axis(labels, **({} if metric == _METRICS[0] else {"labels": False, "minExtent": 0}))
        mean = {**x, "aggregate": "mean"}
        dot = {"type": "point", "filled": True, "size": 34, "opacity": 0.55, "color": svg.SERIES[0]}
        tick = {"type": "tick", "color": svg.TEXT, "thickness": 2, "size": 13}
        layers = [
            layer([{}], {"type": "rule", "color": svg.MUTED}, x=base.constant(1, x)),
            layer(known, dot, x=x, y=y),
            layer(known, tick, x=mean, y=y),
        ]
        width = max(110, (base.WIDTH + 10 - base.label_px(labels)) / 2)
        panels.append({"width": width, "height": {"step": 20}, "layer": layers})
    return {"hconcat": panels, "spacing": 18}
