"""The inputs of checks: each function returns the arguments with which a test is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.metrics.facts import Facts
from analysis.metrics.gpu_samples import Span
from analysis.metrics.rates import Rates
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.records import Window
from inpaint_bench.core.schema import results_table
from inpaint_bench.core.workloads import Result, results
from inpaint_bench.telemetry.report import TelemetryReport


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All that is known of a run before it is judged; `row` has its columns."""

    facts: Facts
    rates: Rates
    telemetry: Telemetry
    row: Mapping[str, Any]


def of_run(run: Finished) -> list[tuple[Facts]]:
    return [(run.facts,)]


def of_all(run: Finished) -> list[tuple[Finished]]:
    return [(run,)]


def of_windows(run: Finished) -> list[tuple[Facts, Window, Span]]:
    return [(run.facts, *pair) for pair in run.facts.measured]


def of_steps(run: Finished) -> list[tuple[Facts, Window, Span, pl.DataFrame]]:
    return [(run.facts, window, span, run.facts.steps_of(window)) for window, span in run.facts.measured]


def of_nodes(run: Finished) -> list[tuple[Facts, TelemetryReport | None]]:
    """Return the facts of each node, which has a sidecar of its own, and its telemetry.json if there is one."""
    return [(facts, facts.files.sidecar) for facts in run.facts.by_node()]


def of_sidecars(run: Finished) -> list[tuple[Facts, TelemetryReport | None]]:
    return [given for given in of_nodes(run) if given[1] is not None]


def of_telemetry(run: Finished) -> list[tuple[Facts, Telemetry]]:
    """Return the samples around the measure windows, unless telemetry=none."""
    return [(run.facts, run.telemetry)] if run.telemetry.requested else []


def of_results(run: Finished) -> list[tuple[Facts, str, type[Result], pl.DataFrame]]:
    """Return the table of the workload's own results, with its name and record; none if a file of it is missing."""
    facts, workload = run.facts, run.facts.manifest.workload or ""
    table, result = results_table(workload), results().get(workload)
    if result is None or table not in facts.tables or table in facts.files.incomplete:
        return []
    return [(facts, table, result, facts.tables[table].with_columns(pl.col("window_id").cast(pl.String)))]
