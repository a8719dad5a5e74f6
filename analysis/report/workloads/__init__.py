"""Sections of the report with the results of one workload: a module per workload, named as it is, with `section`.

`section(build, results, runs)` gets the rows of the table `results_<name>` with the run's columns `gpu`, `site`,
`recipe`, `variant`, `precision`, `valid` and `demonstration`, with the times of their call and the energy
counter at them (metrics/energy.py), and the runs themselves. A module may have `more_tables(build, dataset,
results, runs)` too: tables that need more of the dataset, such as counters of kernels, shown after its own.
"""

import importlib
import pkgutil
from dataclasses import replace

import polars as pl

from analysis.dataset import Dataset
from analysis.metrics import energy
from analysis.metrics.gpu_samples import COUNTER
from analysis.report.tables import Section, TableBuilder
from inpaint_bench.core import schema

RUN_COLUMNS = ("run_id", "site", "gpu", "gpus", "recipe", "variant", "precision", "valid", "demonstration",
               "gpu_uuid", "steady")  # fmt: skip


def sections(dataset: Dataset, build: TableBuilder) -> list[Section]:
    """Return the section of each workload that has valid runs with results."""
    shown = []
    # Only modules of this package: names of workloads come from manifests, which are not trusted.
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_"):
        runs = dataset.runs.filter((pl.col("workload") == name) & pl.col("valid"))
        table = schema.results_table(name)
        if runs.is_empty() or table not in schema.TABLES:
            continue
        rows = dataset.rows(table).join(runs.select(RUN_COLUMNS), on="run_id")
        rows = rows.sort("run_id", pl.col("step") < 0, pl.col("step").abs())  # last what could not run
        if rows.height:
            rows = pl.concat(_add_calls(dataset, run) for run in rows.partition_by("run_id", maintain_order=True))
            module = importlib.import_module(f"{__name__}.{name}")
            section = module.section(build, rows, runs)
            more = module.more_tables(build, dataset, rows, runs) if hasattr(module, "more_tables") else []
            shown.append(replace(section, workload=name, tables=[*section.tables, *more]))
    return shown


def _add_calls(dataset: Dataset, rows: pl.DataFrame) -> pl.DataFrame:
    run_id = rows["run_id"][0]
    calls = dataset.scan("steps", run_id).select("window_id", "step", "t_start_mono_ns", "t_end_mono_ns").collect()
    calls = calls.with_columns(pl.col("window_id").cast(pl.String), pl.col("step").cast(pl.Int64))
    rows = rows.join(calls, on=["window_id", "step"], how="left", maintain_order="left")
    columns = ("gpu_uuid", "t_mono_ns", "tick_seq", COUNTER, *schema.POWERS)
    samples = dataset.scan("samples_fast", run_id).select(columns).collect()
    return energy.add_counter(rows, samples)
