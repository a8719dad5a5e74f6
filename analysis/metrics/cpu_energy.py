"""Energy of the processor packages of all nodes over the measure windows, where the run had its nodes to itself."""

from __future__ import annotations

import polars as pl

from .facts import Columns, Facts
from .gpu_samples import GpuSamples, null_reasons

TABLE, COUNTER = "samples_cpu", "energy_uj"


def find_cpu_energy(facts: Facts) -> Columns:
    """Return the energy, which is null with a reason where it is unknown on any node."""
    tables = [node.rows.get(TABLE) for node in facts.nodes] or [facts.tables[TABLE]]
    joules = [_of_node(facts, rows) for rows in tables]
    if reason := next((reason for reason in joules if isinstance(reason, str)), None):
        return Columns(values={}, reasons=dict.fromkeys(("cpu_energy_j", "joules_per_image_with_cpu"), reason))
    return Columns(values={"cpu_energy_j": sum(joules)})


def _of_node(facts: Facts, rows: pl.DataFrame | None) -> float | str:
    """Return the joules of one node, or why they are unknown."""
    # Each sidecar counts from 0, and a requeued job leaves the rows of an earlier one.
    own = None if rows is None else rows.filter(pl.col("t_unix_ns") >= (facts.manifest.started_unix_ns or 0))
    if own is None or own.is_empty():
        return f"no {TABLE}"
    if own[COUNTER].null_count() == own.height:
        return null_reasons(own["nulls"]).get(COUNTER, f"no {COUNTER}")
    if not own["whole_node"].all():
        return "the job did not hold every CPU of its node, whose packages other jobs may have used"
    (samples,) = GpuSamples.split(own.with_columns(gpu_uuid=pl.lit(TABLE)), [COUNTER])
    grown_uj = [samples.growth(COUNTER, span) or 0.0 for span in facts.spans]
    if min(grown_uj) <= 0:
        return f"{COUNTER} does not reach the edges of the window, or does not grow in it"
    return sum(grown_uj) * 1e-6
