"""Counters of the GPU over the measure windows: means of a table whose rows are means themselves.

A row of samples_gpm is the mean over the `window_ms` before its time. A figure is the mean over the GPUs of the mean
of their rows, each weighted by the part of its own window that lies in the measure windows. GPM's values and those
of a DCGM exporter are two sources: a run has figures of one of them, and `counters_source` says of which. An
exporter's `window_ms` is only a bound on how old its value may be: such a row counts where the whole of it is inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from analysis.columns import COUNTERS
from analysis.ingest import migrate, parts

from .energy import Floats, Ints

Window = tuple[int, int]
GPM, NONE = "gpm", "none"
MIN_COVERAGE_PCT = 80.0  # of the measure windows, by rows; 1 Hz rows leave up to a second at either edge
MIN_INSIDE = 0.5  # of the window of a row of GPM: a value that is mostly of another time is not of this one


@dataclass(frozen=True, kw_only=True)
class Mean:
    value: float | None
    coverage_pct: float  # share of the measure windows that rows with a value cover


def figures(
    row: dict[str, Any],
    manifest: Mapping[str, Any],
    samples: pl.DataFrame,
    uuids: set[str],
    spans: list[Window],
    nulls: dict[str, str],
) -> None:
    """Fill the row's counters and where they come from. `uuids`: the run's GPUs; of others nothing is taken."""
    mine = samples if samples.is_empty() else samples.filter(pl.col("gpu_uuid").is_in(sorted(uuids)))
    row["counters_source"] = NONE
    why: dict[str, str] = {}
    for source in _sources(mine):
        rows = mine.filter(_source() == source)
        least = MIN_INSIDE if source == GPM else 1.0
        found = {name: _over_gpus(rows, name, uuids, spans, least) for name in COUNTERS}
        said = parts.null_reasons(rows["nulls"])
        for name, one in found.items():
            share = f"{source} counters cover {one.coverage_pct:.0f} % of the measure windows"
            why[name] = said.get(name) or f"{share}, {MIN_COVERAGE_PCT:.0f} % are needed"
        if any(one.value is not None for one in found.values()):
            row["counters_source"] = source
            row.update({name: one.value for name, one in found.items()})
            break
    absent = migrate.reason(manifest, "no samples_gpm of the run's GPUs")
    for name in COUNTERS:
        if row[name] is None:
            nulls.setdefault(name, why.get(name, absent))


def _source() -> pl.Expr:
    """`gpm`, read or replayed, or the exporter's own name, `dcgm:<host:port>`."""
    given = pl.col("source")
    return pl.when(given.str.starts_with("dcgm")).then(given).otherwise(pl.lit(GPM))


def _sources(samples: pl.DataFrame) -> list[str]:
    """GPM before any exporter: its windows are ours, an exporter's values may be of long ago."""
    if samples.is_empty():
        return []
    found = samples.select(_source().alias("source"))["source"].drop_nulls().unique().to_list()
    return sorted(found, key=lambda source: (source != GPM, source))


def _over_gpus(samples: pl.DataFrame, name: str, uuids: set[str], spans: list[Window], least: float) -> Mean:
    """Mean over GPUs; none where one of them is not covered."""
    means = []
    for uuid in sorted(uuids):
        rows = samples.filter((pl.col("gpu_uuid") == uuid) & pl.col(name).is_not_null() & (pl.col("window_ms") > 0))
        window_ns = (rows["window_ms"].cast(pl.Float64) * 1e6).round().cast(pl.Int64).to_numpy()
        value = rows[name].cast(pl.Float64).to_numpy()
        means.append(weighted_mean(rows["t_mono_ns"].to_numpy(), window_ns, value, spans, least))
    covered = min((one.coverage_pct for one in means), default=0.0)
    known = [one.value for one in means if one.value is not None]
    if not means or len(known) < len(means) or covered < MIN_COVERAGE_PCT:
        return Mean(value=None, coverage_pct=covered)
    return Mean(value=math.fsum(known) / len(known), coverage_pct=covered)


def weighted_mean(t_ns: Ints, window_ns: Ints, value: Floats, spans: list[Window], least: float = MIN_INSIDE) -> Mean:
    """Mean of rows over `spans`, weighted by overlap, and the share of the spans that they cover.

    A row counts where at least so much of its window is inside.
    The same whatever the order of the rows, and never outside of the values it is made of.
    """
    begin = t_ns - window_ns
    inside = np.zeros((len(spans), len(t_ns)), dtype=np.int64)
    for place, (start, end) in enumerate(spans):
        inside[place] = np.clip(np.minimum(t_ns, end) - np.maximum(begin, start), 0, None)
    weight = inside.sum(axis=0)
    counts = weight >= least * window_ns
    whole = sum(end - start for start, end in spans)
    if not (counts & (weight > 0)).any() or whole <= 0:
        return Mean(value=None, coverage_pct=0.0)
    known, weights = value[counts], weight[counts].astype(np.float64)
    middle = math.fsum(known * weights) / math.fsum(weights)
    covered = sum(_union(begin[counts], t_ns[counts], *span) for span in spans)
    return Mean(value=float(np.clip(middle, known.min(), known.max())), coverage_pct=100 * covered / whole)


def _union(begin: Ints, end: Ints, low: int, high: int) -> int:
    """Length of what intervals cover between low and high, what several cover once."""
    order = np.lexsort((end, begin))
    first, last = np.clip(begin[order], low, high), np.clip(end[order], low, high)
    reached = np.concatenate([[low], np.maximum.accumulate(last)[:-1]])
    return int(np.clip(last - np.maximum(first, reached), 0, None).sum())
