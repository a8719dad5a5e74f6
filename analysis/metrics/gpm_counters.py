"""Performance counters of the GPU over the measure windows: means of samples that are means themselves.

A row of samples_gpm is the mean over the `window_ms` before its time. A column is the mean over the GPUs of the mean
of their rows, each weighted by the part of its own window that lies in the measure windows. Older runs may also have
rows of a dcgm-exporter, which had a clock of its own: they are not used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import polars as pl

from analysis.columns import COUNTERS

from .facts import Columns
from .gpu_samples import Floats, Ints, Span, null_reasons

GPM, NONE = "gpm", "none"
MIN_COVERAGE_PCT = 80.0  # percent of the measure windows, by rows; 1 Hz rows leave up to a second at either edge
MIN_INSIDE = 0.5  # share of a GPM row's window: a value that is mostly of another time does not belong here


class WeightedMean(NamedTuple):
    """A mean, and the share of the measure windows that its rows cover."""

    value: float | None
    coverage_pct: float


def find_counters(samples: pl.DataFrame, uuids: set[str], spans: list[Span]) -> Columns:
    """Return the counters and their source from the samples of the run's GPUs, `uuids`."""
    own = samples.with_columns(pl.col("gpu_uuid", "nulls").cast(pl.String))
    own = own.filter(pl.col("gpu_uuid").is_in(sorted(uuids)))
    if own.is_empty():
        reason = "no samples_gpm of the run's GPUs"
        return Columns(values={"counters_source": NONE}, reasons=dict.fromkeys(COUNTERS, reason))
    means = {name: _mean_over_gpus(own, name, uuids, spans) for name in COUNTERS}
    values: dict[str, float | str | None] = {name: mean.value for name, mean in means.items()}
    values["counters_source"] = NONE if all(value is None for value in values.values()) else GPM
    reasons, needed = null_reasons(own["nulls"]), f"{MIN_COVERAGE_PCT:.0f} % are needed"
    for name, mean in means.items():
        reasons.setdefault(name, f"{GPM} counters cover {mean.coverage_pct:.0f} % of the measure windows, {needed}")
    return Columns(values=values, reasons={name: reasons[name] for name in COUNTERS})


def _mean_over_gpus(samples: pl.DataFrame, name: str, uuids: set[str], spans: list[Span]) -> WeightedMean:
    """Return the mean over GPUs, without a value if one of them is not covered."""
    means = []
    for uuid in sorted(uuids):
        rows = samples.filter((pl.col("gpu_uuid") == uuid) & pl.col(name).is_not_null() & (pl.col("window_ms") > 0))
        window_ns = (rows["window_ms"].cast(pl.Float64) * 1e6).round().cast(pl.Int64).to_numpy()
        value = rows[name].cast(pl.Float64).to_numpy()
        means.append(weighted_mean(rows["t_mono_ns"].to_numpy(), window_ns, value, spans))
    coverage_pct = min((mean.coverage_pct for mean in means), default=0.0)
    known = [mean.value for mean in means if mean.value is not None]
    if not means or len(known) < len(means) or coverage_pct < MIN_COVERAGE_PCT:
        return WeightedMean(None, coverage_pct)
    return WeightedMean(math.fsum(known) / len(known), coverage_pct)


def weighted_mean(t_ns: Ints, window_ns: Ints, value: Floats, spans: list[Span]) -> WeightedMean:
    """Return the mean of rows over `spans`, weighted by overlap, and the share of the spans that they cover.

    A row counts if at least the share MIN_INSIDE of its window is inside. The result does not depend on the order
    of the rows, and lies within the values that it is made of.
    """
    begin = t_ns - window_ns
    weight = np.zeros(len(t_ns), dtype=np.int64)
    for start, end in spans:
        # The overlaps add up: the window of one row may reach into two spans.
        weight += np.clip(np.minimum(t_ns, end) - np.maximum(begin, start), 0, None)
    counts = (weight >= MIN_INSIDE * window_ns) & (weight > 0)
    total_ns = sum(end - start for start, end in spans)
    if not counts.any() or total_ns <= 0:
        return WeightedMean(None, 0.0)
    known, weights = value[counts], weight[counts].astype(np.float64)
    mean = math.fsum(known * weights) / math.fsum(weights)
    covered_ns = sum(_union_ns(begin[counts], t_ns[counts], *span) for span in spans)
    return WeightedMean(float(np.clip(mean, known.min(), known.max())), 100 * covered_ns / total_ns)


def _union_ns(begin: Ints, end: Ints, low: int, high: int) -> int:
    """Return the length that intervals cover between low and high; if they overlap it counts once."""
    order = np.lexsort((end, begin))
    first, last = np.clip(begin[order], low, high), np.clip(end[order], low, high)
    # How far the intervals before each one reach: only what lies beyond is counted for it.
    reached = np.concatenate([[low], np.maximum.accumulate(last)[:-1]])
    return int(np.clip(last - np.maximum(first, reached), 0, None).sum())
