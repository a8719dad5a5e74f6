"""`merge`: run directories of all sites into one dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run_merge(roots: Sequence[Path], output: Path, *, processes: int | None, allow_mixed: Sequence[str]) -> None:
    """Merge the run directories below `roots` into `output` and list what was left out."""
    from analysis.dataset import open_dataset
    from analysis.merge import hold_memory, merge
    from inpaint_bench.core.console import sanitize

    hold_memory()
    account = merge(list(roots), output, processes=processes or min(8, _cores()), allow_mixed=allow_mixed)
    dataset = open_dataset(output)
    left_out = dataset.skipped.to_dicts()
    for row in left_out:
        loud = "WARNING: " if row["code"] == "conflict" else ""
        print(sanitize(f"{loud}skipped [{row['code']}] {row['path']}: {row['reason']}"), file=sys.stderr)
    for row in dataset.runs.filter(~dataset.runs["valid"]).iter_rows(named=True):
        print(sanitize(f"does not count: {row['run_id']}: {row['invalid_reason']}"), file=sys.stderr)
    for words in account["mixed"]:
        print(sanitize(f"kept apart: {words}"), file=sys.stderr)
    print(
        f"{account['run_directories']} run directories: {account['runs']} runs merged, "
        f"{account['runs_valid']} valid; {len(left_out)} entries skipped; {account['unchanged']} unchanged since the "
        "last merge"
    )
    print(f"dataset: {output}")


def _cores() -> int:
    """Processors that this process may use: fewer than the machine has inside a Slurm job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
