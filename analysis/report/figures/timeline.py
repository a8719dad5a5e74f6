"""A timeline per run: power, utilization, SM clock, temperature and, if the GPU has them, hardware counters."""

from functools import cache
from typing import NamedTuple

import altair as alt
import polars as pl
import polars.selectors as cs

from analysis.dataset import Dataset
from analysis.stats.cells import CELL_KEYS
from analysis.units import number
from inpaint_bench.core.console import pluralize

from . import base, svg
from .base import Figure, Limits, Row, Spec

READING = (
    "Time 0 is the start of the measurement window. Strong shade: measurement window; faint shade: other windows. "
    "Line and band: mean, minimum and maximum per bin, over all cards of the run. Active, if the GPU has counters: "
    "SMs solid, tensor cores dashed. Coloured in the panel of the SM clock: throttled for more than 1 % of the time "
    "between two samples, by the power cap (ochre) or by temperature or power brake (red). Dotted red lines: events, "
    "named in the caption. All timelines share their scales."
)
BINS = 180
MARGIN_NS = 60 * 10**9  # a timeline reaches at most this far before the first and after the last window
WIDTH = 300
MAX_RUNS = 60  # if there are more runs, one per cell is drawn
MAX_NAMED = 6  # events that the caption names
_WINDOW_OPACITY = {"measure": 0.2, "warmup": 0.09, "validation": 0.09, "checkpoint": 0.09}
POWER_CAP, THERMAL = "power cap", "temperature"
_THROTTLE_COLOURS = {POWER_CAP: svg.SERIES[4], THERMAL: svg.SERIES[7]}
_COUNTERS = {  # cause -> cumulative counters of samples_slow
    POWER_CAP: ("throttle_power_cap_ns",),
    THERMAL: ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_power_brake_ns"),
}
MIN_SHARE = 0.01  # share of the time between two samples spent throttled; less is normal clock regulation
_EVENTS = {"xid": "Xid", "co_tenant": "co-tenant", "power_limit": "power limit", "gpu_lost": "GPU lost"}


class _Panel(NamedTuple):
    table: str
    columns: tuple[str, ...]  # the first is drawn with its band, the second dashed
    axis: str
    margin: float = 0.0  # at least this much above and below, so that a constant is a level line


_PANELS = (
    _Panel("samples_fast", ("power_instant_w",), "Power [W]"),
    _Panel("samples_fast", ("gpu_util_pct",), "Util. [%]"),
    _Panel("samples_gpm", ("sm_active_pct", "tensor_active_pct"), "Active [%]"),
    _Panel("samples_slow", ("sm_clock_mhz",), "SM [MHz]", 60),
    _Panel("samples_slow", ("temp_gpu_c",), "Temp. [\u00b0C]", 2),
)
_POWER, _CLOCK = _PANELS[0], _PANELS[3]  # the highest panel, and the one in which throttling is shaded
_Datasets = dict[str, pl.DataFrame]  # `windows`, `throttled`, `events`, and the bins of every column of the panels


def draw(dataset: Dataset, colours: dict[str, str]) -> list[Figure]:
    """Draw one timeline per run that has samples, all with the same axes; a GPU without a colour is grey.

    If there are more than MAX_RUNS runs, only one per cell is read and drawn: more would make the page slow.
    """
    runs = dataset.runs
    if runs.height > MAX_RUNS:
        # Valid runs come first, because the first run of each cell is kept.
        runs = runs.sort("valid", descending=True, maintain_order=True)
        runs = runs.unique(CELL_KEYS, keep="first", maintain_order=True).head(MAX_RUNS)
    timelines = [(run, data) for run in runs.iter_rows(named=True) if (data := _read(dataset, run))]
    limits = [_limits(panel, [data[column] for _, data in timelines for column in panel.columns]) for panel in _PANELS]
    return [_draw(run, data, limits, colours.get(run["gpu"], svg.MUTED)) for run, data in timelines]


def bin_samples(samples: pl.LazyFrame, column: str, origin_ns: int, bins: int = BINS) -> pl.DataFrame:
    """Return (t, low, mean, high) per bin in seconds since the origin, over all cards of the run, without nulls."""
    t = (pl.col("t_mono_ns") - origin_ns) / 1e9
    rows = samples.select(t=t, value=pl.col(column).cast(pl.Float64)).drop_nulls().collect()
    first, width = pl.col("t").min(), (pl.col("t").max() - pl.col("t").min()) / bins
    index = ((pl.col("t") - first) / pl.when(width > 0).then(width).otherwise(1.0)).floor().clip(0, bins - 1)
    value = pl.col("value")
    binned = rows.group_by(index.alias("bin")).agg(
        pl.col("t").mean(), low=value.min(), mean=value.mean(), high=value.max()
    )
    return binned.sort("bin").drop("bin")


