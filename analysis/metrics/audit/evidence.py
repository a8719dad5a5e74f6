"""What a run directory says about one run, collected for the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import polars as pl

from analysis.metrics.gpu_samples import Span
from inpaint_bench.core.records import Environment, Manifest, TelemetryState, Window
from inpaint_bench.core.schema import COMMAND
from inpaint_bench.core.telemetry_records import TelemetryReport

# Two processes read two clocks one after the other, and may wait for a core in between. In 89 runs on H200 cards and in
# 76 replays on a machine without GPU they agreed within 0.04 ms.
CLOCKS_AGREE_S = 0.2
REPLAY = "replay"  # telemetry that is played from a recording: its GPU says nothing about this machine


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What the merge knows of a run directory besides manifest, windows and rows."""

    folder: Path | None = None
    sidecar: TelemetryReport | None = None  # telemetry.json
    footers: Mapping[str, list[dict[str, str]]] = field(default_factory=dict)  # metadata of each part, by table
    incomplete: frozenset[str] = frozenset()  # tables of which a file was left out, which is listed elsewhere


@dataclass(frozen=True, kw_only=True)
class NodeTelemetry:
    """What one sidecar of a run on several nodes wrote; times are on the clock of rank 0."""

    name: str
    files: RunFiles
    tables: Mapping[str, pl.DataFrame]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A completed run."""

    manifest: Manifest
    windows: list[Window]
    measured: list[tuple[Window, Span]]  # completed measure windows
    tables: Mapping[str, pl.DataFrame]
    files: RunFiles
    batch: int | None  # as found, where it was searched for
    nodes: Sequence[NodeTelemetry] = ()  # of a run on several, rank 0's first; their tables are parts of `tables`

    @property
    def samples(self) -> dict[str, pl.DataFrame]:
        """Return the sample tables, without what an exporter of the site measured by its own clock."""
        tables = {name: rows for name, rows in self.tables.items() if name.startswith("samples_")}
        return {
            name: rows.filter(~pl.col("source").cast(pl.String).str.starts_with("dcgm"))
            for name, rows in tables.items()
        }

    @property
    def replayed(self) -> bool:
        """Return whether the telemetry is a recording."""
        source = self.manifest.telemetry.source if self.manifest.telemetry else None
        return (source or "").startswith(REPLAY)

    @property
    def is_command(self) -> bool:
        """Return whether a program of somebody else ran, of which neither steps nor model nor batch are known."""
        return self.manifest.workload == COMMAND

    @property
    def uniform_steps(self) -> bool:
        """Return whether every step does the same work, so that rates and percentiles over steps mean something."""
        return (self.manifest.workload_facts or {}).get("uniform_steps") is not False

    @property
    def own_windows(self) -> list[Window]:
        """Return the windows since the start that the manifest describes: a requeued job keeps its directory."""
        started_ns = (self.manifest.started_unix_ns or 0) - round(CLOCKS_AGREE_S * 1e9)
        return [window for window in self.windows if window.t_start_unix_ns >= started_ns]

    @property
    def started_before(self) -> bool:
        """Return whether the directory holds an earlier start, by Slurm, by a checkpoint or by its manifest."""
        slurm, folder = self.manifest.slurm, self.files.folder
        requeued = slurm is not None and (slurm.restart_count or 0) > 0
        return requeued or bool(self.manifest.resumed) or (folder is not None and any(folder.glob("manifest.*.json")))

    def by_node(self) -> list[tuple[str, Evidence]]:
        """Return what each node says by itself, and its name; of one node that is everything."""
        manifest, result = self.manifest, []
        per_node = (manifest.gpus or 1) // max(manifest.nodes, 1)
        for index, node in enumerate(self.nodes):
            own = slice(index * per_node, (index + 1) * per_node)
            facts = msgspec.structs.replace(manifest, devices=manifest.devices[own])
            if index:  # the manifest has the facts of rank 0's node
                rank = next(iter((manifest.ranks or [])[own]), None)
                environment = msgspec.structs.replace(
                    manifest.environment or Environment(), hostname=rank and rank.node
                )
                state = msgspec.structs.replace(manifest.telemetry or TelemetryState(), status=None)
                facts = msgspec.structs.replace(facts, boot_id=None, environment=environment, telemetry=state)
            tables = {**self.tables, **node.tables}
            result.append((node.name, replace(self, manifest=facts, files=node.files, tables=tables, nodes=())))
        return result or [("", self)]

    def steps_of(self, window: Window) -> pl.DataFrame:
        """Return the rows of a window's steps, in order of their numbers."""
        return self.tables["steps"].filter(pl.col("window_id") == window.window_id).sort("step", maintain_order=True)


def number(value: object) -> float | None:
    """Return a number of the workload's own facts, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
