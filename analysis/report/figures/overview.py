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
    drawn = [*by_batch.draw(cells, runs), *pareto.draw(cells), *map(study.draw, comparisons(runs)), *quality.draw(runs)]
    drawn += [step_time.draw(dataset, cells), roofline.draw(runs)]
    specs = {each.id: svg.in_light_scheme(each.titled_spec) for each in drawn if isinstance(each, Figure)}
    # Altair's validation takes seconds where there are thousands of points.
    return {
        name: next((kind for key, kind in CHART_KINDS.items() if key in spec), alt.Chart).from_dict(
            spec, validate=False
        )
        for name, spec in specs.items()
    }
