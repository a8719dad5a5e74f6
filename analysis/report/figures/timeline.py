"""One strip per run: power, utilisation, clock and temperature over time, the counters of Hopper where there are any.

Windows and throttling are shaded, events are marked. Thinned for the page to min, mean and max per bin, so a spike
of one sample still shows; the data stay whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis.dataset import Dataset
from analysis.stats.cells import CELL_KEYS
from analysis.units import number

from . import base, svg, throttle_events
from .base import Figure, Row, Spec, layer

BINS = 180
NEAR_NS = 60 * 10**9  # how far before the first and after the last window a strip may reach
WIDTH = 300
MANY = 60  # runs; more, and only one of each cell is drawn
MARKED = 6  # events with a word beside them; the caption names the first ones
_SHADE = {"measure": 0.2, "warmup": 0.09, "validation": 0.09, "checkpoint": 0.09}
_HELD = {throttle_events.CAP: svg.SERIES[4], throttle_events.HEAT: svg.SERIES[7]}
_DASH = [3, 2]


@dataclass(frozen=True, kw_only=True)
class _Panel:
    table: str
    columns: tuple[str, ...]  # the first with its band, the second dashed
    axis: str
    height: int = 52
    edge: float = 0.0  # least room above and below, so that a constant stays a level line on a calm axis
    held: bool = False  # whether throttling is shaded here


_PANELS = (
    _Panel(table="samples_fast", columns=("power_instant_w",), axis="Power [W]", height=84),
    _Panel(table="samples_fast", columns=("gpu_util_pct",), axis="Util. [%]"),
    _Panel(table="samples_gpm", columns=("sm_active_pct", "tensor_active_pct"), axis="Active [%]"),
    _Panel(table="samples_slow", columns=("sm_clock_mhz",), axis="SM [MHz]", edge=60, held=True),
    _Panel(table="samples_slow", columns=("temp_gpu_c",), axis="Temp. [\u00b0C]", edge=2),
)
Domain = tuple[float, float]


def thin(samples: pl.LazyFrame, column: str, origin_ns: int, bins: int = BINS) -> pl.DataFrame:
    """(t, low, mid, high) per bin in seconds since the origin, over all GPUs of the run; nulls are dropped."""
    t = ((pl.col("t_mono_ns") - origin_ns) / 1e9).alias("t")
    rows = samples.select(t, pl.col(column).cast(pl.Float64).alias("v")).drop_nulls().collect()
    if rows.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(("t", "low", "mid", "high"), pl.Float64))
    first, last = rows["t"].min(), rows["t"].max()
    assert isinstance(first, float)
    assert isinstance(last, float)
    width = (last - first) / bins or 1.0
    cut = ((pl.col("t") - first) / width).floor().clip(0, bins - 1)
    binned = rows.group_by(cut.alias("bin")).agg(
        pl.col("t").mean(),
        pl.col("v").min().alias("low"),
        pl.col("v").mean().alias("mid"),
        pl.col("v").max().alias("high"),
    )
    return binned.sort("bin").drop("bin")


@dataclass(kw_only=True)
class _Strip:
    """What one run's strip is drawn from; times in seconds since its origin."""

    row: Row
    panels: list[list[pl.DataFrame]]  # per panel, a thinned frame per column
    windows: list[Row]
    held: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)


def draw(dataset: Dataset, colours: dict[str, str], *, demonstration: bool) -> list[Figure]:
    """A strip for every run that has samples, on common scales; grey where the GPU has no colour.

    Of many runs, one for each cell: those beyond MANY would make the page slow and are not looked at.
    """
    runs = dataset.runs
    if runs.height > MANY:
        runs = runs.sort("valid", descending=True, maintain_order=True).unique(
            CELL_KEYS, keep="first", maintain_order=True
        )
        runs = runs.head(MANY)
    strips = [strip for row in runs.iter_rows(named=True) if (strip := _read(dataset, row))]
    domains = [_domain([frame for strip in strips for frame in strip.panels[i]], i) for i in range(len(_PANELS))]
    prefix = "Demonstration: " if demonstration else ""
    return [_draw(strip, domains, prefix, colours.get(strip.row["gpu"], svg.MUTED)) for strip in strips]


