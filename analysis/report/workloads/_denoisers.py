"""What the sections of both denoiser workloads share: means over runs, measured against predicted memory, figures."""

from collections.abc import Collection, Sequence
from typing import Any

import altair as alt
import polars as pl

from analysis.metrics.energy import MIN_UPDATES
from analysis.report.figures import base, svg
from analysis.report.figures.base import Figure
from analysis.report.tables import COUNTS, Table, TableBuilder, cell, counts
from analysis.stats.cells import RUN_COUNTS
from analysis.units import gpu_label
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.workloads._denoisers import MODELS

SOURCE = 'the page "GPU Performance Under the Hood" (benchmark_invprob_inference)'
TOLERANCE = 0.10  # share of the prediction
_LOG_FROM = 30.0  # ratio of the largest to the smallest value from which on an axis is logarithmic
MIB_PER_GB = 1e9 / 2**20
MEMORY = ("weights_mib", "allocated_peak_mib", "reserved_peak_mib", "nvml_used_mib")
SETTING = ["site", "gpu", "gpus", "recipe", "variant", "precision", "tiling", "input_mode"]
BY_RANK = {"times_by_rank_ms": "Time by GPU [ms]", "peaks_by_rank_mib": "Peak by GPU [MiB]"}  # columns of texts
CASE = ["model", "batch", "published_plan", "branch", "calls", "tile_h_px", "tile_w_px"]
SPIKE = (
    "Why DRUNet's memory rises and falls with the width: where both sides are multiples of 8 the library passes the "
    "whole image through the network once; otherwise it cuts it into four overlapping tiles, one after another, which "
    "need a third of the memory and about 11 % more arithmetic. Rounding sides up to multiples of 8 therefore raises "
    "the peak; tiles of a chosen size (workload.tiling=explicit) lower it for any network."
)
MEASURES = (
    "Allocated and reserved: peaks of PyTorch's allocator during the call, of several GPUs on that with most. NVML: "
    "memory in use on the whole GPU right after it. Above weights: allocated peak less what was allocated between two "
    "cases. Predicted: peak of the live fp32 tensors, without any workspace. SD: standard deviation of a run's calls. "
    "J per call: growth of the energy counter over a case by its calls; none where a case lasts less than "
    f"{MIN_UPDATES} updates of the counter."
)


def means(rows: pl.DataFrame, keys: Sequence[str], rates: Collection[str]) -> pl.DataFrame:
    """Return a row per case: means over runs of the means over their calls, the calls' standard deviation, n runs.

    `rates` have the harmonic mean over the calls: all of their work over all of their time.
    """
    keys = [*SETTING, *CASE, *keys]
    tensors = pl.col("allocated_peak_mib") - pl.col("weights_mib")
    rows = rows.with_columns(tensors_mib=tensors)
    columns = ["time_ms", *rates, *MEMORY, "tensors_mib"]
    seconds = (pl.col("t_end_mono_ns").max() - pl.col("t_start_mono_ns").min()) / 1e9
    texts = [pl.col(name).drop_nulls().last() for name in BY_RANK if name in rows.columns]
    per_run = rows.group_by([*keys, "run_id"], maintain_order=True).agg(
        *texts,
        pl.col("gpu_uuid", "steady").first(),
        *((1 / (1 / pl.col(name)).mean() if name in rates else pl.col(name).mean()).alias(name) for name in columns),
        time_sd=pl.col("time_ms").std(),
        out_of_memory=pl.col("out_of_memory").drop_nulls().first(),
        joules_per_call=pl.when(seconds >= MIN_UPDATES * pl.col("counter_update_s").max()).then(
            (pl.col("counter_end_j").max() - pl.col("counter_start_j").min()) / pl.col("counter_end_j").count()
        ),
    )
    return per_run.group_by(keys, maintain_order=True).agg(
        *(pl.col(name).mean() for name in columns),
        pl.col("time_sd", "joules_per_call").mean(),
        pl.col("out_of_memory").drop_nulls().first(),
        *texts,
        n=pl.len(),
        **RUN_COUNTS,
        run_ids=pl.col("run_id"),
    ).with_row_index("place")  # fmt: skip


