"""The section on programs that `watch` ran: what they took as a whole, because their steps are not known."""

from __future__ import annotations

import polars as pl

from analysis.stats.cells import CELL_KEYS
from analysis.units import gpu_label, number
from inpaint_bench.core.schema import COMMAND

from .section import Section
from .tables import DASH, Table, TableBuilder

_TITLE = "Programs beside the sidecar"
_TEXT = (
    "These programs ran beside the sidecar of this project and are not part of it. Every figure is over the whole "
    "command, from its start to its end: loading, compiling and saving are in it. Images are as the user stated them."
)
_COLUMNS = {
    "Duration [s]": pl.col("window_s"),
    "Energy [kJ]": pl.col("energy_j") / 1000,
    "Power [W]": pl.col("power_w"),
    "GPU utilization [%]": pl.col("gpu_util_pct"),
    "VRAM peak [MiB]": pl.col("vram_used_mib_peak"),
    "SM clock [MHz]": pl.col("sm_clock_mhz_mean"),
    "Images/s": pl.col("images_per_s"),
    "Energy [J/image]": pl.col("joules_per_image"),
}


def sections(build: TableBuilder) -> list[Section]:
    """Return the section; empty where no valid run is of a command."""
    runs = build.runs.filter("valid", pl.col("workload") == COMMAND)
    if runs.is_empty():
        return []
    return [Section(title=_TITLE, workload=COMMAND, paragraphs=[_TEXT], tables=[_table(build, runs)])]


def _table(build: TableBuilder, runs: pl.DataFrame) -> Table:
    figures = runs.with_columns(value.alias(heading) for heading, value in _COLUMNS.items())
    rows, row_runs = [], []
    for cell in figures.sort("run_id").partition_by(CELL_KEYS, maintain_order=True):
        first = cell.row(0, named=True)
        keys = [first["recipe"], first["variant"] or DASH, first["site"], gpu_label(first["gpu"])]
        keys += [str(first["gpus"] or DASH), str(cell.height)]
        rows.append(keys + [_mean(cell[heading]) for heading in _COLUMNS])
        row_runs.append(cell["run_id"].to_list())
    columns = ["Program", "Variant", "Site", "GPU", "GPUs", "n", *_COLUMNS]
    note = "Mean (least\u2013most) over n runs. Commands that are written differently are variants, unless --name "
    note += "joins them."
    return build.table("commands", _TITLE, columns, rows, note=note, row_runs=row_runs)


def _mean(values: pl.Series) -> str:
    known = values.drop_nulls()
    if known.is_empty():
        return DASH
    text = number(float(known.mean()))  # type: ignore[arg-type]
    remarks = [f"{number(known.min())}\u2013{number(known.max())}"] if len(known) > 1 else []  # type: ignore[arg-type]
    remarks += [f"n = {len(known)}"] if len(known) < len(values) else []
    return f"{text} ({', '.join(remarks)})" if remarks else text
