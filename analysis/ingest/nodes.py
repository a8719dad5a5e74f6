"""The telemetry of a run's further nodes, on the clock of rank 0.

The monotonic clocks of two nodes have nothing to do with each other. They are compared through the wall clocks, which
sites keep in step by NTP, as each sidecar read both when it started.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from inpaint_bench.telemetry.report import TelemetryReport

from . import parts
from .parts import SkippedFile, skipped
from .run_dir import NodeFiles, Run


def read_node(run: Run, node: NodeFiles) -> tuple[dict[str, pa.Table], TelemetryReport | None, list[SkippedFile]]:
    """Return the rows of a node's sidecar, its report, and what was skipped.

    Without the reports of this node and of rank 0's the times cannot be placed, and no row is taken.
    """
    run_id, ahead_ns = run.manifest.run_id, _ahead_ns(node.sidecar, run.sidecar)
    if node.sidecar is None or ahead_ns is None:
        reason = "without telemetry.json of both nodes the clocks cannot be compared: no row is taken from this folder"
        return {}, None, [skipped(run.folder / node.name, "no_clock", reason, run_id)]
    skips: list[SkippedFile] = []
    tables: dict[str, pa.Table] = {}
    for name, files in node.tables.items():
        rows, row_skips = parts.read_table(name, files, run_id)
        skips += row_skips
        index = rows.schema.get_field_index("t_mono_ns")
        tables[name] = rows.set_column(index, rows.schema.field(index), pc.subtract(rows["t_mono_ns"], ahead_ns))
    times = {name: getattr(node.sidecar, name) for name in ("started_mono_ns", "ended_mono_ns")}
    placed = {name: None if time_ns is None else time_ns - ahead_ns for name, time_ns in times.items()}
    return tables, msgspec.structs.replace(node.sidecar, **placed), skips


def _ahead_ns(node: TelemetryReport | None, leader: TelemetryReport | None) -> int | None:
    """Return how far a node's monotonic clock is ahead of that of rank 0's node."""
    if node is None or leader is None:
        return None
    if node.boot_id is not None and node.boot_id == leader.boot_id:  # one kernel
        return 0
    differences = [
        report.started_mono_ns - report.started_unix_ns
        for report in (node, leader)
        if report.started_mono_ns is not None and report.started_unix_ns is not None
    ]
    return differences[0] - differences[1] if len(differences) == 2 else None
