"""The section on programs that `watch` ran: what they took as a whole, because their steps are not known."""

import polars as pl

from analysis.stats.cells import CELL_KEYS
from analysis.units import gpu_label, number
from inpaint_bench.core.schema import COMMAND

from . import names
from .estimate import mean_of_runs
from .tables import COUNTS, DASH, Section, TableBuilder, count_runs, counts

_TITLE = "External programs"
_TEXT = (
    "These programs ran beside the sidecar of this project and are not part of it. Every figure is over the whole "
    "command, from its start to its end: loading, compiling and saving are in it. Images are as the user stated them."
)
_COLUMNS = {
    "Duration [s]": pl.col("window_s"),
    "Energy [kJ]": pl.col("energy_j") / 1000,
    "Power [W]": pl.col("power_w"),
    "GPU utilization [%]": pl.col("gpu_util_pct"),
    "VRAM peak, measured [MiB]": pl.col("vram_used_mib_peak"),
    "SM clock [MHz]": pl.col("sm_clock_mhz_mean"),
    "Images/s": pl.col("images_per_s"),
    "Energy [J/image]": pl.col("joules_per_image"),
    "Energy error, at most [%]": pl.col("energy_error_pct"),
}


def sections(build: TableBuilder) -> list[Section]:
    """Return the section; empty if no valid run is of a command."""
    runs = build.runs.filter("valid", pl.col("workload") == COMMAND)
    if runs.is_empty():
        return []
    figures = runs.with_columns(value.alias(heading) for heading, value in _COLUMNS.items())
    rows, row_runs, answers, best = [], [], [], ""
    for cell in figures.sort("run_id").partition_by(CELL_KEYS, maintain_order=True):
        first, own = cell.row(0, named=True), cell.to_dicts()
        means = [mean_of_runs(own, heading) for heading in _COLUMNS]
        keys = [first["recipe"], first["variant"] or DASH, first["site"], gpu_label(first["gpu"])]
        rows.append([*keys, str(first["gpus"] or DASH), *counts(count_runs(cell)), *(mean or DASH for mean in means)])
        row_runs.append(cell["run_id"].to_list())
        took = [f"{number(mean.value)} {unit}" for mean, unit in zip(means, ("s", "kJ"), strict=False) if mean]
        rate = means[list(_COLUMNS).index("Images/s")]
        took_text = names.join(took) + (f" ({number(rate.value)} images/s)" if rate else "")
        best = best or took_text
        answers.append(f"{first['recipe']} took {took_text} on {names.gpu(first['gpu'], first['gpus'])}")
    few = "" if max(map(len, row_runs)) > 1 else " (1 run each)" if len(rows) > 1 else " (1 run)"
    columns = ["Program", "Variant", "Site", "GPU", "GPUs", *COUNTS, *_COLUMNS]
    note = "Mean over n runs. Commands that are written differently are variants, unless --name joins them."
    lead = ("Program", "GPU", "n", "Cards", *list(_COLUMNS)[:3], "Images/s")
    table = build.table("commands", _TITLE, columns, rows, note=note, row_runs=row_runs, lead_columns=lead)
    answer = f"{names.join(answers)}{few}, loading and saving included."
    return [Section(title=_TITLE, workload=COMMAND, answer=answer, best=best, paragraphs=[_TEXT], tables=[table])]
