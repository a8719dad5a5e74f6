"""The table of stages: medians of a cell, and what is said of runs without a record."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from inpaint_bench.core.records import ManifestHead
from inpaint_bench.core.schema import Status
from launchers.status.stages import stages_table


def point(batch: int, seed: int, stages: dict[str, float] | None, *, ended: bool = True) -> Any:
    manifest = ManifestHead(status=Status.COMPLETED, ended_unix_ns=1 if ended else None, stages=stages)
    record = SimpleNamespace(gpu="h200", batch=batch, overrides=[f"batch={batch}", f"seed={seed}", "recipe=tuned"])
    return SimpleNamespace(record=record, artifacts=SimpleNamespace(manifest=manifest))


def shown(*points: Any) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=200).print(stages_table(points))
    return [line.split() for line in out.getvalue().splitlines() if line.strip() and "─" not in line]


def test_row_per_cell_with_medians_over_seeds() -> None:
    head, small, large = shown(
        point(8, 0, {"imports": 5.0, "window": 15.0, "other": 1.0}),
        point(8, 1, {"imports": 7.0, "window": 15.0, "other": 2.0}),
        point(8, 2, {"imports": 30.0, "window": 15.0}),
        point(16, 0, {"imports": 5.0, "window": 15.0, "capture": 1.0}),
    )
    assert " ".join(head) == "gpu batch n imports capture window other total beside the window"
    assert small == ["h200", "8", "3", "7", "-", "15", "1", "24", "9"]
    assert large == ["h200", "16", "1", "5", "1", "15", "-", "21", "6"]


def test_earlier_runs_and_those_that_go_on_are_named() -> None:
    rows = shown(point(8, 0, {"imports": 5.0}), point(8, 1, None), point(16, 0, None), point(32, 0, None, ended=False))
    notes = [" ".join(row) for row in rows]
    assert notes[1].endswith("1 of 2 runs has no record of stages")
    assert notes[2].endswith("1 of 1 run has no record of stages")
    assert notes[3].endswith("not ended")
