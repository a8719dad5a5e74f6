"""What a run directory says about one completed run, and the record in which each stage gives its columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import msgspec
import polars as pl

from analysis.ingest.run_dir import NodeFiles
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.levers import LEVERS, is_active
from inpaint_bench.core.records import Environment, Manifest, TelemetryState, Window
from inpaint_bench.core.schema import COMMAND, Status, WindowKind

from .gpu_samples import Span

# Two processes read two clocks one after the other, and may wait for a core in between. In 89 runs on H200 cards and in
# 76 replays on a machine without GPU they agreed within 0.04 ms.
CLOCKS_AGREE_S = 0.2
REPLAY = "replay"  # telemetry that is played from a recording: its GPU says nothing about this machine


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of runs.parquet that one stage computes, and why others of them are null."""

    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run."""

    manifest: Manifest
    windows: list[Window]
    tables: Mapping[str, pl.DataFrame]  # the rows of every long table, in written order
    files: NodeFiles = field(default_factory=NodeFiles)
    nodes: Sequence[NodeFiles] = ()  # files of each of several nodes, rank 0's first; their rows are parts of `tables`
    strays: Sequence[str] = ()  # what was left out of the samples
    node: str = ""  # the name of the node, if these are the facts of one of several

    @cached_property
    def measured(self) -> list[tuple[Window, Span]]:
        measured = [window for window in self.windows if window.kind == WindowKind.MEASURE]
        completed = [window for window in measured if window.status == Status.COMPLETED]
        return [(window, span) for window in completed if (span := span_of(window))]

    @cached_property
    def samples(self) -> dict[str, pl.DataFrame]:
        return {name: rows for name, rows in self.tables.items() if name.startswith("samples_")}

    @cached_property
    def measured_samples(self) -> dict[str, pl.DataFrame]:
        """Return the rows of `samples` in the completed measure windows."""
        inside = pl.any_horizontal(pl.col("t_mono_ns").is_between(*span) for span in self.spans)
        return {name: rows.filter(inside) for name, rows in self.samples.items()}

    @property
    def sources(self) -> list[str]:
        return self.tables["samples_fast"]["source"].unique().drop_nulls().cast(pl.String).sort().to_list()

    @property
    def spans(self) -> list[Span]:
        return [span for _, span in self.measured]

    @property
    def seconds(self) -> float:
        """Return how long the completed measure windows are together."""
        return sum(end - start for start, end in self.spans) * 1e-9

    @property
    def replayed(self) -> bool:
        source = self.manifest.telemetry.source if self.manifest.telemetry else None
        return (source or "").startswith(REPLAY)

    @property
    def gpu_uuids(self) -> set[str]:
        return {device.uuid for device in self.manifest.devices if device.uuid}

    @property
    def is_command(self) -> bool:
        """Return whether an external program ran, whose steps, model and batch are unknown."""
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

    def by_node(self) -> list[Self]:
        """Return the facts of each node by itself; of one node these are all facts."""
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
            tables = {**self.tables, **node.rows}
            result.append(replace(self, manifest=facts, files=node, tables=tables, nodes=(), node=node.name))
        return result or [self]

    def own_events(self, uuids: set[str] | None = None) -> pl.DataFrame:
        """Return the events of these GPUs, by default the manifest's, or of no GPU in particular, since this start.

        A requeued job keeps its directory: its earlier events belong to another node.
        """
        own = pl.col("t_unix_ns") >= (self.manifest.started_unix_ns or 0)
        uuids = uuids if uuids is not None else self.gpu_uuids or None
        if uuids is not None:
            own &= pl.col("gpu_uuid").is_in(sorted(uuids)) | pl.col("gpu_uuid").is_null()
        return self.tables["events"].filter(own)

    def steps_of(self, window: Window) -> pl.DataFrame:
        """Return the rows of a window's steps, in order of their numbers."""
        return self.tables["steps"].filter(pl.col("window_id") == window.window_id).sort("step", maintain_order=True)


def span_of(window: Window) -> Span | None:
    """Return the start and the end of a window, None if it has no end or no length."""
    start, end = window.t_start_mono_ns, window.t_end_mono_ns
    return (start, end) if end is not None and end > start else None


def inactive_levers(manifest: Manifest) -> dict[str, str]:
    """Return the levers that the recipe names and that were not found active, with what was found."""
    inactive, facts = {}, manifest.workload_facts or {}
    for lever in manifest.levers or []:
        if lever.active is False:
            inactive[lever.name] = lever.evidence or "no evidence"
        elif lever.effective is None and lever.active:
            inactive[lever.name] = "nothing was read back"
        elif lever.effective is not None and not is_active(lever.field, lever.requested, lever.effective, facts):
            rank = lever.effective.get("rank") if isinstance(lever.effective, dict) else None
            inactive[lever.name] = f"{lever.effective if rank in (None, lever.requested) else rank} was read back"
    if manifest.levers is not None and manifest.recipe:
        # The first part of a name may be `baseline`, `cpu` or a bundle, whose levers are not spelled out.
        requested = recipe.requested_parts(manifest.overrides)
        listed = {lever.name for lever in manifest.levers} | {recipe.BASELINE, recipe.EARLIER, "cpu"}
        # A lever that a bundle sets and the recipe takes back, such as no_cache_masked, need not be listed.
        plain = recipe.without_levers("cpu" if manifest.recipe.split("+")[0] == "cpu" else "cuda")
        listed |= {name for name, lever in LEVERS.items() if lever.value == getattr(plain, lever.field)}
        listed |= {name for name in requested if name not in LEVERS}
        spelled = manifest.recipe.split("+")
        inactive |= {name: "the workload did not read it back" for name in spelled if name not in listed}
    return inactive


def number(value: object) -> float | None:
    """Return a number of the workload's own facts, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
