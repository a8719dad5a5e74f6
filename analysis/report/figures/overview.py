"""All figures of the report, by section."""

from __future__ import annotations

from dataclasses import dataclass, replace

import polars as pl

from analysis.dataset import Dataset
from analysis.stats import cells as aggregate
from analysis.stats.study import comparisons, is_study_run

from . import base, by_batch, energy_audit, pareto, quality, roofline, step_time, study, timeline, variation
from .base import Figure


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of each section of the page."""

    overview: list[Figure]
    absent: list[str]  # the reason for each figure of the overview that could not be drawn
    levers: list[Figure]
    training: list[Figure]
    timelines: list[Figure]
    study_timelines: list[Figure]  # of runs that only the tables of levers show

    def all(self) -> list[Figure]:
        """Return every figure, in the order of the page."""
        return [*self.overview, *self.levers, *self.training, *self.timelines, *self.study_timelines]


def draw(dataset: Dataset, cells: pl.DataFrame) -> Figures:
    """Draw the figures of a dataset. `cells` are those of the overview, without the recipes that only studies ran."""
    runs = dataset.runs
    figures, absent = overview(dataset, cells)
    timelines = timeline.draw(dataset, base.gpu_colours(cells))
    study_runs = set(runs.filter(is_study_run())["run_id"]) - set(base.run_ids_of(cells))
    return Figures(
        overview=_titled(figures, runs),
        absent=absent,
        levers=_titled(study.draw(comparisons(runs)), runs),
        training=_titled(quality.draw(runs), runs),
        timelines=_titled([figure for figure in timelines if not study_runs.intersection(figure.run_ids)], runs),
        study_timelines=_titled([figure for figure in timelines if study_runs.intersection(figure.run_ids)], runs),
    )


def overview(dataset: Dataset, cells: pl.DataFrame) -> tuple[list[Figure], list[str]]:
    """Draw the overview's figures; return them, and the reason for each one that cannot be drawn."""
    runs = dataset.runs
    all_cells = aggregate.build_cells(runs)  # figures that compare every cell with every other include those of studies
    if all_cells.is_empty():
        return [], []
    results: list[Figure | str | list[Figure]] = [
        by_batch.draw(cells, runs),
        pareto.draw(all_cells),
        step_time.draw(dataset, cells),
        variation.draw(all_cells, runs),
        energy_audit.draw(runs),
        roofline.draw(runs),
    ]
    drawn = [result if isinstance(result, list) else [result] for result in results if not isinstance(result, str)]
    return [figure for figures in drawn for figure in figures], [text for text in results if isinstance(text, str)]


def _titled(figures: list[Figure], runs: pl.DataFrame) -> list[Figure]:
    """Mark the titles if any run is a demonstration."""
    if not runs["demonstration"].any():
        return figures
    return [replace(figure, title=f"Demonstration: {figure.title}") for figure in figures]
