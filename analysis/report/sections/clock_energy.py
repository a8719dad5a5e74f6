"""Energy and speed over the SM clock inside runs, and over the power limits of runs.

A run is cut at its readings of the SM clock, one a second. A part's images come from the device times of the steps, its
energy from the counter.
"""

from typing import Any, NamedTuple

import numpy as np
import polars as pl

from analysis.columns import METRICS
from analysis.dataset import Dataset
from analysis.metrics.gpu_samples import COUNTER, FILLED, GpuSamples
from analysis.report.estimate import Estimate
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, count_runs, counts, mean_text
from analysis.stats.cells import CELL_KEYS
from analysis.stats.intervals import MIN_DF, gain
from analysis.units import number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import POWERS, WindowKind

MIN_SPAN = 0.05  # least span of the SM clock: 95th over 5th percentile of a run, less 1
MIN_PARTS = 9  # three in each third
TITLE = "Energy over the SM clock and the power limit"
_NOTE = (
    "The highest third of the clocks of each run over the lowest third, as a ratio of means; interval over runs. A "
    "reading is of one moment of a step. At a fixed power limit the clock falls where the work draws more, so this is "
    "a correlation, and does not say what a lower limit would do."
)
_LIMITS = "Where you may set limits, sweep telemetry.power_limit_w and merge with --allow-mixed power_limit."