def add_predictions(cases: pl.DataFrame, table: pl.DataFrame, keys: list[str], applies: pl.Expr) -> pl.DataFrame:
    """Add `predicted_mib`, the peak of live fp32 tensors; null if `applies` is false: it is of another setting.

    `table` has the peak of each network in a column of its own, at `keys`.
    """
    peaks = table.unpivot([f"{model}_peak_mib" for model in MODELS], index=keys, value_name="predicted_mib")
    model = pl.col("variable").str.replace("_peak_mib", "")
    peaks = peaks.select(*keys, model.alias("model"), pl.col("predicted_mib").cast(pl.Float64))
    joined = cases.join(peaks, ["model", *keys], how="left", maintain_order="left")
    applies = applies & (pl.col("precision") == "fp32") & pl.col("published_plan")
    return joined.with_columns(predicted_mib=pl.when(applies).then("predicted_mib"))


def explain(case: dict[str, Any]) -> str:
    """Return what explains a measured peak: the algorithm if the prediction is met, else the backend's rest."""
    measured, predicted, branch, calls = (case[name] for name in ("tensors_mib", "predicted_mib", "branch", "calls"))
    if case["out_of_memory"]:
        return f"out of memory: {case['out_of_memory']}"
    if measured is None:
        return "no GPU: memory not measured"
    if predicted is None:
        return "no prediction for this setting"
    rest = measured - predicted
    algorithm = {
        "direct": "whole image at once",
        "onesplit4": f"{calls} tiles of {case['tile_h_px']}x{case['tile_w_px']} px",
    }.get(branch, branch)
    if abs(rest) <= TOLERANCE * predicted:
        return f"algorithm: {algorithm}"
    if rest < 0:
        return f"{rest:,.0f} MiB to the prediction"
    return f"algorithm ({algorithm}) and {rest:+,.0f} MiB of the backend"


def table_of_cases(
    build: TableBuilder,
    id: str,
    title: str,
    note: str,
    cases: pl.DataFrame,
    own: dict[str, str],
    rates: dict[str, str],
    first: Sequence[int],
) -> Table:
    """Return the table of all cases: `own` has patterns by heading, `rates` headings by column.

    `first` are the places of the cases of the first screen.
    """
    headings = ["Site", "GPU", "Setting", "Model", *own, "Batch", "Branch", "Calls", "Tile [px]"]
    headings += ["Time [ms]", "SD [ms]", "J per call", *rates.values(), "Allocated peak [MiB]", "Reserved peak [MiB]"]
    headings += ["NVML [MiB]", "Above weights [MiB]", "Predicted [MiB]", "Explained by", *COUNTS]
    figures = ["time_ms", "time_sd", "joules_per_call", *rates, *MEMORY[1:], "tensors_mib", "predicted_mib"]
    patterns = (*own.values(), "{batch}", "{branch}", "{calls}", "{tile_h_px}x{tile_w_px}")
    rows = []
    for case in cases.iter_rows(named=True):
        keys = [*setting_text(case), MODELS[case["model"]], *(pattern.format(**case) for pattern in patterns)]
        rows.append([*keys, *(cell(case[name]) for name in figures), explain(case), *counts(case)])
    # Two rows of the first screen must not read alike.
    columns = {"GPU": ("gpu", "gpus"), "Setting": ("recipe", "input_mode")}
    varying = [heading for heading, names in columns.items() if any(cases[name].n_unique() > 1 for name in names)]
    shown = varying or ["Branch"]
    lead = ("Model", *list(own)[:1], "Batch", *shown, "Time [ms]", "Allocated peak [MiB]", "J per call")
    options = {"lead_columns": lead, "lead_rows": tuple(first)}
    return build.table(id, title, headings, rows, note=f"{MEASURES} {note}", **options)


def agreement(ratio: float | None, tolerance: float) -> list[str]:
    """Return the ratio of a figure to another, and whether they are equal within a tolerance."""
    agrees = "not measured" if ratio is None else "yes" if abs(ratio - 1) <= tolerance else "no"
    return [cell(ratio), agrees]


def setting_text(row: dict[str, object]) -> list[str]:
    """Return site, GPU and recipe of a case, and what else was set."""
    setting = ", ".join([str(row["recipe"]), str(row["tiling"]), str(row["input_mode"]), *_variant(row)])
    count = f"{row['gpus']} " if row["gpus"] != 1 else ""
    return [str(row["site"]), f"{count}{gpu_label(str(row['gpu']))}", setting]


