"""The section of the workload `denoise_shape`."""

from typing import Any

import polars as pl

from analysis import published
from analysis.report.tables import DASH, Table, TableBuilder, cell
from analysis.units import number

from . import Section, _denoisers
from ._denoisers import SETTING

RATES = {"mpx_per_s": "Mpx/s"}
PREDICTED_HEIGHT_PX = 2048
_ALIKE = ("model", "gpu", "gpus", "recipe", "batch")  # keys that two cases must share if their peaks are compared


def section(build: TableBuilder, results: pl.DataFrame, runs: pl.DataFrame) -> Section:
    """Return tables and panels of memory and time over the width of the image."""
    cases = _add_predictions(_denoisers.means(results, ["series_px", "height_px", "width_px"], RATES))
    note = "Explained by: the algorithm where the prediction is met within "
    note += f"{100 * _denoisers.TOLERANCE:g} %, else what the backend needs beyond it."
    own, title = {"Series [px]": "{series_px}", "Image [px]": "{height_px}x{width_px}"}, "Denoisers by image shape"
    table = _denoisers.table_of_cases(
        build, "denoise-shape", title, note, cases, own, RATES, _largest(cases)["place"].to_list()
    )
    figures = _denoisers.panels(
        "fig-denoise-shape",
        cases,
        x=("width_px", "Width [px]"),
        panel=("series_px", "widths by {} px"),
        y={
            "memory": ("allocated_peak_mib", "Allocated peak [MiB]", "Denoisers: peak memory by width"),
            "time": ("time_ms", "Time [ms]", "Denoisers: time by width"),
            "rate": ("mpx_per_s", "Mpx/s", "Denoisers: throughput by width"),
        },
    )
    return Section(
        title="Denoisers: image shape",
        answer=_answer(cases),
        best=f"{number(cases['mpx_per_s'].max())} Mpx/s",  # type: ignore[arg-type]
        paragraphs=[_denoisers.SPIKE] if "drunet" in cases["model"] else [],
        tables=[table, _reference(build, cases)],
        figures=figures,
    )


def _largest(cases: pl.DataFrame) -> pl.DataFrame:
    """Return the widest image of each network and setting, at once and in tiles, the least memory first."""
    known = cases.drop_nulls(["time_ms", "allocated_peak_mib"]).with_columns(tiled=pl.col("calls") > 1)
    widest = known.sort(-pl.col("width_px"), "allocated_peak_mib")
    return widest.unique(["tiled", *_ALIKE], keep="first", maintain_order=True).sort("allocated_peak_mib")


def _name(cases: pl.DataFrame, case: dict[str, Any]) -> str:
    return _denoisers.network(cases, case, "batch")


def _answer(cases: pl.DataFrame) -> str:
    largest = _largest(cases).to_dicts()
    spikes = []
    for tiled in (case for case in largest if case["calls"] > 1):
        alike = (case for case in largest if all(case[name] == tiled[name] for name in _ALIKE))
        peak = next((case for case in alike if case["calls"] == 1), None)
        if peak:
            ratio = f"{peak['allocated_peak_mib'] / tiled['allocated_peak_mib']:.1f} times"
            spikes.append(f" {_name(cases, tiled)} needs {ratio} the memory where it runs at once, not in tiles.")
    parts = [
        f"{_name(cases, case)} {number(case['allocated_peak_mib'])} MiB and {number(case['time_ms'])} ms"
        + (f" ({case['calls']} tiles)" if case["calls"] > 1 else "")
        for case in largest
    ]
    height, width = cases.select(pl.col("height_px", "width_px").max()).row(0)
    return f"Images of {height} px by about {width} px: {', '.join(parts)}.{''.join(spikes)}" if parts else ""


def _add_predictions(cases: pl.DataFrame) -> pl.DataFrame:
    table = published.read("denoiser_predicted_shape.csv").rename({"width": "width_px", "step": "series_px"})
    image = (pl.col("height_px") == PREDICTED_HEIGHT_PX) & (pl.col("batch") == 1)
    return _denoisers.add_predictions(cases, table, ["series_px", "width_px"], image & (pl.col("tiling") == "library"))


def _reference(build: TableBuilder, cases: pl.DataFrame) -> Table:
    """Return the points that the page states, beside what was measured at the same width."""
    points = published.read("denoiser_reference_points.csv").filter(pl.col("study") == "shape")
    own = cases.filter((pl.col("model") == "drunet") & pl.col("predicted_mib").is_not_null())
    rows = []
    for point in points.iter_rows(named=True):
        at = own.filter(pl.col("width_px") == int(point["width_or_patch"]))
        stated = [point["model"], point["width_or_patch"], f"{point['value']:g}"]
        for case in at.iter_rows(named=True) if at.height else [dict.fromkeys(SETTING)]:
            peak = case.get("allocated_peak_mib")
            where = _denoisers.setting_text(case) if case["gpu"] else [DASH] * 3
            ratio = peak and peak / _denoisers.MIB_PER_GB / point["value"]
            measured = cell(peak and peak / _denoisers.MIB_PER_GB)
            agreement = _denoisers.agreement(ratio, _denoisers.TOLERANCE)
            rows.append([*stated, *where, measured, *agreement, case.get("branch") or DASH])
    columns = ["Model", "Width [px]", "Published peak [GB]", "Site", "GPU", "Setting", "Measured peak [GB]"]
    columns += ["Measured / published", "Agrees", "Branch"]
    note = (
        f"Published: {_denoisers.SOURCE}; GPU and software are not stated, and figures are rounded. Agrees: within "
        f"{100 * _denoisers.TOLERANCE:g} %; the allocated peak, with the weights of all networks on the GPU and the "
        "workspace of its convolutions. GB: 10^9 bytes."
    )
    return build.table("denoise-shape-published", "Denoisers: stated by the page", columns, rows, note=note)
