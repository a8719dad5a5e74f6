"""Cells, i.e. replicates of one configuration: means over their runs, comparison of cells, ratios between series.

Whether two cells differ is decided by the interval of their ratio or, without one, by the scatter of cells of their
kind (intervals.py), never by whether their two intervals overlap.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import geometric_mean
from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.columns import BOOL, METRICS, REAL, STRING
from analysis.comparability import SETTING_KEYS
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.config.levers import lever_name
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError

from . import agreement, intervals
from .intervals import MIN_DF, Gain, Observation, Variance, observations

# Runs of another precision or resolution, or with cached instead of computed latents and texts, compute something else.
CACHE_KEYS = ["encodes_online", "text_online"]
COMPUTATION_KEYS = ["precision", "resolution_px", *CACHE_KEYS]
# A cell is the runs that agree in all of these (comparability.py explains the last one).
CELL_KEYS = [*SETTING_KEYS, "batch", "recipe", "demonstration", *COMPUTATION_KEYS]
CELL_KEYS += ["inactive_levers", "comparability_key"]
# Cells of one kind, whose runs are taken to scatter alike.
KIND_KEYS = [*SETTING_KEYS, "batch", "resolution_px", "demonstration"]
# Recipes are compared only if all of these are equal; `requested_batch` is the batch, or `auto`.
RECIPE_COMPARISON_KEYS = [*SETTING_KEYS, "requested_batch", "resolution_px", "demonstration", "comparability_key"]
# GPUs are compared only if all of these are equal.
GPU_COMPARISON_KEYS = ["workload", "model", "variant", "gpus", "nodes", "recipe", "demonstration", *COMPUTATION_KEYS]
# Cells that do the same work, by whatever means: they may share a figure and a headline.
WORK_KEYS = ["workload", "model", "variant", "resolution_px", "demonstration", "adapters"]
# Part of a series' label if they vary within a table.
LABEL_KEYS = ["workload", "model", "variant", "recipe", "gpus", "nodes", "demonstration", *COMPUTATION_KEYS]
LABEL_KEYS += ["inactive_levers", "comparability_key"]
# May vary within a cell, which is then reported as a difference.
_COVARIATES = {
    "driver": "drivers",
    "code_version": "code versions",
    "torch": "torch versions",
    "cuda": "CUDA versions",
    "cudnn": "cuDNN versions",
    "gpu_name": "boards",
    "gpu_uuid": "cards",
    "node": "nodes",
    "power_limit_w": "power limits",
    "energy_source": "energy sources",
    "source": "telemetry sources",
    "config_hash": "configurations",
    "data_identity": "data sets",
    "runtime_kind": "kinds of runtime",
    "flop_per_image": "figures of FLOP per image",
    "peak_tflops": "figures of peak FLOP/s",
}
# Columns of a run that its cell lists.
_OF_RUN = ["run_id", "gpu", "gpu_uuid", "node", "seed", "demonstration", agreement.ACCEPTED, *METRICS]
# How tables and labels show the value of a key.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "encodes_online": lambda count: {0: "latents cached", 1: "half of the latents cached"}.get(count, "latents online"),
    "text_online": lambda online: "text online" if online else "text cached",
    "inactive_levers": lambda names: names and f"{names} not active",
    "gpus": lambda count: pluralize(count, "GPU"),
    "nodes": lambda count: pluralize(count, "node"),
    "demonstration": lambda demonstration: "demo" if demonstration else "real",
    "resolution_px": lambda side: f"{side} px",
    "adapters": lambda adapters: "adapters" if adapters else "all weights",
}
# The different cards behind some runs, of which one on several GPUs lists all UUIDs; runs that were not steady.
RUN_COUNTS = {
    "cards": pl.col("gpu_uuid").drop_nulls().str.split(", ").explode().drop_nulls().n_unique(),
    "unsteady": (pl.col("steady") == "no").sum(),
}
Cell = dict[str, Any]  # a row of `build_cells`
Runs = Sequence[Mapping[str, Any]]


def build_cells(runs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per cell of the valid runs.

    `runs`, `run_ids` and `seeds` are lists in one order, `runs` with the metrics of each run. Every metric has its
    mean, `_low` and `_high` (95 % interval), `_min`, `_max` and `_n`, the number of runs that have it.
    `adapters` is whether LoRA trains adapters instead of all weights.
    `cards` counts the different cards behind them, `unsteady` the runs whose step time changed within the measured
    time, `batch_searched` the runs whose batch was searched for; `training_images_min` and `_max` span epochs times
    images of the data set, null if any run does not know them. `disagreement` says in which figures the runs
    disagree, and `withheld` that `withhold_means` has to take their means away. `scatter` is by metric the variance of
    runs, pooled over the cells of this kind, with its degrees of freedom.
    """
    if not isinstance(runs, pl.DataFrame):
        raise UserError("build_cells: takes the runs of a dataset, as in build_cells(dataset.runs)")
    runs = recipe_labels.add_short_names(runs).filter("valid")
    of_run = [name for name in _OF_RUN if name in runs.columns]
    metrics, images = pl.col(*METRICS), pl.col("epochs") * pl.col("dataset_images")
    known = images.null_count() == 0
    levers = pl.col("levers") if "levers" in runs.columns else pl.lit(None, pl.String)
    table = (
        runs.with_columns(pl.col("comparability_key").fill_null(""))
        .sort("run_id")
        .group_by(CELL_KEYS, maintain_order=True)
        .agg(
            pl.len().alias("n"),
            pl.struct(of_run).alias("runs"),
            pl.col("run_id").alias("run_ids"),
            pl.col("seed").alias("seeds"),
            *(count.alias(name) for name, count in RUN_COUNTS.items()),
            (pl.col("batch_requested") == "auto").fill_null(False).sum().alias("batch_searched"),
            pl.when(known).then(images.min()).alias("training_images_min"),
            pl.when(known).then(images.max()).alias("training_images_max"),
            pl.col(recipe_labels.COLUMN).first(),
            levers.str.contains('"lora_rank"').fill_null(False).first().alias("adapters"),
            differences().alias("differences"),
            metrics.mean(),
            metrics.min().name.suffix("_min"),
            metrics.max().name.suffix("_max"),
            metrics.count().name.suffix("_n"),
        )
    )
    order = sorted(table["gpu"].unique().drop_nulls().to_list(), key=gpu_order)
    rank = pl.col("gpu").replace_strict(order, range(len(order)), return_dtype=pl.Int64, default=None)
    order_by = ("site", "gpus", "nodes", "recipe", *COMPUTATION_KEYS, "comparability_key", "batch")
    return add_series(_add_statistics(table.sort("workload", "model", "variant", rank, *order_by, nulls_last=True)))


