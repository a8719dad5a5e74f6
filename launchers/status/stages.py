"""The seconds of each stage of the runs of a sweep."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from inpaint_bench.core.console import share, table
from inpaint_bench.core.stages import STAGES

from .survey import PointStatus
from .tables import differing

WINDOW = "window"


def stages_table(points: Sequence[PointStatus]) -> Table:
    """Return a row per cell: the medians of its last attempts that have ended. Points of a cell differ in the seed."""
    cells: dict[tuple[object, ...], list[dict[str, float] | None]] = {}
    for point, overrides in zip(points, differing([point.record.overrides for point in points]), strict=True):
        record, manifest = point.record, point.artifacts.manifest
        changed = " ".join(override for override in overrides.split() if not override.startswith("seed="))
        ended = manifest is not None and manifest.ended_unix_ns is not None
        cells.setdefault((record.gpu, record.batch, changed), []).extend(
            [manifest.stages] if manifest and ended else []
        )
    rows: list[list[object]] = []
    for cell, runs in cells.items():
        known = [run for run in runs if run]
        seconds = [round(median(run.get(name, 0.0) for run in known), 1) if known else None for name in STAGES]
        shown = [value or None for value in seconds]
        total = round(median(sum(run.values()) for run in known), 1) if known else None
        beside = round(median(sum(run.values()) - run.get(WINDOW, 0.0) for run in known), 1) if known else None
        old = len(runs) - len(known)
        lacking = f"{share(old, len(runs), 'run', 'have')} no record of stages" if old else None
        note = lacking if runs else "not ended"
        rows.append([*cell, len(known), *shown, total, beside, note])
    return table(("gpu", "batch", "overrides", "n", *STAGES, "total", "beside the window", "note"), rows)