def _read(dataset: Dataset, run: Row) -> _Datasets | None:
    """Return the data of a run's timeline, with times in seconds since its origin; None if it has no samples."""
    start, end = pl.col("t_start_mono_ns"), pl.col("t_end_mono_ns")
    windows = dataset.windows.filter((pl.col("run_id") == run["run_id"]) & start.is_not_null() & end.is_not_null())
    tables = {}
    for name in dict.fromkeys(panel.table for panel in _PANELS):
        columns = [column for panel in _PANELS if panel.table == name for column in panel.columns]
        columns += [column for counters in _COUNTERS.values() for column in counters] if name == "samples_slow" else []
        samples = own_samples(dataset.scan(name, run["run_id"]), run, windows)
        # Collected once here: each column and the throttling would read the files again.
        tables[name] = samples.select("gpu_uuid", "t_mono_ns", *columns).collect().lazy()
    time = pl.col("t_mono_ns")
    first, last = tables["samples_fast"].select(first=time.min(), last=time.max()).collect().row(0)
    if first is None:
        return None
    # Zero is the start of the measurement, or else the first sample.
    origin = min(windows.filter(pl.col("kind") == "measure")["t_start_mono_ns"], default=first)
    span = (first - MARGIN_NS, last + MARGIN_NS)
    opacity = pl.col("kind").replace_strict(_WINDOW_OPACITY, default=0.0)
    colour = pl.col("cause").replace_strict(_THROTTLE_COLOURS)
    bins = {column: bin_samples(tables[panel.table], column, origin) for panel in _PANELS for column in panel.columns}
    return bins | {
        "windows": windows.select("kind", t=(start - origin) / 1e9, t_end=(end - origin) / 1e9, opacity=opacity),
        "throttled": _throttled(tables["samples_slow"], origin).with_columns(colour=colour),
        "events": _events(dataset.scan("events", run["run_id"]), _gpu_uuids(run), span, origin),
    }


def _throttled(samples: pl.LazyFrame, origin_ns: int) -> pl.DataFrame:
    """Return (cause, t, t_end) in seconds since the origin: when a counter of any card grew.

    Intervals that are less than a bin apart are joined.
    """
    now = pl.col("t_mono_ns")
    counters = [pl.col(name).cast(pl.Int64) for columns in _COUNTERS.values() for name in columns]
    rows = samples.select("gpu_uuid", now, *counters).sort("gpu_uuid", now).collect()
    bin_ns = rows.select((now.max() - now.min()) / BINS).item() or 0.0
    frames = []
    for cause, columns in _COUNTERS.items():
        grew = pl.any_horizontal(pl.col(name).diff() > MIN_SHARE * now.diff() for name in columns).over("gpu_uuid")
        # Between two samples the counter only tells that it grew: all of the time between them is shaded.
        pairs = rows.select(start=now.shift(1).over("gpu_uuid"), end=now, grew=grew).filter("grew").sort("start")
        # Over all cards: an interval is new if none of those before it comes within a bin of its start.
        is_new = (pl.col("start") - pl.col("end").cum_max().shift(1) > bin_ns).fill_null(True)
        merged = pairs.group_by(is_new.cum_sum().alias("interval"), maintain_order=True).agg(
            t=(pl.col("start").min() - origin_ns) * 1e-9, t_end=(pl.col("end").max() - origin_ns) * 1e-9
        )
        frames.append(merged.select("t", "t_end", cause=pl.lit(cause)))
    return pl.concat(frames)


def _events(table: pl.LazyFrame, gpu_uuids: list[str], span_ns: tuple[int, int], origin_ns: int) -> pl.DataFrame:
    """Return (t, detail) of what happened to these cards, or to no particular one, within the time span."""
    uuid, kind, detail = pl.col("gpu_uuid").cast(pl.String), pl.col("kind").cast(pl.String), pl.col("detail")
    relevant = kind.is_in(list(_EVENTS)) & pl.col("t_mono_ns").is_between(*span_ns)
    if gpu_uuids:
        relevant &= uuid.is_in(gpu_uuids) | uuid.is_null()
    name, detail = kind.replace_strict(_EVENTS), detail.cast(pl.String).fill_null("")
    # The detail of an Xid is its number.
    between = pl.when((kind == "xid") | (detail == "")).then(pl.lit(" ")).otherwise(pl.lit(": "))
    t = (pl.col("t_mono_ns") - origin_ns) * 1e-9
    return (
        table.filter(relevant)
        .sort("t_mono_ns")
        .select(t=t, detail=(name + between + detail).str.strip_chars())
        .collect()
    )


def _gpu_uuids(run: Row) -> list[str]:
    return run["gpu_uuid"].split(", ") if run["gpu_uuid"] else []


def own_samples(samples: pl.LazyFrame, run: Row, windows: pl.DataFrame) -> pl.LazyFrame:
    """Return the samples of the run's own cards near its windows.

    A requeued job also has samples of another node, whose monotonic clock is another one.
    """
    if gpu_uuids := _gpu_uuids(run):
        samples = samples.filter(pl.col("gpu_uuid").cast(pl.String).is_in(gpu_uuids))
    if windows.height:
        first, last = min(windows["t_start_mono_ns"]), max(windows["t_end_mono_ns"])
        samples = samples.filter(pl.col("t_mono_ns").is_between(first - MARGIN_NS, last + MARGIN_NS))
    return samples


