"""Energy of the processor packages of all nodes over the measure windows, if the run had its nodes to itself."""

from __future__ import annotations

import numpy as np
import polars as pl

from inpaint_bench.core.records import Environment

from .facts import Columns, Facts
from .gpu_samples import GpuSamples, null_reasons

TABLE, COUNTER = "samples_cpu", "energy_uj"
WATTS = 1.0, 5000.0  # power of a node's packages between two samples: idle laptops draw more, eight large sockets less


def find_cpu_energy(facts: Facts) -> Columns:
    """Return the energy, which is null with a reason if it is unknown on any node."""
    nodes = facts.by_node()
    joules = [_of_node(node, node.files.rows.get(TABLE) if node.node else node.tables[TABLE]) for node in nodes]
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
    manifest, sidecar = facts.manifest, facts.files.sidecar
    environment = manifest.environment or Environment()
    held = (environment.cores or 0) * max(1, (manifest.gpus or 1) // max(manifest.nodes, 1))  # the ranks of a node
    known = max([environment.node_cores or 0, *(cpu + 1 for cpu in (sidecar.cpus if sidecar else ()))])
    if 0 < held < known:
        return f"the samples say that the job held every CPU of its node, and it had {held} of {known} or more"
    (samples,) = GpuSamples.split(own.with_columns(gpu_uuid=pl.lit(TABLE)), [COUNTER])
    grown_uj = [samples.growth(COUNTER, span) or 0.0 for span in facts.spans]
    if min(grown_uj) <= 0:
        return f"{COUNTER} does not reach the edges of the window, or does not grow in it"
    for t_ns, counter_uj in (samples.values(COUNTER, span) for span in facts.spans):
        watts = np.diff(counter_uj) * 1e3 / np.diff(t_ns)
        if len(wrong := watts[~((watts >= WATTS[0]) & (watts <= WATTS[1]))]):
            bounds = f"outside {WATTS[0]:g} to {WATTS[1]:,g} W: it wrapped, stands still or has another unit"
            return f"{COUNTER} grows as by {wrong[0]:.3g} W in {len(wrong)} of {len(watts)} steps, {bounds}"
    return sum(grown_uj) * 1e-6
