"""Write the tables that rates are predicted from: measured cells, shares of a step, and errors of such predictions.

`cells.csv`: the cells of the committed datasets. `shares.csv`: what limits the steps of the committed profiles, by
classes of kernels. `errors.csv`: every cell predicted without itself, beside what was measured; and the ratios
of cards beside those that the poster and NVIDIA's NeMo page published.

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

from analysis import published
from analysis.dataset import open_dataset
from inpaint_bench.core import estimates
from inpaint_bench.core.estimates import rates
from inpaint_bench.core.kernels import CONVOLUTIONS, KernelClass

from .step_record import read_profile

RESULTS = Path(__file__).parent / "results"
PROFILES = Path(__file__).parent / "profiles" / "2026-11-22-h200"
PRODUCTS = (*CONVOLUTIONS, KernelClass.GEMM, KernelClass.ATTENTION, KernelClass.CROSS_ATTENTION)
ERRORS = ("kind", "what", "predicted", "reference")


def cells_table(cells: Sequence[rates.Cell]) -> list[list[Any]]:
    names = [name for name in rates.Cell.__annotations__ if name not in ("source", "work")]
    head = ["source", *rates.Work._fields, *names]
    values = [[cell.source, *cell.work, *(_short(getattr(cell, name)) for name in names)] for cell in cells]
    return [head, *values]


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


def shares_table() -> list[list[Any]]:
    """Return the shares of a step's time: products by the tensor cores, other kernels by memory, and idle."""
    table: list[list[Any]] = [["recipe", "tensor", "memory", "idle"]]
    for path in sorted(PROFILES.glob("*.json")):
        profile = read_profile(path)
        step = profile.step_ms or profile.span_ms
        # A profiled step is neither as fast nor as hot as steps under load, and kernels may overlap.
        busy = step - profile.idle_ms
        products = sum(row.ms for row in profile.classes if row.kind in PRODUCTS) / profile.kernel_ms * busy
        parts = (products, busy - products, profile.idle_ms)
        table.append([path.stem, *(f"{part / step:.4f}" for part in parts)])
    return table


def error_rows(cells: Sequence[rates.Cell]) -> Iterator[list[Any]]:
    """Yield kind, what, the prediction and what it is compared with."""
    for first, second in permutations(cells, 2):
        same = all(getattr(first, name) == getattr(second, name) for name in ("work", "place", "batch", "gpu"))
        if same and first.source < second.source:
            what = f"{first.work.recipe} batch {first.batch} {first.work.model}, {first.gpu}, {first.source}"
            yield ["repeat", what, first.images_per_s, second.images_per_s]
    yield from (list(row) for row in rates.left_out_cards(cells))
    for cell in cells:
        others = [o for o in cells if (o.work, o.gpu, o.gpus, o.nodes) == (cell.work, cell.gpu, cell.gpus, cell.nodes)]
        others = [o for o in others if o.batch != cell.batch and o.source == cell.source]
        for one in (o for o in others if 0.25 <= o.batch / cell.batch <= 4):
            what = f"{cell.work.recipe} {cell.work.model}, {cell.gpu}, {cell.gpus} GPU, {cell.source}"
            yield ["one batch", f"{what}, batch {one.batch} to {cell.batch}", one.images_per_s, cell.images_per_s]
        if len({o.batch for o in others}) > 1:
            low, high = sorted(rates.nearest(others, cell.batch), key=lambda each: each.batch)
            predicted, _ = rates.between(low, high, cell.batch)
            yield ["batches", f"{what}, batch {cell.batch}", predicted, cell.images_per_s]


def published_rows() -> Iterator[list[Any]]:
    """Yield the same for ratios of cards that were published: times of the poster's training, rates of NeMo's."""
    tables = (published.read(name) for name in ("poster_runtime_hours.csv", "poster_power_w.csv"))
    hours, watts = ({(gpu.lower(), batch): v for gpu, batch, v, _ in table.iter_rows()} for table in tables)
    for (gpu, batch), value in hours.items():
        if gpu == "h200":
            continue
        slower = rates.slowdown("poster_baseline", "h200", gpu)
        what, reference = f"poster, batch {batch}, h200 to {gpu}", value / hours["h200", batch]
        yield ["card, published", what, slower, reference]
        share = rates.cards()[gpu].power_limit_w / rates.cards()["h200"].power_limit_w
        power = watts[gpu, batch] / watts["h200", batch]
        yield ["energy of a card, published", what, slower * share, reference * power]
    row = published.read("nemo_gpu_comparison.csv").row(0, named=True)
    slower = rates.slowdown("baseline", "h100", "a100")
    yield ["card, published", "NeMo, h100 to a100", slower, row["speedup_recomputed"]]


def _write(name: str, table: Iterable[Sequence[Any]]) -> bool:
    """Write a table. Return whether it changed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    path = estimates.FOLDER / name
    changed = not path.is_file() or path.read_text() != text.getvalue()
    path.write_text(text.getvalue())
    return changed


def write_tables() -> list[str]:
    """Write the three tables. Return the names of those that changed."""
    folders = sorted(path.parent for path in RESULTS.glob("*/dataset.json"))
    # Trainings whose losses are compared share a card.
    folders = [folder for folder in folders if not folder.name.endswith("-losses")]
    cells = [cell for folder in folders for cell in rates.cells_of(folder.name, open_dataset(folder).runs)]
    changed = {"shares.csv": _write("shares.csv", shares_table()), "cells.csv": _write("cells.csv", cells_table(cells))}
    seen = [*error_rows(cells), *published_rows()]
    table = [[kind, what, _short(float(predicted)), _short(float(value))] for kind, what, predicted, value in seen]
    changed["errors.csv"] = _write("errors.csv", [ERRORS, *table])
    return [name for name, differs in changed.items() if differs]


def main() -> int:
    changed = write_tables()
    print("written:", ", ".join(changed) or "nothing new")
    rates.errors.cache_clear()
    for kind, worst in rates.errors().items():
        print(f"{kind}: {100 * worst:.1f} % ({'largest' if 'card' in kind else '95 % quantile'})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