def _variant(row: dict[str, object]) -> list[str]:
    # It may name tiling and input mode once more, each if it is not the default.
    settings = {f"{name}={row[name]}" for name in ("tiling", "input_mode")}
    return [part for part in str(row["variant"] or "").split(", ") if part and part not in settings]


def _series_text(row: dict[str, Any], varying: Sequence[str]) -> str:
    texts = {
        "gpu": gpu_label(str(row["gpu"])),
        "gpus": pluralize(row["gpus"], "GPU"),
        "batch": f"batch {row['batch']}",
        "variant": ", ".join(_variant(row)),
    }
    parts = (texts.get(name, str(row[name])) for name in varying)
    return ", ".join(filter(None, [MODELS[str(row["model"])], *parts]))


def network(cases: pl.DataFrame, case: dict[str, Any], *more: str) -> str:
    """Return the network of a case, with what the cases do not share: `DRUNet (H200, tf32)`. `more` are columns."""
    varying = [name for name in ("gpu", "gpus", "recipe", "input_mode", *more) if cases[name].n_unique() > 1]
    name, _, setting = _series_text(case, varying).partition(", ")
    return f"{name} ({setting})" if setting else name


def panels(
    name: str, cases: pl.DataFrame, *, x: tuple[str, str], panel: tuple[str, str], y: dict[str, tuple[str, str, str]]
) -> list[Figure]:
    """Draw a figure for each of `y` that was measured: a panel per value of a column, all with the same range.

    `x` and `panel` are a column and its label, `y` is column, label and title by the end of the figure's name.
    """
    return [
        _figure(f"{name}-{end}", title, cases.drop_nulls(column), x, (column, label), panel)
        for end, (column, label, title) in y.items()
        if cases[column].count()
    ]


def _figure(
    name: str, title: str, cases: pl.DataFrame, x: tuple[str, str], y: tuple[str, str], panel: tuple[str, str]
) -> Figure:
    caption = "Panels share the range of values."
    varying = [name for name in [*SETTING, "batch"] if name != x[0] and cases[name].n_unique() > 1]
    series = [_series_text(row, varying) for row in cases.iter_rows(named=True)]
    cases = cases.with_columns(pl.Series("series", series))
    names = cases["series"].unique(maintain_order=True).to_list()
    if left_out := names[len(svg.SERIES) :]:
        caption += f" Not drawn, but in the table: {'; '.join(left_out)}."
    names = names[: len(svg.SERIES)]
    cases = cases.filter(pl.col("series").is_in(names))
    low, high = cases.select(low=pl.col(y[0]).min(), high=pl.col(y[0]).max()).row(0)
    margin = 0.05 * ((high - low) or high or 1.0)  # as the page draws its panels
    is_log = low > 0 and high / low > _LOG_FROM
    scale: dict[str, Any] = {"type": "log", "domain": [low / 1.2, high * 1.2]}
    scale = scale if is_log else {"zero": False, "domain": [max(0.0, low - margin), high + margin]}
    caption += " The axis is logarithmic." if is_log else ""
    values = cases[panel[0]].unique(maintain_order=True).to_list()
    width = max(110, svg.WIDTH // len(values) - 20)
    charts = []
    for index, value in enumerate(values):
        axis = alt.Y(f"{y[0]}:Q").title(y[1] if index == 0 else None).scale(nice=False, **scale)
        across = alt.X(f"{x[0]}:Q").title(x[1]).scale(zero=False).axis(tickCount=4)
        at = cases.filter(pl.col(panel[0]) == value).select(x[0], y[0], "series")
        look = base.lines(names, "series")
        chart = alt.Chart(at).mark_line(point={"size": 20}, strokeJoin="round").encode(across, axis, *look)
        charts.append(chart.properties(title=panel[1].format(value), width=width))
    runs = base.run_ids_of(cases)
    notes = [caption, base.n_note(runs, cases.height)]
    return base.figure(name, title, "Means over the calls of a run, then over runs", notes, alt.hconcat(*charts), runs)
