"""Sample images of runs, embedded in the page as data URIs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from analysis.units import gpu_label
from inpaint_bench.core.schema import SAMPLE_GRIDS

PAGE_BYTES = 24 * 2**20  # limit for all images on one page


def embed(folder: Path, runs: pl.DataFrame, cell_keys: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """Return a grid per cell, of its first valid run: workload, run_id, title and URI; and a note on those left out."""
    known = runs.filter(pl.col("sample_grid").is_not_null())
    valid = known.filter("valid").sort("seed", "run_id", nulls_last=True)
    shown: list[dict[str, str]] = []
    remaining, left_out = PAGE_BYTES, 0
    for row in valid.unique(cell_keys, keep="first", maintain_order=True).iter_rows(named=True):
        path = folder / row["sample_grid"]
        if not path.is_file() or path.stat().st_size > remaining:
            # Goes on: a smaller image may still fit.
            left_out += 1
            continue
        content = path.read_bytes()
        remaining -= len(content)
        uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        names = [gpu_label(row["gpu"]), *([row["model"]] if known["model"].n_unique() > 1 else [])]
        title = ", ".join([*names, f"batch {row['batch']}", row["recipe"], f"seed {row['seed'] or 0}"])
        shown.append({"workload": row["workload"], "run_id": row["run_id"], "title": title, "uri": uri})
    note = f"One valid run per recipe, GPU and batch; all {known.height} are in the dataset's {SAMPLE_GRIDS} folder."
    if left_out:
        note += f" {left_out} more are not on this page, which holds {PAGE_BYTES // 2**20} MiB of images."
    return shown, note if known.height else ""