def _read(dataset: Dataset, row: Row) -> _Strip | None:
    """None for a run without samples."""
    windows = _windows(dataset, row["run_id"])
    tables = {}
    for name in dict.fromkeys(panel.table for panel in _PANELS):
        wanted = [column for panel in _PANELS if panel.table == name for column in panel.columns]
        wanted += throttle_events.COUNTERS if name == "samples_slow" else []
        own = _own(dataset.scan(name, row["run_id"]), row, windows)
        tables[name] = own.select("gpu_uuid", "t_mono_ns", *wanted).collect().lazy()  # from disk once
    first, last = tables["samples_fast"].select(low=pl.col("t_mono_ns").min(), high=pl.col("t_mono_ns").max()).collect()
    if first.item() is None:
        return None
    origin = min((w["t_start_mono_ns"] for w in windows if w["kind"] == "measure"), default=first.item())
    near = (first.item() - NEAR_NS, last.item() + NEAR_NS)
    return _Strip(
        row=row,
        panels=[[thin(tables[panel.table], column, origin) for column in panel.columns] for panel in _PANELS],
        windows=_relative(windows, origin),
        held=throttle_events.throttled(tables["samples_slow"], origin, BINS),
        events=throttle_events.events(dataset.scan("events", row["run_id"]), _cards(row), near, origin),
    )


def _cards(row: Row) -> list[str]:
    return row["gpu_uuid"].split(", ") if row["gpu_uuid"] else []


def _windows(dataset: Dataset, run_id: str) -> list[dict[str, Any]]:
    known = dataset.windows.filter(
        (pl.col("run_id") == run_id) & pl.col("t_start_mono_ns").is_not_null() & pl.col("t_end_mono_ns").is_not_null()
    )
    return known.to_dicts()


def _own(samples: pl.LazyFrame, row: dict[str, Any], windows: list[dict[str, Any]]) -> pl.LazyFrame:
    """Samples of the run's own cards near its windows: a requeued job leaves those of another node and clock."""
    if cards := _cards(row):
        samples = samples.filter(pl.col("gpu_uuid").cast(pl.String).is_in(cards))
    if windows:
        first = min(w["t_start_mono_ns"] for w in windows) - NEAR_NS
        last = max(w["t_end_mono_ns"] for w in windows) + NEAR_NS
        samples = samples.filter(pl.col("t_mono_ns").is_between(first, last))
    return samples


def _relative(windows: list[dict[str, Any]], origin: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": w["kind"],
            "t0": (w["t_start_mono_ns"] - origin) / 1e9,
            "t1": (w["t_end_mono_ns"] - origin) / 1e9,
        }
        for w in windows
    ]


def _domain(frames: list[pl.DataFrame], index: int) -> Domain:
    if _PANELS[index].axis.endswith("[%]"):
        return (0.0, 104.0)  # a line along 100 must not be cut in half
    values = pl.concat(frames) if frames else pl.DataFrame()
    if values.is_empty():
        return (0.0, 1.0)
    low, high = values["low"].min(), values["high"].max()
    assert isinstance(low, float)
    assert isinstance(high, float)
    edge = max(0.05 * (high - low), _PANELS[index].edge)
    return (0.0, high * 1.16) if index == 0 else (low - edge, high + edge)


