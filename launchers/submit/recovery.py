"""What `sweep.json` held of points that have begun, from their run directories, where it is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launchers.points.point import Point
from launchers.sweep import run_dir_facts

from .rerun_policy import merged
from .submit import content, entry


def rebuilt(folder: Path, grid: Sequence[list[str]], compose: Callable[[int, Sequence[str]], Point]) -> dict[str, Any]:
    """The sweep's id, its begun points and their sites; nothing where no run directory is there.

    A point is as its last attempt was asked for and where that ran, in the words of its manifest, else of the grid.
    """
    sweep: dict[str, Any] = {"points": [], "sites": {}}
    for num, attempts in sorted(run_dir_facts.attempts(folder).items()):
        trace = run_dir_facts.Trace.of(folder, num, max(attempts))
        overrides = list(trace.overrides) if trace.overrides is not None else grid[num] if num < len(grid) else None
        if overrides is None:
            continue
        point = compose(num, merged(overrides, [f"site={trace.site}"] if trace.site else []))
        sweep["points"].append({**entry(point), "overrides": overrides})
        sweep["sites"][point.site.name] = content(point.site)
        if trace.sweep_id:
            sweep["sweep_id"] = trace.sweep_id
    return sweep
