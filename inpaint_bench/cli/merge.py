"""`merge`: run directories of all sites into one dataset."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import parser, run_whole


def main(argv: Sequence[str] | None = None) -> int:
    does = (
        "Merge run directories, at any depth below the given roots, into one dataset. Inputs are only read. "
        "Everything that is left out is listed with its reason. Merging again into the same folder reads only what "
        "is new or changed. Runs that must not be averaged (docs/dataset.md) are refused, but for --allow-mixed."
    )
    options = parser("merge", does, "runs/grace runs/delta -o dataset")
    options.add_argument("roots", nargs="+", type=Path, metavar="ROOT", help="folder with run directories")
    out = "dataset folder; replaced if it is one"
    options.add_argument("-o", "--output", required=True, type=Path, metavar="DATASET", help=out)
    most = "read large amounts with as many processes (the cores that may be used, 8 at most)"
    options.add_argument("--processes", type=int, default=min(8, _cores()), metavar="N", help=most)
    mixed = (
        "take runs of one GPU at one site that differ in any of driver, board, power_limit, power_semantics (named "
        "with commas): they become cells of their own"
    )
    options.add_argument("--allow-mixed", default="", metavar="WHAT", help=mixed)
    return run_whole(options, _merge, argv)


def _cores() -> int:
    """Processors that this process may use: fewer than the machine has inside a Slurm job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _merge(options: argparse.Namespace) -> None:
    from analysis.dataset import open_dataset
    from analysis.merge import hold_memory, merge
    from inpaint_bench.core.console import sanitize

    hold_memory()
    allowed = [name for name in options.allow_mixed.split(",") if name]
    account = merge(options.roots, options.output, processes=options.processes, allow_mixed=allowed)
    dataset = open_dataset(options.output)
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
    print(f"dataset: {options.output}")


if __name__ == "__main__":
    sys.exit(main())