def _draw(strip: _Strip, domains: list[Domain], prefix: str, colour: str) -> Figure:
    times = [t for panel in strip.panels for frame in panel for t in frame["t"].to_list()]
    times += [event["t"] for event in strip.events]
    x = {"type": "quantitative", "scale": {"domain": [min(times), max(times)], "nice": False} if times else {}}
    # A panel whose columns nobody read is no panel; utilisation and power have theirs even so, to say that.
    known = [
        (panel, frames, domain)
        for panel, frames, domain in zip(_PANELS, strip.panels, domains, strict=True)
        if panel.table == "samples_fast" or any(frame.height for frame in frames)
    ]
    stack = []
    for index, (panel, frames, domain) in enumerate(known):
        last = index == len(known) - 1
        axis = {"title": "Seconds since the measure window opened"} if last else None
        across = {**x, "axis": axis}
        layers = [*_shades(strip, panel, across), *_curves(panel, frames, domain, across, colour)]
        layers += _marks(strip.events, across, named=index == 0)
        stack.append({"width": WIDTH, "height": panel.height, "layer": layers})
    title, run_id = f"{prefix}{base.series_title(strip.row)}", strip.row["run_id"]
    spec = {"vconcat": stack, "spacing": 10}
    return base.figure(f"timeline-{run_id}", title, run_id, _words(strip), spec, [run_id])


def _shades(strip: _Strip, panel: _Panel, x: Spec) -> list[Spec]:
    between = {"x": {**x, "field": "t0"}, "x2": {"field": "t1"}}
    shades = [
        layer(rows, {"type": "rect", "color": svg.MUTED, "opacity": opacity, "clip": True}, **between)
        for kind, opacity in _SHADE.items()
        if (rows := [window for window in strip.windows if window["kind"] == kind])
    ]
    for why, colour in _HELD.items() if panel.held else ():
        if rows := [stretch for stretch in strip.held if stretch["why"] == why]:
            shades.append(layer(rows, {"type": "rect", "color": colour, "opacity": 0.35, "clip": True}, **between))
    return shades


def _curves(panel: _Panel, frames: list[pl.DataFrame], domain: Domain, x: Spec, colour: str) -> list[Spec]:
    axis = {"title": panel.axis, "tickCount": 3, "minExtent": 30, "titlePadding": 8}
    y = {"type": "quantitative", "scale": {"domain": list(domain), "nice": False}, "axis": axis}
    at = {**x, "field": "t"}
    curves = []
    for index, frame in enumerate(frames):
        dash = {"strokeDash": _DASH} if index else {}
        line = {"type": "line", "color": colour, "strokeWidth": 1.4, "clip": True, **dash}
        marks = [{"mark": line, "encoding": {"x": at, "y": {**y, "field": "mid"}}}]
        if not index:
            band = {"type": "area", "color": colour, "opacity": 0.3, "clip": True}
            between = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
            marks.insert(0, {"mark": band, "encoding": {"x": at, **between}})
        rows = frame.with_columns(pl.all().round_sig_figs(5)).to_dicts()  # a thousandth of a pixel
        curves.append({"data": {"values": rows}, "layer": marks})
    return curves


def _marks(events: list[Row], x: Spec, *, named: bool) -> list[Spec]:
    """A line through the panel at every event, and in the first panel the word for it."""
    if not events:
        return []
    at = {**x, "field": "t"}
    rule = {"type": "rule", "color": svg.SERIES[7], "strokeWidth": 1.2, "strokeDash": [2, 2]}
    text = {"type": "text", "align": "left", "baseline": "top", "dx": 3, "y": 0, "color": svg.SERIES[7]}
    words = [layer(events[:MARKED], text, x=at, text={"field": "words", "type": "nominal"})] if named else []
    return [layer(events, rule, x=at), *words]


def _words(strip: _Strip) -> str:
    """What held the run back, and what happened to it."""
    row, words = strip.row, []
    for name, what in (("throttle_power_pct", "at the power cap"), ("throttle_thermal_pct", "slowed by temperature")):
        if row[name] is not None and row[name] >= 100 * throttle_events.LEAST_SHARE:
            words.append(f"{what} for {number(row[name])} % of the measure window")
    words += [f"{event['detail']} at {event['t']:.1f} s" for event in strip.events[:MARKED]]
    rest = len(strip.events) - MARKED
    words += [f"{rest} more events"] if rest > 0 else []
    text = "; ".join(words)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
