"""One strip per run: power, utilisation and temperature over time, with the windows shaded.

Thinned for the page to min, mean and max per bin, so a spike of one sample still shows; the data stay whole.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from . import svg
from .aggregate import GROUP
from .dataset import Dataset
from .figures import Figure, series_title

BINS = 180
NEAR_NS = 60 * 10**9  # how far before the first and after the last window a strip may reach
WIDTH = 300
MANY = 60  # runs; more, and only one of each cell is drawn
_PANELS = (  # table, column, axis, height
    ("samples_fast", "power_instant_w", "Power [W]", 84),
    ("samples_fast", "gpu_util_pct", "Util. [%]", 52),
    ("samples_slow", "temp_gpu_c", "Temp. [\u00b0C]", 52),
)
_SHADE = {"measure": 0.2, "warmup": 0.09, "validation": 0.09, "checkpoint": 0.09}
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


def draw(dataset: Dataset, colours: dict[str, str], *, demonstration: bool) -> list[Figure]:
    """A strip for every run that has samples, on common scales; grey where the GPU has no colour.

    Of many runs, one for each cell: those beyond MANY would make the page slow and are not looked at.
    """
    runs = dataset.runs
    if runs.height > MANY:
        runs = runs.sort("valid", descending=True, maintain_order=True).unique(GROUP, keep="first", maintain_order=True)
        runs = runs.head(MANY)
    strips = []
    for row in runs.iter_rows(named=True):
        windows = _windows(dataset, row["run_id"])
        tables = {table: _own(dataset.scan(table, row["run_id"]), row, windows) for table, _, _, _ in _PANELS}
        origin = _origin(tables["samples_fast"], windows)
        if origin is None:
            continue
        panels = [thin(tables[table], column, origin) for table, column, _, _ in _PANELS]
        strips.append((row, panels, _relative(windows, origin)))
    domains = [_domain([panels[i] for _, panels, _ in strips], i) for i in range(len(_PANELS))]
    prefix = "Demonstration: " if demonstration else ""
    return [_strip(*strip, domains, prefix, colours.get(strip[0]["gpu"], svg.MUTED)) for strip in strips]


def _windows(dataset: Dataset, run_id: str) -> list[dict[str, Any]]:
    known = dataset.windows.filter(
        (pl.col("run_id") == run_id) & pl.col("t_start_mono_ns").is_not_null() & pl.col("t_end_mono_ns").is_not_null()
    )
    return known.to_dicts()


def _own(samples: pl.LazyFrame, row: dict[str, Any], windows: list[dict[str, Any]]) -> pl.LazyFrame:
    """Samples of the run's own cards near its windows: a requeued job leaves those of another node and clock."""
    if row["gpu_uuid"]:
        samples = samples.filter(pl.col("gpu_uuid").cast(pl.String).is_in(row["gpu_uuid"].split(", ")))
    if windows:
        first = min(w["t_start_mono_ns"] for w in windows) - NEAR_NS
        last = max(w["t_end_mono_ns"] for w in windows) + NEAR_NS
        samples = samples.filter(pl.col("t_mono_ns").is_between(first, last))
    return samples


def _origin(samples: pl.LazyFrame, windows: list[dict[str, Any]]) -> int | None:
    """Start of the first measure window, else the first sample; None for a run without samples."""
    first = samples.select(pl.col("t_mono_ns").min()).collect().item()
    starts = [w["t_start_mono_ns"] for w in windows if w["kind"] == "measure"]
    return None if first is None else min(starts, default=first)


def _relative(windows: list[dict[str, Any]], origin: int) -> list[dict[str, Any]]:
    return [
        {
            "kind": w["kind"],
            "t0": (w["t_start_mono_ns"] - origin) / 1e9,
            "t1": (w["t_end_mono_ns"] - origin) / 1e9,
        }
        for w in windows
    ]


def _domain(panels: list[pl.DataFrame], index: int) -> Domain:
    if index == 1:
        return (0.0, 104.0)  # a line along 100 must not be cut in half
    values = pl.concat(panels) if panels else pl.DataFrame()
    if values.is_empty():
        return (0.0, 1.0)
    low, high = values["low"].min(), values["high"].max()
    assert isinstance(low, float)
    assert isinstance(high, float)
    return (0.0, high * 1.05) if index == 0 else (low - 2, high + 2)


def _strip(
    row: dict[str, Any],
    panels: list[pl.DataFrame],
    windows: list[dict[str, Any]],
    domains: list[Domain],
    prefix: str,
    colour: str,
) -> Figure:
    spans = [v for panel in panels if panel.height for v in panel["t"].to_list()]
    x_scale = {"domain": [min(spans), max(spans)], "nice": False} if spans else {}
    stack = []
    for index, ((_, _, axis, height), panel, domain) in enumerate(zip(_PANELS, panels, domains, strict=True)):
        last = index == len(_PANELS) - 1
        x: dict[str, Any] = {"field": "t", "type": "quantitative", "scale": x_scale}
        x["axis"] = {"title": "Seconds since the measure window opened"} if last else None
        y_axis = {"title": axis, "tickCount": 3, "minExtent": 30, "titlePadding": 8}
        y = {"type": "quantitative", "scale": {"domain": list(domain), "nice": False}, "axis": y_axis}
        layers: list[dict[str, Any]] = [
            {
                "data": {"values": [w for w in windows if w["kind"] == kind]},
                "mark": {"type": "rect", "color": svg.MUTED, "opacity": opacity, "clip": True},
                "encoding": {"x": {**x, "field": "t0"}, "x2": {"field": "t1"}},
            }
            for kind, opacity in _SHADE.items()
        ]
        data = {"values": panel.to_dicts()}
        layers += [
            {
                "data": data,
                "mark": {"type": "area", "color": colour, "opacity": 0.3, "clip": True},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": data,
                "mark": {"type": "line", "color": colour, "strokeWidth": 1.4, "clip": True},
                "encoding": {"x": x, "y": {**y, "field": "mid"}},
            },
        ]
        stack.append({"width": WIDTH, "height": height, "layer": layers})
    title = f"{prefix}{series_title(row)}"
    name = f"timeline-{row['run_id']}"
    spec = {"vconcat": stack, "spacing": 10, "title": {"text": title, "subtitle": row["run_id"]}}
    # Ids go into HTML attributes and file names: keep only what is harmless in both.
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
    return Figure(id=safe, title=title, caption="", svg=svg.render(spec, safe, title), run_ids=[row["run_id"]])
