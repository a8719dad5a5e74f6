"""`merge`: run directories of all sites into one dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def run_merge(
    roots: Sequence[Path], output: Path, *, threads: int | None, allow_mixed: Sequence[str], as_json: bool
) -> None:
    """Merge the run directories below `roots` into `output`, and list what is left out, not valid or missing."""
    from analysis.dataset import open_dataset
    from analysis.ingest import planned
    from analysis.merge import merge
    from inpaint_bench.core.console import echo

    metadata = merge(list(roots), output, threads=threads or min(8, _usable_cores()), allow_mixed=allow_mixed)
    dataset = open_dataset(output)
    if as_json:
        invalid = dataset.runs.filter(~dataset.runs["valid"]).select("run_id", "invalid_reason")
        lists = {"skipped": dataset.skipped.to_dicts(), "not_valid": invalid.to_dicts()}
        names = ("run_directories", "runs", "runs_valid", "unchanged", "mixed", "points_without_run")
        echo(json.dumps({"dataset": str(output), **{name: metadata[name] for name in names}, **lists}, indent=1))
        return
    for row in dataset.skipped.iter_rows(named=True):
        prefix = "WARNING: " if row["code"] == "conflict" else ""
        echo(f"{prefix}skipped [{row['code']}] {row['path']}: {row['reason']}", error=True)
    for row in dataset.runs.filter(~dataset.runs["valid"]).iter_rows(named=True):
        echo(f"not valid: {row['run_id']}: {row['invalid_reason']}", error=True)
    for description in metadata["mixed"]:
        echo(f"separate cells: {description}", error=True)
    for sentence in planned.describe(metadata["points_without_run"]):
        echo(sentence, error=True)
    unchanged = f"unchanged since the last merge: {metadata['unchanged']}"
    merged = f"runs merged: {metadata['runs']}, valid: {metadata['runs_valid']}; entries skipped: {metadata['skipped']}"
    print(f"run directories: {metadata['run_directories']}, {unchanged}; {merged}")
    echo(f"dataset: {output}")


def _usable_cores() -> int:
    """Return the cores that this process may use: fewer than the machine has inside a Slurm job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
