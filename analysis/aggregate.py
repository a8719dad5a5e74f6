"""From runs to cells: means over valid runs that may be compared, ratios between GPUs, and the best batch.

The unit of replication is the run. A cell of one run has no interval, and every table says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import polars as pl

from . import published
from .metrics import METRICS, gpu_label, gpu_order

# What is computed: another precision or resolution is another computation.
_COMPUTED = ["precision", "resolution_px"]
# Never averaged across: a demonstration with a measurement, another model, another site, another card count.
GROUP = ["workload", "model", "site", "gpu", "gpus", "batch", "recipe", "demonstration", *_COMPUTED]
# Two recipes are compared only where all of these are equal; `asked_batch` is the batch, or `auto`.
ACROSS_RECIPES = ["workload", "model", "site", "gpu", "gpus", "asked_batch", "resolution_px", "demonstration"]
# Two GPUs are compared only where all of these are equal.
COMPARABLE = ["workload", "model", "gpus", "recipe", "demonstration", *_COMPUTED]
# Told in words wherever they vary within a table.
TELLING = ["workload", "model", "recipe", "gpus", "demonstration", *_COMPUTED]
# May differ inside a cell, but not silently.
_WATCHED = {
    "driver": "drivers",
    "torch": "torch versions",
    "gpu_name": "boards",
    "gpu_uuid": "cards",
    "node": "nodes",
    "power_limit_w": "power limits",
    "energy_source": "energy sources",
    "source": "telemetry sources",
    "config_hash": "configurations",
    "data_identity": "data sets",
    "runtime_kind": "kinds of runtime",
}
TIE = 0.02


def cells(runs: pl.DataFrame) -> pl.DataFrame:
    """One row per group of valid runs: n, cards, run_ids, mixes, and mean, min, max and n of every metric.

    A metric's own n counts the runs that have it, `batch_found` those whose batch was searched for.
    `poster_hours`: every run was asked for as many images as the poster's hours stand for.
    """
    stats = [
        expression
        for name in METRICS
        for expression in (
            pl.col(name).mean().alias(name),
            pl.col(name).min().alias(f"{name}_min"),
            pl.col(name).max().alias(f"{name}_max"),
            pl.col(name).count().alias(f"{name}_n"),
        )
    ]
    found = (pl.col("batch_requested") == "auto").fill_null(False).sum().alias("batch_found")
    counts = [pl.col(name).drop_nulls().n_unique().alias(f"{name}_kinds") for name in _WATCHED]
    cards = pl.col("gpu_uuid").drop_nulls().str.split(", ").explode().drop_nulls().n_unique().alias("cards")
    asked = pl.col("epochs") * pl.col("dataset_images")
    near = (asked / published.IMAGES - 1).abs() <= published.IMAGES_WITHIN
    table = (
        runs.filter(pl.col("valid"))
        .group_by(GROUP)
        .agg(
            pl.len().alias("n"),
            pl.col("run_id").sort().alias("run_ids"),
            cards,
            found,
            near.fill_null(False).all().alias("poster_hours"),
            *counts,
            *stats,
        )
    )
    order = sorted(table["gpu"].unique().drop_nulls().to_list(), key=gpu_order)
    rank = pl.col("gpu").replace_strict(order, range(len(order)), return_dtype=pl.Int64, default=None)
    table = table.sort("workload", "model", rank, "site", "gpus", "recipe", *_COMPUTED, "batch", nulls_last=True)
    said = [
        pl.when(pl.col(f"{name}_kinds") > 1).then(pl.format("{} " + words, pl.col(f"{name}_kinds")))
        for name, words in _WATCHED.items()
    ]
    mixes = pl.concat_str(said, separator=", ", ignore_nulls=True).alias("mixes")
    return with_series(table.with_columns(mixes).drop([f"{name}_kinds" for name in _WATCHED]))


def with_series(table: pl.DataFrame) -> pl.DataFrame:
    """Add `series`: the GPU, and whatever else tells its cells apart in this table."""
    varying = [name for name in TELLING if table[name].n_unique() > 1]
    sites = table.group_by("gpu").agg(pl.col("site").n_unique()) if table.height else None
    if sites is not None and (sites["site"] > 1).any():
        varying.append("site")
    names = []
    for row in table.iter_rows(named=True):
        words = {"gpus": f"{row['gpus']} GPUs", "demonstration": "demo" if row["demonstration"] else "real"}
        words["resolution_px"] = f"{row['resolution_px']} px"
        extra = [words.get(name, str(row[name])) for name in varying]
        names.append(" \u00b7 ".join([gpu_label(row["gpu"]), *extra]))
    return table.with_columns(pl.Series("series", names, dtype=pl.String))


def mixed_in(runs: pl.DataFrame, but: tuple[str, ...] = ()) -> str:
    """What these runs differ in of all that is watched, e.g. `2 drivers, 3 cards`."""
    kinds = {words: runs[name].drop_nulls().n_unique() for name, words in _WATCHED.items() if name not in but}
    return ", ".join(f"{count} {words}" for words, count in kinds.items() if count > 1)


def mixed_note(table: pl.DataFrame) -> str:
    """One sentence that names the cells whose runs differ in something watched; empty where none do."""
    found: dict[tuple[str, str], list[str]] = {}
    for series, batch, mixes in table.select("series", "batch", "mixes").iter_rows():
        if mixes:
            found.setdefault((mixes, series), []).append(str(batch))
    words = [f"{series} batch {', '.join(batches)}: {mixes}" for (mixes, series), batches in found.items()]
    return f"Cells that mix: {'; '.join(words)}." if words else ""


def found_note(table: pl.DataFrame) -> str:
    """One sentence that names the batches that a search found; empty where all were asked for."""
    words = []
    for row in table.filter(pl.col("batch_found") > 0).iter_rows(named=True):
        part = "" if row["batch_found"] == row["n"] else f" ({row['batch_found']} of {row['n']} runs)"
        words.append(f"{row['series']} batch {row['batch']}{part}")
    return f"Found by a search (batch=auto), not asked for: {'; '.join(words)}." if words else ""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times faster `fast` is than `slow`, over the batches that both have."""

    fast: str
    slow: str
    low: float
    high: float
    by_batch: dict[int, float]

    @property
    def text(self) -> str:
        """The range as printed: one decimal, a single number where both ends round to the same."""
        ends = dict.fromkeys((f"{self.low:.1f}", f"{self.high:.1f}"))
        return "\u2013".join(ends)


