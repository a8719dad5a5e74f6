"""The overview's figures, in the order of the page; where one cannot be drawn, the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.dataset import Dataset
from analysis.stats import cells as aggregate

from . import by_batch, energy_audit, pareto, roofline, step_time, variation
from .base import Figure


@dataclass(frozen=True, kw_only=True)
class Overview:
    figures: list[Figure]
    absent: list[str]  # a sentence each


def overview(dataset: Dataset, cells: pl.DataFrame, *, demonstration: bool) -> Overview:
    """`cells` are those of the overview; what compares every cell with every other draws those of studies, too."""
    prefix = "Demonstration: " if demonstration else ""
    runs = dataset.runs
    every = aggregate.build_cells(runs)
    if every.is_empty():
        return Overview(figures=[], absent=[])
    found: list[Figure | str | list[Figure]] = [
        by_batch.draw(cells, runs, prefix=prefix),
        pareto.draw(every, prefix=prefix),
        step_time.draw(dataset, cells, prefix=prefix),
        variation.draw(every, runs, prefix=prefix),
        energy_audit.draw(runs, prefix=prefix),
        roofline.draw(runs, prefix=prefix),
    ]
    drawn = [one if isinstance(one, list) else [one] for one in found if not isinstance(one, str)]
    return Overview(
        figures=[figure for several in drawn for figure in several],
        absent=[sentence for sentence in found if isinstance(sentence, str)],
    )
