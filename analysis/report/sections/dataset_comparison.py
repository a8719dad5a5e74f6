"""Tables of two datasets side by side: their cells, and what differs in their environments."""

from __future__ import annotations

from collections import Counter

import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS as ALL_METRICS
from analysis.dataset import Dataset
from analysis.report import names
from analysis.report.section import Section
from analysis.report.tables import COUNTS, DASH, Table, TableBuilder, counts, mean_text
from analysis.stats.dataset_comparison import METRICS, CellPair, DatasetComparison, Verdict, cell_name
from analysis.units import number

from .study_tables import gain_text

_ENVIRONMENT = ["site", "node", "gpu_name", "gpu_uuid", "power_limit_w", "driver", "torch", "cuda", "cudnn", "source"]
_ENVIRONMENT += ["code_version", "data_identity", "config_hash"]
RECIPES = "comparison-recipes"  # id of their table
_ERROR = ALL_METRICS["energy_error_pct"]
_MOST_VALUES = 4  # values of one fact and dataset


def section(build: TableBuilder, comparison: DatasetComparison, old: Dataset, new: Dataset) -> Section:
    """Return the section that compares a dataset with an older one."""
    own = tables(build, comparison, old, new)
    verdicts = Counter(row[2].partition(" (")[0] for row in own[0].rows)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none in common"
    return Section(
        title=f"Compared with {old.folder.name}",
        workload="comparison",
        answer=f"Cells of both datasets: {counts}.",
        paragraphs=[f"Old: {old.folder.name}, merged {old.metadata.get('merged_at')}. New: this dataset."],
        tables=own,
    )


def tables(
    build: TableBuilder, comparison: DatasetComparison, old: Dataset, new: Dataset, tolerance: float | None = None
) -> list[Table]:
    """Return the table of the cells, what launches their recipes, and what differs between the environments."""
    runs = pl.concat(recipe_labels.rename_together(old.runs, new.runs), how="diagonal_relaxed")
    recipes = [[short, pasted] for short, pasted in recipe_labels.launch_overrides(runs.filter("valid")).items()]
    more = [build.table(RECIPES, "Recipes of both datasets", ["Recipe", "Overrides"], recipes)]
    more.append(_environment(build, comparison, old, new))
    return [_cells(build, comparison, tolerance), *(table for table in more if table.rows)]


def _cells(build: TableBuilder, comparison: DatasetComparison, tolerance: float | None) -> Table:
    columns = ["Cell", "Batch", "Result", *(f"Change of {ALL_METRICS[metric].label.lower()}" for metric in METRICS)]
    for metric in METRICS:
        columns += [f"{ALL_METRICS[metric].heading}, {side}" for side in ("old", "new")]
    columns += [f"{heading}, {side}" for side in ("old", "new") for heading in (_ERROR.heading, *COUNTS)]
    rows = [_row(pair, tolerance) for pair in comparison.pairs]
    limit = "" if tolerance is None else f" by more than {100 * tolerance:g} %"
    notes = [
        f"Worse, better: the whole interval of the ratio is{limit}, in images/s or in energy; where there are too few "
        "runs for an interval, the ratio of the means. Changes of energy are computed as those of images/s.",
        *names.of_many(len(rows)),
    ]
    if comparison.shared_runs:
        notes.append(f"{comparison.shared_runs} run(s) are in both datasets: of them nothing can differ.")
    for side, cells in (("old", comparison.only_old), ("new", comparison.only_new)):
        listed = ", ".join(map(cell_name, cells))
        notes += [f"In the {side} dataset only: {listed}."] if cells else []
    strong = frozenset(i for i, row in enumerate(rows) if row[2].startswith(Verdict.WORSE))
    return build.table(
        "comparison",
        "Old and new dataset",
        columns,
        rows,
        note=" ".join(notes),
        strong_rows=strong,
        lead_columns=tuple(columns[:5]),
        lead_rows=tuple(sorted(range(len(rows)), key=lambda i: i not in strong)),
    )


def _row(pair: CellPair, tolerance: float | None) -> list[str]:
    changes = [gain_text(pair.gain(metric)) for metric in METRICS]
    means = [mean_text(cell, metric) for metric in METRICS for cell in (pair.old, pair.new)]
    more = [text for cell in (pair.old, pair.new) for text in (mean_text(cell, _ERROR.name), *counts(cell))]
    return [pair.new["series"], str(pair.new["batch"] or DASH), _result(pair, tolerance), *changes, *means, *more]


def _result(pair: CellPair, tolerance: float | None) -> str:
    """Return the worst verdict of the metrics, with the metric if the two differ."""
    verdicts = {metric: pair.verdict(metric, tolerance) for metric in METRICS}
    known = {metric: verdict for metric, verdict in verdicts.items() if verdict is not Verdict.UNKNOWN}
    if not known:
        return Verdict.UNKNOWN
    metric, verdict = min(known.items(), key=lambda item: list(Verdict).index(item[1]))
    others = set(known.values()) - {verdict}
    return f"{verdict} ({ALL_METRICS[metric].label.lower()})" if others else str(verdict)


def _environment(build: TableBuilder, comparison: DatasetComparison, old: Dataset, new: Dataset) -> Table:
    """Return what the runs of the compared cells have in one dataset and not in the other."""
    sides = [
        dataset.runs.filter(pl.col("run_id").is_in([run for pair in comparison.pairs for run in cell(pair)["run_ids"]]))
        for dataset, cell in ((old, lambda pair: pair.old), (new, lambda pair: pair.new))
    ]
    rows = []
    for column in _ENVIRONMENT:
        values = [sorted(runs[column].drop_nulls().unique().to_list()) for runs in sides]
        if values[0] != values[1]:
            rows.append([column, *(_values(side) for side in values)])
    title = "What differs between the compared runs"
    return build.table("comparison-environment", title, ["Fact", "Old", "New"], rows)


def _values(values: list[str | float]) -> str:
    texts = [value if isinstance(value, str) else number(value) for value in values[:_MOST_VALUES]]
    more = len(values) - len(texts)
    return ", ".join([*texts, *([f"{more} more"] if more else [])]) or DASH
