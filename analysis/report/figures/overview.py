"""All figures of the report, by section of the page."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from analysis.dataset import Dataset
from analysis.stats.cells import build_cells
from analysis.stats.study import comparisons

from . import base, by_batch, energy_audit, pareto, quality, roofline, step_time, study, svg, timeline, variation
from .base import Figure

CHART_KINDS = {"layer": alt.LayerChart, "hconcat": alt.HConcatChart, "vconcat": alt.VConcatChart}  # by their key


def draw(dataset: Dataset, cells: pl.DataFrame) -> tuple[dict[str, list[Figure]], list[str]]:
    """Draw the figures of each section; return them, and the reason for each one of the overview that is missing.

    `cells` are those of the overview, without the recipes that ran in studies only.
    """
    runs = dataset.runs
    overview_figures, missing = overview(dataset, cells)
    sections = {
        "overview": overview_figures,
        "levers": study.draw(comparisons(runs)),
        "training": quality.draw(runs),
        "timelines": timeline.draw(dataset, base.gpu_colours(cells)),
    }
    if runs["demonstration"].any():
        sections = {name: base.mark_demonstration(figures) for name, figures in sections.items()}
    return sections, missing


def charts(dataset: Dataset) -> dict[str, Any]:
    """Return the figures as Altair charts, by the name of their files in the report; without the timelines of runs."""
    runs = dataset.runs
    figures = [*overview(dataset, build_cells(runs))[0], *study.draw(comparisons(runs)), *quality.draw(runs)]
    return {figure.id: _chart(svg.in_light_scheme(figure.titled_spec)) for figure in figures}


def _chart(spec: base.Spec) -> Any:
    kind = next((kind for name, kind in CHART_KINDS.items() if name in spec), alt.Chart)
    # Altair's validation takes seconds where there are thousands of points.
    return kind.from_dict(spec, validate=False)


def overview(dataset: Dataset, cells: pl.DataFrame) -> tuple[list[Figure], list[str]]:
    """Draw the overview's figures; return them, and the reason for each one that cannot be drawn."""
    runs = dataset.runs
    all_cells = build_cells(runs)  # figures that compare every cell with every other include those of studies
    if all_cells.is_empty():
        return [], []
    results = [
        *by_batch.draw(cells, runs),
        *([energy] if isinstance(energy := pareto.draw(all_cells), str) else energy),
        step_time.draw(dataset, cells),
        variation.draw(all_cells, runs),
        energy_audit.draw(runs),
        roofline.draw(runs),
    ]
    # In place of a figure that cannot be drawn there is the reason.
    return [item for item in results if isinstance(item, Figure)], [item for item in results if isinstance(item, str)]
