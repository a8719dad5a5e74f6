"""From runs to cells: means over valid runs that may be compared, ratios between GPUs, and the best batch.

The unit of replication is the run. A cell of one run has no interval, and every table says so. What two cells
differ in is told by the interval of their ratio (ratio.py), never by two intervals that overlap or do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis import published, recipe_labels
from analysis.units import METRICS, gpu_label, gpu_order

from .intervals import MIN_DF, Gain, Observation, gain, mean_interval, pairing_key

# What is computed: another precision or resolution is another computation.
COMPUTATION_KEYS = ["precision", "resolution_px"]
# Never averaged across: a demonstration with a measurement, another model, another site, another card count, and
# what comparable.py tells apart.
CELL_KEYS = [
    "workload",
    "model",
    "site",
    "gpu",
    "gpus",
    "batch",
    "recipe",
    "demonstration",
    *COMPUTATION_KEYS,
    "comparability_key",
]
# Two recipes are compared only where all of these are equal; `requested_batch` is the batch, or `auto`.
RECIPE_COMPARISON_KEYS = [
    "workload",
    "model",
    "site",
    "gpu",
    "gpus",
    "requested_batch",
    "resolution_px",
    "demonstration",
]
RECIPE_COMPARISON_KEYS += ["comparability_key"]
# Two GPUs are compared only where all of these are equal.
GPU_COMPARISON_KEYS = ["workload", "model", "gpus", "recipe", "demonstration", *COMPUTATION_KEYS]
# What may stand in one picture and one sentence: whatever does this work, and however, is the choice to be made.
WORK_KEYS = ["workload", "model", "resolution_px", "demonstration"]
# Told in words wherever they vary within a table.
LABEL_KEYS = ["workload", "model", "recipe", "gpus", "demonstration", *COMPUTATION_KEYS, "comparability_key"]
# May differ inside a cell, but not silently.
_COVARIATES = {
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
TIE_THRESHOLD = 0.02  # one run says nothing of its scatter: figures as near as this are not told apart


def build_cells(runs: pl.DataFrame) -> pl.DataFrame:
    """One row per group of valid runs: n, cards, run_ids, differences, and mean, 95 % interval, min, max and n of every
    metric. In `<metric>_runs` and `seeds` stand the figures themselves, in the order of run_ids.

    A metric's own n counts the runs that have it, `batch_searched` those whose batch was searched for.
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
            pl.col(name).alias(f"{name}_runs"),
        )
    ]
    found = (pl.col("batch_requested") == "auto").fill_null(False).sum().alias("batch_searched")
    counts = [pl.col(name).drop_nulls().n_unique().alias(f"{name}_kinds") for name in _COVARIATES]
    cards = pl.col("gpu_uuid").drop_nulls().str.split(", ").explode().drop_nulls().n_unique().alias("cards")
    asked = pl.col("epochs") * pl.col("dataset_images")
    near = (asked / published.IMAGES - 1).abs() <= published.IMAGES_WITHIN
    table = (
        recipe_labels.add_short_names(runs)
        .filter(pl.col("valid"))
        .with_columns(pl.col("comparability_key").fill_null(""))
        .sort("run_id")
        .group_by(CELL_KEYS, maintain_order=True)
        .agg(
            pl.len().alias("n"),
            pl.col("run_id").alias("run_ids"),
            pl.coalesce("gpu_uuid", "node").alias("run_cards"),
            pl.col("seed").alias("seeds"),
            cards,
            found,
            near.fill_null(False).all().alias("poster_hours"),
            pl.col(recipe_labels.COLUMN).first(),
            *counts,
            *stats,
        )
    )
    order = sorted(table["gpu"].unique().drop_nulls().to_list(), key=gpu_order)
    rank = pl.col("gpu").replace_strict(order, range(len(order)), return_dtype=pl.Int64, default=None)
    order_by = ("site", "gpus", "recipe", *COMPUTATION_KEYS, "comparability_key", "batch")
    table = table.sort("workload", "model", rank, *order_by, nulls_last=True)
    said = [
        pl.when(pl.col(f"{name}_kinds") > 1).then(pl.format("{} " + words, pl.col(f"{name}_kinds")))
        for name, words in _COVARIATES.items()
    ]
    differences = pl.concat_str(said, separator=", ", ignore_nulls=True).alias("differences")
    return add_series(_with_intervals(table.with_columns(differences).drop([f"{name}_kinds" for name in _COVARIATES])))


def same_comparability_key(apart: str | None) -> pl.Expr:
    """Runs that may belong to a cell: a run that ended early knows less of what tells it apart than the cell does.

    Of one that counts nothing is guessed.
    """
    own = pl.col("comparability_key").fill_null("")
    less = pl.lit(f"{apart or ''}, ").str.starts_with(pl.concat_str(own, pl.lit(", "))) | (own == "")
    return pl.when(pl.col("valid")).then(own == (apart or "")).otherwise(less)


def _with_intervals(table: pl.DataFrame) -> pl.DataFrame:
    """Add the ends of every metric's interval: null where too few runs or cards have it (see `interval`)."""
    found: dict[str, list[float | None]] = {f"{name}_{end}": [] for name in METRICS for end in ("low", "high")}
    for row in table.iter_rows(named=True):
        for name in METRICS:
            low, high = metric_interval(name, observations(row, name)) or (None, None)
            found[f"{name}_low"].append(low)
            found[f"{name}_high"].append(high)
    return table.with_columns(pl.Series(name, ends, dtype=pl.Float64) for name, ends in found.items())


def metric_interval(metric: str, figures: list[Observation]) -> tuple[float, float] | None:
    """The 95 % interval of a metric's mean, cut to what the metric can be; None with fewer than `MIN_DF`."""
    ends = mean_interval(figures, min_df=MIN_DF)
    return None if ends is None else (max(ends[0], 0.0), min(ends[1], METRICS[metric].upper_bound))


