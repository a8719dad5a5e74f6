"""The report's figures as Altair charts."""

from __future__ import annotations

from typing import Any

import altair as alt

from analysis.dataset import Dataset
from analysis.stats.cells import build_cells
from analysis.stats.study import comparisons

from . import by_batch, pareto, quality, roofline, step_time, study, svg
from .base import Figure

CHART_KINDS = {"layer": alt.LayerChart, "hconcat": alt.HConcatChart, "vconcat": alt.VConcatChart}  # by their key


def charts(dataset: Dataset) -> dict[str, Any]:
    """Return the figures as Altair charts, by the name of their files in the report; without the timelines of runs."""
    runs, cells = dataset.runs, build_cells(dataset.runs)
    drawn: list[Any] = [*by_batch.draw(cells), *pareto.draw(cells), *map(study.draw, comparisons(runs))]
    drawn += [*quality.draw(runs), step_time.draw(dataset, cells), roofline.draw(runs)]
    found = {}
    for each in drawn:
        if isinstance(each, Figure):
            spec = svg.in_light_scheme(each.titled_spec)
            kind = next((kind for key, kind in CHART_KINDS.items() if key in spec), alt.Chart)
            # Altair's validation takes seconds if there are thousands of points.
            found[each.id] = kind.from_dict(spec, validate=False)
    return found