def _limits(panel: _Panel, frames: list[pl.DataFrame]) -> Limits:
    if panel.axis.endswith("[%]"):
        return (0.0, 104.0)  # a line along 100 must not be cut in half
    bins = pl.concat(frames) if frames else pl.DataFrame()
    if bins.is_empty():
        return (0.0, 1.0)
    low, high = min(bins["low"]), max(bins["high"])
    margin = max(0.05 * (high - low), panel.margin)
    return (0.0, high * 1.16) if panel is _POWER else (low - margin, high + margin)


def _draw(run: Row, data: _Datasets, limits: list[Limits], colour: str) -> Figure:
    # A panel that nobody sampled is left out, but power and utilization are always there: empty, they say so.
    shown = tuple(
        (panel, domain)
        for panel, domain in zip(_PANELS, limits, strict=True)
        if panel.table == "samples_fast" or any(data[column].height for column in panel.columns)
    )
    sampled = pl.concat([frame["t"] for name, frame in data.items() if name not in ("windows", "throttled")])
    ends = (min(sampled, default=0.0), max(sampled, default=0.0))
    for name in ("windows", "throttled"):
        # Shades end with the samples: a longer one would stretch the axis.
        data[name] = data[name].with_columns(pl.col("t", "t_end").clip(*ends))
    rounded = {name: frame.with_columns(cs.float().round_sig_figs(5)) for name, frame in data.items()}
    datasets = {name: frame.to_dicts() for name, frame in rounded.items()}
    spec = {**_spec(shown, colour), "datasets": datasets}
    title, run_id = base.run_title(run), run["run_id"]
    return base.figure(f"timeline-{run_id}", title, run_id, [_caption(run, data["events"])], spec, [run_id])


# The charts of runs differ in their data only, and Altair takes longer to build one than vl-convert to draw it.
@cache
def _spec(panels: tuple[tuple[_Panel, Limits], ...], colour: str) -> Spec:
    x = alt.X("t:Q").scale(nice=False).axis(None)
    t_end = alt.X2("t_end:Q")
    opacity, cause = alt.Opacity("opacity:Q", scale=None), alt.Color("colour:N", scale=None)
    windows = _chart("windows").mark_rect(color=svg.MUTED)
    throttled = _chart("throttled").mark_rect(opacity=0.35)
    events = _chart("events").mark_rule(color=svg.SERIES[7], strokeWidth=1.2, strokeDash=[2, 2])
    rows = []
    for panel, domain in panels:
        if panel is panels[-1][0]:
            x = x.axis(title="Time [s]")
        layers = [windows.encode(x, t_end, opacity)]
        layers += [throttled.encode(x, t_end, cause)] if panel is _CLOCK else []
        layers += [*_curves(panel, domain, x, colour), events.encode(x)]
        rows.append(alt.layer(*layers).properties(width=WIDTH, height=84 if panel is _POWER else 52))
    return svg.to_spec(alt.vconcat(*rows, spacing=10).resolve_scale(x="shared"))


def _chart(dataset: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(dataset))


def _curves(panel: _Panel, domain: Limits, x: alt.X, colour: str) -> list[alt.Chart]:
    y = alt.Y("mean:Q").scale(domain=domain, nice=False, zero=False).title(panel.axis)
    y = y.axis(tickCount=3, minExtent=30, titlePadding=8)
    band = _chart(panel.columns[0]).mark_area(color=colour, opacity=0.3, clip=True)
    curves = [band.encode(x, alt.Y("low:Q"), alt.Y2("high:Q"))]
    for index, column in enumerate(panel.columns):
        dash = {"strokeDash": [3, 2]} if index else {}
        curves.append(_chart(column).mark_line(color=colour, strokeWidth=1.4, clip=True, **dash).encode(x, y))
    return curves


def _caption(run: Row, events: pl.DataFrame) -> str:
    """Return how long the run was throttled, and what happened to it."""
    parts = []
    clock, limit = run["sm_clock_mhz_mean"], run["sm_clock_mhz_limit"]
    kept = f", with the SM clock at {100 * clock / limit:.0f} % of its maximum" if clock and limit else ""
    causes = ("throttle_power_pct", "at the power cap", kept), ("throttle_thermal_pct", "thermally throttled", "")
    for column, text, more in causes:
        if run[column] is not None and run[column] >= 100 * MIN_SHARE:
            parts.append(f"{text} for {number(run[column])} % of the measurement window{more}")
    named = events.head(MAX_NAMED)
    parts += [f"{detail} at {t:.1f} s" for t, detail in named.select("t", "detail").iter_rows()]
    parts += [pluralize(events.height - named.height, "more event")] if events.height > named.height else []
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