def compare(new: dict[str, Any], old: dict[str, Any], metric: str) -> Gain | None:
    """One cell over another, with an interval where at least three runs, cards or pairs stand behind it."""
    return gain(observations(new, metric), observations(old, metric), min_df=MIN_DF)


def observations(cell: dict[str, Any], metric: str) -> list[Observation]:
    """The figure of each of a cell's runs that has it, by card and seed."""
    each = zip(cell["run_cards"], cell["seeds"], cell["run_ids"], cell[f"{metric}_runs"], strict=True)
    return [(pairing_key(card, seed, run_id), value) for card, seed, run_id, value in each if value is not None]


def is_distinguishable(better: dict[str, Any], other: dict[str, Any], metric: str, *, lower_is_better: bool) -> bool:
    """Whether the runs of two cells show that one is better: by the interval of their ratio.

    Where there are too few runs for an interval: if every run of the one is better than every run of the other, and
    the means are more than 2 % apart. That is a habit and no statistics.
    """
    found = compare(better, other, metric)
    if found is None:
        return True
    ahead = (lambda value: -value) if lower_is_better else (lambda value: value)
    if found.low is None or found.high is None:
        best, worst = ("max", "min") if lower_is_better else ("min", "max")
        apart = ahead(better[f"{metric}_{best}"]) > ahead(other[f"{metric}_{worst}"])
        return apart and ahead(found.value) > TIE_THRESHOLD
    return ahead(found.high if lower_is_better else found.low) > 0


def add_series(table: pl.DataFrame) -> pl.DataFrame:
    """Add `series`: the GPU, and whatever else tells its cells apart in this table."""
    varying = [name for name in LABEL_KEYS if table[name].n_unique() > 1]
    sites = table.group_by("gpu").agg(pl.col("site").n_unique()) if table.height else None
    if sites is not None and (sites["site"] > 1).any():
        varying.append("site")
    names = []
    for row in table.iter_rows(named=True):
        words = {"gpus": f"{row['gpus']} GPUs", "demonstration": "demo" if row["demonstration"] else "real"}
        words |= {"resolution_px": f"{row['resolution_px']} px", "recipe": str(row[recipe_labels.COLUMN])}
        extra = [words.get(name, str(row[name])) for name in varying]
        names.append(" \u00b7 ".join([gpu_label(row["gpu"]), *filter(None, extra)]))
    return table.with_columns(pl.Series("series", names, dtype=pl.String))


def list_differences(runs: pl.DataFrame, but: tuple[str, ...] = ()) -> str:
    """What these runs differ in of all that is watched, e.g. `2 drivers, 3 cards`."""
    kinds = {words: runs[name].drop_nulls().n_unique() for name, words in _COVARIATES.items() if name not in but}
    return ", ".join(f"{count} {words}" for words, count in kinds.items() if count > 1)


def differences_note(table: pl.DataFrame) -> str:
    """One sentence that names the cells whose runs differ in something watched; empty where none do."""
    found: dict[tuple[str, str], list[str]] = {}
    for series, batch, differences in table.select("series", "batch", "differences").iter_rows():
        if differences:
            found.setdefault((differences, series), []).append(str(batch))
    words = [f"{series} batch {', '.join(batches)}: {differences}" for (differences, series), batches in found.items()]
    return f"Cells that mix: {'; '.join(words)}." if words else ""


def searched_batch_note(table: pl.DataFrame) -> str:
    """One sentence that names the batches that a search found; empty where all were asked for."""
    words = []
    for row in table.filter(pl.col("batch_searched") > 0).iter_rows(named=True):
        part = "" if row["batch_searched"] == row["n"] else f" ({row['batch_searched']} of {row['n']} runs)"
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
    gains: dict[int, Gain] = field(default_factory=dict)  # the same with intervals, where runs are known

    @property
    def text(self) -> str:
        """The range as printed: one decimal, a single number where both ends round to the same."""
        ends = dict.fromkeys((f"{self.low:.1f}", f"{self.high:.1f}"))
        return "\u2013".join(ends)


def ratios(table: pl.DataFrame, *, value: str, lower_is_faster: bool = False) -> list[Ratio]:
    """Ratio matrix over `series` at equal batch. `table` has series, batch and the value's column.

    Of cells: ratios of geometric means over runs, with intervals.
    """
    speed: dict[str, dict[int, float]] = {}
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for row in table.iter_rows(named=True):
        series, batch, number = row["series"], row["batch"], row[value]
        if number:
            speed.setdefault(series, {})[batch] = 1 / number if lower_is_faster else number
            cells[series, batch] = row
    order = sorted(speed, key=lambda s: (_geometric_mean(speed[s]), s))
    of_runs = f"{value}_runs" in table.columns and not lower_is_faster
    found = []
    for i, slow in enumerate(order):
        for fast in order[i + 1 :]:
            shared = sorted(speed[slow].keys() & speed[fast].keys())
            if not shared:
                continue
            gains: dict[int, Gain] = {}
            for batch in shared if of_runs else []:
                one = compare(cells[fast, batch], cells[slow, batch], value)
                if one is not None:
                    gains[batch] = one
            plain = {batch: speed[fast][batch] / speed[slow][batch] for batch in shared}
            by_batch = {batch: 1 + gains[batch].value if batch in gains else plain[batch] for batch in shared}
            low, high = min(by_batch.values()), max(by_batch.values())
            found.append(Ratio(fast=fast, slow=slow, low=low, high=high, by_batch=by_batch, gains=gains))
    return found


def _geometric_mean(values: dict[int, float]) -> float:
    return math.exp(sum(math.log(v) for v in values.values()) / len(values))
