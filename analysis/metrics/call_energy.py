"""The energy counter at the times of single calls, so that a report can tell the energy of cases within a run."""

from __future__ import annotations

import numpy as np
import polars as pl

from inpaint_bench.core.schema import POWERS

from .gpu_samples import COUNTER, FILLED, GpuSamples

# A case has to last so many updates of the counter, or readings if these are rarer: either of its edges is wrong by
# up to one, together by 10 %.
MIN_UPDATES = 20
COLUMNS = ("counter_start_j", "counter_end_j", "counter_update_s")


def add_counter(calls: pl.DataFrame, samples: pl.DataFrame) -> pl.DataFrame:
    """Add the counter (J, of all GPUs) at `t_start_mono_ns` and `t_end_mono_ns` of one run's calls, and its period.

    Null if the samples do not reach the call, or the counter is unknown or goes back.
    """
    edges = [calls[name].cast(pl.Float64).to_numpy() for name in ("t_start_mono_ns", "t_end_mono_ns")]
    start_j, end_j = np.zeros(calls.height), np.zeros(calls.height)
    periods_s = []
    nothing = [pl.lit(None, pl.Float64).alias(name) for name in COLUMNS]
    for gpu in GpuSamples.split(samples, [COUNTER, *(name for name in POWERS if name in samples.columns)]):
        gpu.fill_counter()
        update_s, known = gpu.update_s(), gpu.known(FILLED)
        counter = known.columns[FILLED]
        if not known.ordered or update_s is None or (np.diff(counter) < 0).any():
            return calls.with_columns(nothing)
        periods_s.append(max(update_s, float(np.median(np.diff(gpu.known(COUNTER).t_ns))) * 1e-9))
        for total_j, at_ns in zip((start_j, end_j), edges, strict=True):
            total_j += np.interp(at_ns, known.t_ns, counter, left=np.nan, right=np.nan) / 1000
    if not periods_s:
        return calls.with_columns(nothing)
    values = (start_j, end_j, np.full(calls.height, max(periods_s)))
    series = [pl.Series(name, value).fill_nan(None) for name, value in zip(COLUMNS, values, strict=True)]
    return calls.with_columns(series)