def _add_statistics(table: pl.DataFrame) -> pl.DataFrame:
    """Add the intervals of every metric, whether runs disagree, and how much those of the kind of cell scatter."""
    schema: dict[str, pl.DataType] = {f"{name}_{end}": REAL for name in METRICS for end in ("low", "high")}
    rows = []
    for runs in table["runs"].to_list():
        ends = [metric_interval(name, observations(runs, name)) or (None, None) for name in METRICS]
        rows.append([*chain(*ends), agreement.describe_disagreement(runs), agreement.is_withheld(runs)])
    table = table.hstack(pl.DataFrame(rows, schema | {"disagreement": STRING, "withheld": BOOL}, orient="row"))
    kinds: dict[tuple[Any, ...], list[list[dict[str, Any]]]] = {}
    for key, runs in zip(table.select(KIND_KEYS).rows(), table["runs"].to_list(), strict=True):
        kinds.setdefault(key, []).append(runs)
    scatter = {key: {name: list(scatter_of(cells, name)) for name in intervals.CARD_SD} for key, cells in kinds.items()}
    column = [scatter[key] for key in table.select(KIND_KEYS).rows()]
    return table.with_columns(
        pl.Series("scatter", column, dtype=pl.Struct(dict.fromkeys(intervals.CARD_SD, pl.List(REAL)))),
    )


