"""What checks judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from analysis.metrics.facts import Facts
from analysis.metrics.rates import Rates
from analysis.metrics.telemetry import Telemetry
from inpaint_bench.core.schema import results_table
from inpaint_bench.core.workloads import results


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All that is known of a run before it is judged; `row` has its columns."""

    facts: Facts
    rates: Rates
    telemetry: Telemetry
    row: Mapping[str, Any]


def arguments(run: Finished) -> dict[str, list[tuple[Any, ...]]]:
    """Return the arguments with which checks are called, by what they judge.

    Each node has a sidecar of its own, and its telemetry.json if there is one. There is no telemetry if none was
    requested, and there are no results of the workload if a file of them is missing.
    """
    facts, workload = run.facts, run.facts.manifest.workload or ""
    nodes = [(node, node.files.sidecar) for node in facts.by_node()]
    table, result = results_table(workload), results().get(workload)
    rows = None if result is None or table in facts.files.incomplete else facts.tables.get(table)
    rows = rows if rows is None else rows.with_columns(pl.col("window_id").cast(pl.String))
    return {
        "run": [(facts,)],
        "all": [(run,)],
        "windows": [(facts, *pair) for pair in facts.measured],
        "steps": [(facts, window, span, facts.steps_of(window)) for window, span in facts.measured],
        "nodes": nodes,
        "sidecars": [pair for pair in nodes if pair[1] is not None],
        "telemetry": [(facts, run.telemetry)] if run.telemetry.requested else [],
        "results": [] if rows is None else [(facts, table, result, rows)],
    }