def ratios(table: pl.DataFrame, *, value: str, lower_is_faster: bool = False) -> list[Ratio]:
    """Ratio matrix over `series` at equal batch. `table` has series, batch and the value's column."""
    speed: dict[str, dict[int, float]] = {}
    for series, batch, number in table.select("series", "batch", value).iter_rows():
        if number:
            speed.setdefault(series, {})[batch] = 1 / number if lower_is_faster else number
    order = sorted(speed, key=lambda s: (_geometric_mean(speed[s]), s))
    found = []
    for i, slow in enumerate(order):
        for fast in order[i + 1 :]:
            shared = sorted(speed[slow].keys() & speed[fast].keys())
            if shared:
                by_batch = {batch: speed[fast][batch] / speed[slow][batch] for batch in shared}
                low, high = min(by_batch.values()), max(by_batch.values())
                found.append(Ratio(fast=fast, slow=slow, low=low, high=high, by_batch=by_batch))
    return found


def _geometric_mean(values: dict[int, float]) -> float:
    return math.exp(sum(math.log(v) for v in values.values()) / len(values))


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best batch of one series by one figure, with the batches that cannot be told from it."""

    series: str
    batch: int
    value: float
    ties: list[int]  # other batches within 2 %, or whose ranges overlap
    smallest: int  # of the best and its ties: the one to take
    n: int  # runs of the cell with the fewest
    candidates: int


def best_batches(table: pl.DataFrame, *, metric: str, lowest: bool) -> list[Best]:
    """Per series. A tie is a mean within 2 % of the best, or, with n > 1 in both, overlapping min-max ranges."""
    found = []
    for (series,), group in table.filter(pl.col(metric).is_not_null()).group_by("series", maintain_order=True):
        rows = group.sort(metric, descending=not lowest).to_dicts()
        top = rows[0]
        tied = [row["batch"] for row in rows[1:] if _tied(top, row, metric)]
        found.append(
            Best(
                series=str(series),
                batch=top["batch"],
                value=top[metric],
                ties=sorted(tied),
                smallest=min([top["batch"], *tied]),
                n=min(row[f"{metric}_n"] for row in rows),
                candidates=len(rows),
            )
        )
    return found


def _tied(top: dict[str, Any], row: dict[str, Any], metric: str) -> bool:
    if abs(row[metric] / top[metric] - 1) <= TIE:
        return True
    overlap = row[f"{metric}_max"] >= top[f"{metric}_min"] and row[f"{metric}_min"] <= top[f"{metric}_max"]
    return min(top[f"{metric}_n"], row[f"{metric}_n"]) > 1 and overlap