def withhold_means(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the cells without the figures and runs of those whose runs disagree; lowest and highest run stay."""
    figures = [f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")]
    return cells.with_columns(pl.when(~pl.col("withheld")).then(pl.col(*figures, "runs")))


def differences(ignore: tuple[str, ...] = ()) -> pl.Expr:
    """Return what runs differ in of all covariates, e.g. `2 drivers, 3 cards`."""
    counts = {name: pl.col(name).drop_nulls().n_unique() for name in _COVARIATES if name not in ignore}
    shown = counts | {"gpu_uuid": RUN_COUNTS["cards"]}  # which may be several of a run
    differing = [
        pl.when(count > 1).then(pl.format("{} " + _COVARIATES[name], shown[name])) for name, count in counts.items()
    ]
    known = pl.col("sweep_id").is_not_null() & pl.col("point").is_not_null()
    points, attempts = (pl.struct("sweep_id", "point", *more).filter(known).n_unique() for more in ([], ["attempt"]))
    repeated = pl.format("further attempts of a point: {}", attempts - points)
    differing.append(pl.when(attempts > points).then(repeated))
    limits = pl.col("power_limit_w").null_count()
    text = pl.format("unknown power limit: {} runs", limits)
    differing.append(pl.when((limits > 0) & (limits < pl.len())).then(text))
    seeds = pl.struct(pl.coalesce("gpu_uuid", "node"), "seed").filter(pl.col("seed").is_not_null())
    repeats = pl.format("{} runs of one seed", seeds.len() - seeds.n_unique() + 1)
    differing.append(pl.when((seeds.len() > 1) & (seeds.n_unique() == 1)).then(repeats))
    # Without a digest of the code nothing tells what was changed.
    unknown = pl.col("code_version").str.ends_with("-dirty").fill_null(False).sum()
    differing.append(pl.when((unknown > 0) & (pl.len() > 1)).then(pl.format("uncommitted code: {} runs", unknown)))
    return pl.concat_str(differing, separator=", ", ignore_nulls=True)


def same_comparability_key(key: str | None) -> pl.Expr:
    """Select the runs that may belong to a cell with this key.

    A valid run must have the same key. One that ended early may know less of it: a key that this one begins with.
    """
    own = pl.col("comparability_key").fill_null("")
    prefix = pl.lit(f"{key or ''}, ").str.starts_with(pl.concat_str(own, pl.lit(", "))) | (own == "")
    return pl.when(pl.col("valid")).then(own == (key or "")).otherwise(prefix)


def metric_interval(metric: str, values: list[Observation]) -> tuple[float, float] | None:
    """Return the 95 % interval of a metric's mean, clipped to its possible values; None for less than `MIN_DF`."""
    ends = intervals.mean_interval(values, min_df=MIN_DF)
    return None if ends is None else (max(ends[0], 0.0), min(ends[1], METRICS[metric].upper_bound))


def scatter_of(cells: Iterable[Runs], metric: str) -> Variance:
    """Return the pooled variance of the runs of these cells."""
    return intervals.pooled_scatter(observations(runs, metric) for runs in cells)


def compare_runs(new: Runs, old: Runs, metric: str, scatter: Sequence[Variance]) -> Gain | None:
    """Return the runs of one cell over those of another; `scatter` is that of the two kinds of cells."""
    card_sd = intervals.CARD_SD.get(metric, math.inf)
    known = scatter if metric in intervals.CARD_SD else ()
    return intervals.gain(
        observations(new, metric), observations(old, metric), min_df=MIN_DF, card_sd=card_sd, scatter=known
    )


def compare(new: Cell, old: Cell, metric: str) -> Gain | None:
    """Return one cell over another, with an interval if at least three runs, cards or pairs support it."""
    scatter = [tuple(cell["scatter"].get(metric, intervals.UNKNOWN_SCATTER)) for cell in (new, old)]
    return compare_runs(new["runs"] or (), old["runs"] or (), metric, scatter)


def is_distinguishable(better: Cell, other: Cell, metric: str, *, lower_is_better: bool) -> bool:
    """Return whether the runs show that the first cell is the better one; `intervals.py` has the rule."""
    ratio = compare(better, other, metric)
    # One side has no positive value, so there is no ratio and no tie.
    return ratio is None or (not ratio.tie and (ratio.value < 0 if lower_is_better else ratio.value > 0))


def varying_keys(table: pl.DataFrame) -> list[str]:
    """Return the keys that differ between these cells; what is cached, only if the recipe does not tell it."""
    cached = table.group_by("recipe").agg(pl.col(CACHE_KEYS).n_unique() > 1).select(pl.col(CACHE_KEYS).any())
    told = {name: bool(cached[name][0]) for name in CACHE_KEYS if cached.height}
    return [name for name in LABEL_KEYS if told.get(name, table[name].n_unique() > 1)]


def key_text(row: Cell, name: str) -> str:
    """Return the value of a key as tables and labels show it; empty if there is nothing to say."""
    if row[name] is None:  # a model that has no variant, a workload that has no resolution
        return ""
    return _TEXTS.get(name, str)(row[recipe_labels.COLUMN if name == "recipe" else name])


def differing_work(cells: pl.DataFrame) -> list[str]:
    """Return the keys of the work that differ between these cells."""
    return [key for key in WORK_KEYS if cells[key].n_unique() > 1]


def work_text(row: Cell, cells: pl.DataFrame) -> str:
    """Return what the work of a cell differs in from that of others: `256 px`; empty if all do the same."""
    return ", ".join(filter(None, (key_text(row, key) for key in differing_work(cells))))


def add_series(table: pl.DataFrame) -> pl.DataFrame:
    """Add the label `series`: the GPU, and every key that varies within this table."""
    varying = varying_keys(table)
    if table.height and (table.group_by("gpu").agg(pl.col("site").n_unique())["site"] > 1).any():
        # Sites are named only if one GPU type ran at several: otherwise the GPU tells the site.
        varying.append("site")
    labels = []
    for row in table.iter_rows(named=True):
        levers = key_text(row, "recipe").split("+")
        in_recipe = row["precision"] and lever_name("precision", row["precision"]) in levers
        parts = [key_text(row, name) for name in varying if name != "precision" or not in_recipe]
        labels.append(" \u00b7 ".join([gpu_label(row["gpu"]), *filter(None, parts)]))
    return table.with_columns(pl.Series("series", labels, dtype=pl.String))


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times faster `fast` is than `slow`, over the batches that both have."""

    fast: str
    slow: str
    by_batch: dict[int, float]
    gains: dict[int, Gain | None]  # the same with intervals, if runs are known

    @property
    def text(self) -> str:
        """Return the range over batches: one decimal, a single number if both ends round to the same."""
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(self.by_batch.values()), max(self.by_batch.values())))
        return "\u2013".join(ends)


def series_ratios(table: pl.DataFrame, value: str) -> list[Ratio]:
    """Return the ratio of every two series at equal batch, the slower series first.

    `table` has series, batch and the value's column. If its rows are cells, the ratios are those of geometric means
    over runs.
    """
    series: dict[str, dict[int, Cell]] = {}
    for row in table.filter(pl.col(value) > 0).iter_rows(named=True):
        series.setdefault(row["series"], {})[row["batch"]] = row
    # One order for all batches, so that a pair has the same denominator everywhere.
    speed = {name: geometric_mean(row[value] for row in rows.values()) for name, rows in series.items()}
    result = []
    for slow, fast in combinations(sorted(series, key=lambda name: (speed[name], name)), 2):
        ratio = Ratio(fast=fast, slow=slow, by_batch={}, gains={})
        for batch in sorted(series[slow].keys() & series[fast].keys()):
            new, old = series[fast][batch], series[slow][batch]
            change = compare(new, old, value) if "runs" in new else None
            ratio.gains[batch] = change
            ratio.by_batch[batch] = 1 + change.value if change else new[value] / old[value]
        result += [ratio] if ratio.by_batch else []
    return result
