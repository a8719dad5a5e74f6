"""Energy of the processor packages of all nodes over the measure windows, where the run had its nodes to itself."""

from __future__ import annotations

import numpy as np
import polars as pl

from .facts import Columns, Facts
from .gpu_samples import GpuSamples, null_reasons

TABLE, COUNTER = "samples_cpu", "energy_uj"
FIGURES = ("cpu_energy_j", "joules_per_image_with_cpu")
SHARED = "the job did not hold every CPU of its node, whose packages other jobs may have used"


def find_cpu_energy(facts: Facts) -> Columns:
    """Return the energy, which is null with a reason where it is unknown on any node."""
    state = facts.manifest.telemetry
    if state is not None and state.source in (None, "none"):
        return Columns(values={}, reasons=dict.fromkeys(FIGURES, "telemetry off"))
    total_j = 0.0
    for rows in [node.rows.get(TABLE) for node in facts.nodes] or [facts.tables[TABLE]]:
        joules, reason = _of_node(facts, rows)
        if joules is None:
            return Columns(values={}, reasons=dict.fromkeys(FIGURES, reason))
        total_j += joules
    return Columns(values={"cpu_energy_j": total_j})


def _of_node(facts: Facts, rows: pl.DataFrame | None) -> tuple[float | None, str]:
    """Return the joules of one node, or why they are unknown."""
    # Each sidecar counts from 0, and a requeued job leaves the rows of an earlier one.
    own = None if rows is None else rows.filter(pl.col("t_unix_ns") >= (facts.manifest.started_unix_ns or 0))
    if own is None or own.is_empty():
        return None, f"no {TABLE}"
    if own[COUNTER].null_count() == own.height:
        return None, null_reasons(own["nulls"]).get(COUNTER, f"no {COUNTER}")
    if not own["whole_node"].all():
        return None, SHARED
    counter = {COUNTER: own[COUNTER].cast(pl.Float64).to_numpy()}
    t_ns, tick = (own[name].cast(pl.Int64).to_numpy() for name in ("t_mono_ns", "tick_seq"))
    samples = GpuSamples(uuid=TABLE, t_ns=t_ns, tick=tick, columns=counter)
    if (np.diff(samples.known(COUNTER).columns[COUNTER]) < 0).any():
        return None, f"{COUNTER} went back"
    grown_uj = [samples.growth(COUNTER, span) or 0.0 for span in facts.spans]
    if min(grown_uj) <= 0:
        return None, f"{COUNTER} does not reach the edges of the window, or does not grow in it"
    return sum(grown_uj) * 1e-6, ""