class Third(NamedTuple):
    """Means of the parts of a run."""

    clock_mhz: float
    images_per_s: float
    joules_per_image: float


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section; empty if no run on one GPU has clocks, counter and steps."""
    runs = build.runs.filter("valid", gpus=1).drop_nulls("images_per_s")["run_id"]
    readable = {run_id: parts for run_id in runs if len(parts := _parts(dataset, run_id)) >= MIN_PARTS}
    thirds = {}
    for run_id, parts in readable.items():
        low, high = np.percentile(parts[:, 0], (5, 95))
        if high >= (1 + MIN_SPAN) * low:
            ordered, size = parts[parts[:, 0].argsort(kind="stable")], len(parts) // 3
            thirds[run_id] = _third(ordered[:size]), _third(ordered[-size:])
    limits = _by_limit(build)
    if not readable and not limits.rows:
        return []
    said = f"The SM clock varied by at least {100 * MIN_SPAN:.0f} % (5th to 95th percentile) in {len(thirds)} of "
    said += f"{pluralize(len(readable), 'run')} with at least {MIN_PARTS} readings."
    said += "" if thirds else " That is too little to show how energy depends on the clock."
    tables = [table for table in (_by_clock(build, thirds), limits) if table.rows]
    return [Section(title=TITLE, paragraphs=[said, *([] if limits.rows else [_LIMITS])], tables=tables)]


def _third(parts: np.ndarray[Any, Any]) -> Third:
    return Third(parts[:, 0].mean(), parts[:, 1].sum() / parts[:, 3].sum(), parts[:, 2].sum() / parts[:, 1].sum())


def _parts(dataset: Dataset, run_id: str) -> np.ndarray[Any, Any]:
    """Return clock [MHz], images, joules and seconds of each part of the measure windows, as rows."""
    windows = dataset.windows.filter(pl.col("run_id") == run_id, kind=WindowKind.MEASURE.value)
    clocks = dataset.scan("samples_slow", run_id).select("t_mono_ns", "sm_clock_mhz")
    slow = clocks.drop_nulls().sort("t_mono_ns").collect()
    columns = [COUNTER, *POWERS]
    fast = dataset.scan("samples_fast", run_id).select("t_mono_ns", "tick_seq", "gpu_uuid", *columns)
    samples = GpuSamples.split(fast.collect(), columns) if slow["sm_clock_mhz"].n_unique() > 1 else []
    if not samples:
        return np.empty((0, 4))
    samples[0].fill_counter()
    energy = samples[0].known(FILLED)
    steps = dataset.scan("steps", run_id).select("window_id", "t_end_mono_ns", "device_ms", "images").collect()
    parts = []
    for window in windows.drop_nulls("t_end_mono_ns").iter_rows(named=True):
        start, end = window["t_start_mono_ns"], window["t_end_mono_ns"]
        own = steps.filter(pl.col("window_id").cast(pl.String) == window["window_id"])
        inside = slow.filter(pl.col("t_mono_ns").is_between(start, end))
        if own.is_empty() or inside.height < 2 or not len(energy.t_ns):
            continue
        # The host may queue steps far ahead of the device, which is idle at both ends of a window.
        device = own["device_ms"].cast(pl.Float64).cum_sum().to_numpy()
        known = not own["device_ms"].null_count()
        ends = start + (end - start) * device / device[-1] if known else own["t_end_mono_ns"].to_numpy()
        at = inside["t_mono_ns"].to_numpy()
        images = np.interp(at, np.r_[start, ends], np.r_[0, own["images"].cast(pl.Int64).cum_sum().to_numpy()])
        joules = np.interp(at, energy.t_ns, energy.columns[FILLED] / 1e3)
        clock = inside["sm_clock_mhz"].cast(pl.Float64).to_numpy()
        parts.append(np.c_[(clock[1:] + clock[:-1]) / 2, np.diff(images), np.diff(joules), np.diff(at) / 1e9])
    return np.concatenate(parts) if parts else np.empty((0, 4))


def _by_clock(build: TableBuilder, thirds: dict[str, tuple[Third, Third]]) -> Table:
    rows, row_runs = [], []
    for cell in build.cells.iter_rows(named=True):
        if not (runs := [run_id for run_id in cell["run_ids"] if run_id in thirds]):
            continue
        shown, ratios = [], []
        for name in Third._fields:
            low, high = ([(run, getattr(thirds[run][end], name)) for run in runs] for end in (0, 1))
            shown.append(" \u2192 ".join(number(np.mean([value for _, value in end])) for end in (low, high)))
            change = gain(high, low, min_df=MIN_DF)
            bounds = [1 + end for end in (change.low, change.high) if end is not None] if change else []
            ratios.append(Estimate(1 + change.value, *bounds, form="{:.3f}".format) if change else DASH)
        counted = counts(count_runs(build.runs.filter(pl.col("run_id").is_in(runs))))
        rows.append([cell["series"], str(cell["batch"] or DASH), *counted, *shown, *ratios[1:]])
        row_runs.append(runs)
    columns = ["Cell", "Batch", *COUNTS, "SM clock [MHz]", "images/s", "J/image", "images/s, ratio", "J/image, ratio"]
    title = "Inside runs, from the lowest to the highest clocks"
    return build.table("clock-energy", title, columns, rows, note=_NOTE, row_runs=row_runs)


def _by_limit(build: TableBuilder) -> Table:
    """Return the cells that differ in the power limit alone, the best of each group in bold."""
    limit = dict(build.runs.select("run_id", "power_limit_w").iter_rows())
    cells = build.cells.with_columns(
        pl.col("run_ids").list.first().replace_strict(limit, return_dtype=pl.Float64).alias("limit_w")
    ).drop_nulls(["limit_w", "images_per_s", "joules_per_image"])
    rows = []
    groups = cells.partition_by([name for name in CELL_KEYS if name != "comparability_key"], maintain_order=True)
    for group in (each.sort("limit_w") for each in groups if each["limit_w"].n_unique() > 1):
        best = {group["joules_per_image"].arg_min(): "J/image", group["images_per_s"].arg_max(): "cost"}
        if len(best) == 1:
            best = dict.fromkeys(best, "J/image and cost")
        for i, cell in enumerate(group.iter_rows(named=True)):
            figures = (mean_text(cell, name) for name in ("images_per_s", "joules_per_image", "energy_error_pct"))
            keys = [cell["series"], str(cell["batch"] or DASH)]
            rows.append([*keys, number(cell["limit_w"]), *counts(cell), *figures, best.get(i, DASH)])
    columns = ["Cell", "Batch", "Limit [W]", *COUNTS, "images/s", "J/image"]
    columns += [METRICS["energy_error_pct"].heading, "Best for"]
    note = "Cost is that of time: the fastest limit costs least where a GPU-hour has one price. By the means."
    return build.table("power-limits", "Power limits that were measured", columns, rows, note=note)
