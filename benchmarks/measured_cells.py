"""Write the tables that rates are predicted from: measured and published cells, and errors of predictions.

`cells.csv`: the cells of the committed datasets, then those of the poster and of NVIDIA's NeMo page. `errors.csv`: each
measured cell beside others of the same configuration, and beside the line between the batches around it.

usage: python -m benchmarks.measured_cells
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import polars as pl

from analysis import published
from analysis.dataset import open_dataset
from inpaint_bench.core.estimates import memory, rates

RESULTS = Path(__file__).parent / "results"
LOSSES_ENDING = "-losses"  # how the names of datasets for losses end
ERRORS = ("kind", "what", "predicted", "reference")


def cells_table(cells: Sequence[rates.Cell]) -> list[list[Any]]:
    names = [name for name in rates.Cell.__annotations__ if name not in ("source", "work")]
    head = ["source", *rates.Work._fields, *names]
    values = [[cell.source, *cell.work, *(_short(getattr(cell, name)) for name in names)] for cell in cells]
    return [head, *values]


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def published_cells() -> Iterator[rates.Cell]:
    """Yield what the poster and NVIDIA's NeMo page published: whole trainings, without a spread of runs."""
    work = rates.Work("finetune_inpaint", published.MODEL, "", "poster_baseline", 512)
    figures = {(row["metric"], row["gpu"], row["batch"]): row["value"] for row in published.shown().to_dicts()}
    for (metric, gpu, batch), hours in figures.items():
        if metric == "runtime_h":
            seconds, watts = hours * 3600 / published.IMAGES, figures.get(("power_w", gpu, batch), 0.0)
            yield _published("the poster", work, gpu, 1, 1, batch, 1 / seconds, watts * seconds)
    page = published.read("nemo_gpu_comparison.csv").row(0, named=True)
    work = rates.Work("finetune_text2image", "sd2", "", "", 512)
    for row in published.read("nemo_scaling.csv").to_dicts():
        gpu = {"A100-80GB": "a100_80gb", "H100-80GB": "h100"}[row["gpu"]]
        yield _published("the NeMo page", work, gpu, 8, row["nodes"], page["micro_batch"], row["samples_per_s"], 0.0)


def _published(
    source: str, work: rates.Work, gpu: str, gpus: int, nodes: int, batch: int, images_per_s: float, joules: float
) -> rates.Cell:
    return rates.Cell(source=source, work=work, gpu=gpu, gpus=gpus, nodes=nodes, batch=batch, n=0, rate_cv=0.0,
                      images_per_s=images_per_s, joules_per_image=joules, other_s=0.0, ended="", vram_mib=0.0,
                      vram_run_mib=0.0)  # fmt: skip


def error_rows(cells: Sequence[rates.Cell]) -> Iterator[list[Any]]:
    """Yield kind, what, the prediction and what it is compared with."""
    for first, second in permutations(cells, 2):
        same = all(getattr(first, name) == getattr(second, name) for name in ("work", "gpus", "nodes", "batch", "gpu"))
        if same and first.source < second.source:
            what = f"{first.work.recipe} batch {first.batch} {first.work.model}, {first.gpu}, {first.source}"
            yield ["repeat", what, first.images_per_s, second.images_per_s]
    for cell in cells:
        others = [o for o in cells if (o.work, o.gpu, o.gpus, o.nodes) == (cell.work, cell.gpu, cell.gpus, cell.nodes)]
        if line := rates.between((o for o in others if o.source == cell.source), cell.batch):
            what = f"{cell.work.recipe} {cell.work.model}, {cell.gpu}, {cell.gpus} GPU, {cell.source}"
            yield ["batches", f"{what}, batch {cell.batch}", line[1].images_per_s, cell.images_per_s]


def _write(name: str, table: Iterable[Sequence[Any]]) -> bool:
    """Write a table. Return whether it changed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    path = memory.FOLDER / name
    changed = not path.is_file() or path.read_text() != text.getvalue()
    path.write_text(text.getvalue())
    return changed


def committed_runs() -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the runs of each committed dataset with all levers active."""
    for folder in sorted(path.parent for path in RESULTS.glob("*/dataset.json")):
        # A lever that was not active then may be today: until 28 November channels_last was undone in diffusers' UNet.
        yield folder.name, open_dataset(folder).runs.filter(pl.col("inactive_levers").is_null())


def measured_runs() -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the runs whose rates count: trainings whose losses are compared share a card, or have no warm-up."""
    return ((name, runs) for name, runs in committed_runs() if not name.endswith(LOSSES_ENDING))


def write_tables() -> list[str]:
    """Write both tables. Return the names of those that changed."""
    cells = [cell for name, runs in measured_runs() for cell in rates.cells_of(name, runs)]
    table = [
        [kind, what, _short(float(predicted)), _short(float(value))]
        for kind, what, predicted, value in error_rows(cells)
    ]
    changed = {
        "cells.csv": _write("cells.csv", cells_table([*cells, *published_cells()])),
        "errors.csv": _write("errors.csv", [ERRORS, *table]),
    }
    return [name for name, differs in changed.items() if differs]


def main() -> int:
    changed = write_tables()
    print("written:", ", ".join(changed) or "nothing new")
    rates.errors.cache_clear()
    for kind, worst in rates.errors().items():
        print(f"{kind}: {100 * worst:.1f} % (95 % quantile)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
