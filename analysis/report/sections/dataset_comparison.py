"""Tables of two datasets side by side: their cells, and what differs in their environments.

Cells belong together if all their keys agree except the site and the environment, which may differ. If several cells
have such keys, those of the same site belong together, and within one site those with the same environment.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS as ALL_METRICS
from analysis.dataset import Dataset
from analysis.report import names
from analysis.report.tables import COUNTS, DASH, Section, Table, TableBuilder, counts, mean_text
from analysis.stats import cells
from analysis.stats.cells import CELL_KEYS, Cell
from analysis.stats.intervals import Gain
from analysis.units import made, number
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError

from .study_tables import gain_text

METRICS = {"images_per_s": 1, "joules_per_image": -1}  # 1: more is better, -1: less is better
_WORK_KEYS = [name for name in CELL_KEYS if name not in ("site", "comparability_key")]
_ENVIRONMENT = ["site", "node", "gpu_name", "gpu_uuid", "power_limit_w", "driver", "torch", "cuda", "cudnn", "source"]
_ENVIRONMENT += ["code_version", "data_identity", "config_hash"]
COPY = "Both datasets hold the same runs, copied or merged twice: this compares no two measurements."
RECIPES = "comparison-recipes"  # id of their table
_ERROR = ALL_METRICS["energy_error_pct"]
_MOST_VALUES = 4  # values of one fact and dataset


class Verdict(StrEnum):
    """What a newer cell is beside the older one, the most notable first."""

    WORSE = "worse"
    WORSE_BY_MEAN = "worse, no interval"  # too few runs for one
    BETTER = "better"
    BETTER_BY_MEAN = "better, no interval"
    SIMILAR = "no difference shown"
    ONE_CARD = "no difference shown between cards"  # one card, or one card set, each
    UNKNOWN = "not comparable"  # no value on a side, or its runs disagree


FAILURES = (Verdict.WORSE, Verdict.WORSE_BY_MEAN, Verdict.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class CellPair:
    """A cell of the older dataset and the one of the newer dataset that does the same work."""

    old: Cell
    new: Cell

    def gain(self, metric: str) -> Gain | None:
        """Return the relative change of the metric, new over old, with its interval."""
        return cells.compare(self.new, self.old, metric)

    def verdict(self, metric: str, tolerance: float | None = None) -> Verdict:
        """Return what the new cell is in this metric.

        It is worse (better) if the whole interval is worse (better) than the old mean by more than `tolerance`, a
        fraction. Without an interval the ratio of the means decides, by more than the tolerance and its own limit.
        """
        gain, sign = self.gain(metric), METRICS[metric]
        if gain is None:
            return Verdict.UNKNOWN
        has_interval = gain.low is not None and gain.high is not None
        least = min((abs(end) for end in (gain.low, gain.high) if end is not None), default=abs(gain.value))
        if gain.tie or least <= (tolerance or 0):
            return Verdict.ONE_CARD if gain.one_card_each else Verdict.SIMILAR
        if sign * gain.value > 0:
            return Verdict.BETTER if has_interval else Verdict.BETTER_BY_MEAN
        return Verdict.WORSE if has_interval else Verdict.WORSE_BY_MEAN


@dataclass(frozen=True, kw_only=True)
class DatasetComparison:
    """The cells of two datasets, side by side."""

    pairs: list[CellPair]
    only_old: list[Cell]
    only_new: list[Cell]
    shared_runs: int = 0  # valid runs that are in both
    is_copy: bool = False  # both hold the same valid runs

    def failures(self, tolerance: float) -> list[str]:
        """Return a sentence per cell that is worse by more than `tolerance`, or cannot be shown not to be."""
        texts = [f"{cell_name(cell)}: no valid run in the new dataset" for cell in self.only_old]
        for pair in self.pairs:
            known = [metric for metric in METRICS if pair.old[metric] is not None or pair.old["withheld"]]
            verdicts = {metric: pair.verdict(metric, tolerance) for metric in known}
            bad = {metric: verdict for metric, verdict in verdicts.items() if verdict in FAILURES}
            texts += [f"{cell_name(pair.new)}: {metric} {verdict}" for metric, verdict in bad.items()]
            neither = made("the old dataset has neither images/s nor J/image of it", [pair.new["workload"]])
            texts += [] if known else [f"{cell_name(pair.new)}: {neither}"]
        return texts


def compare(old: pl.DataFrame, new: pl.DataFrame) -> DatasetComparison:
    """Return the cells of two tables of runs side by side."""
    # Names and labels over both, so that equal cells have equal names and different ones different names.
    old, new = recipe_labels.rename_together(old, new)
    labelled = [
        cells.withhold_means(cells.build_cells(runs)).with_columns(dataset=pl.lit(name))
        for name, runs in (("old", old), ("new", new))
    ]
    table = cells.add_series(pl.concat(labelled, how="diagonal_relaxed"))
    pairs, only_old, only_new = [], [], []
    for same_work in table.partition_by(_WORK_KEYS, maintain_order=True):
        olds, news = (same_work.filter(pl.col("dataset") == name).to_dicts() for name in ("old", "new"))
        for keys in ((), ("site",), ("site", "comparability_key")):
            for cell in list(olds):
                partners = [other for other in news if all(other[key] == cell[key] for key in keys)]
                rivals = [other for other in olds if all(other[key] == cell[key] for key in keys)]
                if len(partners) == len(rivals) == 1:
                    pairs.append(CellPair(old=cell, new=partners[0]))
                    olds.remove(cell)
                    news.remove(partners[0])
        only_old += olds
        only_new += news
    ids = [set(runs.filter("valid")["run_id"]) for runs in (old, new)]
    return DatasetComparison(
        pairs=pairs, only_old=only_old, only_new=only_new, shared_runs=len(ids[0] & ids[1]), is_copy=ids[0] == ids[1]
    )


def of_gpus(old: Dataset, new: Dataset, names: str) -> tuple[Dataset, Dataset]:
    """Return the runs of one GPU from each dataset, `names` being `h100,h200`, as if both were one GPU at one site.

    Raises UserError if these are not two GPUs, or a dataset has no run of its GPU.
    """
    gpus = [name.strip() for name in names.split(",")]
    if len(gpus) != 2 or gpus[0] == gpus[1]:
        raise UserError(f"--gpu {names}: name two GPUs, such as h100,h200: the old side and the new one")
    sides = []
    for dataset, gpu in zip((old, new), gpus, strict=True):
        runs = dataset.runs.filter(pl.col("gpu") == gpu)
        if runs.is_empty():
            known = ", ".join(dataset.runs["gpu"].drop_nulls().unique().sort())
            raise UserError(f"--gpu {names}: {dataset.folder} has no run on {gpu}, it has {known or 'no GPU'}")
        sides.append(replace(dataset, runs=runs.with_columns(gpu=pl.lit("→".join(gpus)), site=pl.lit(""))))
    return sides[0], sides[1]


def cell_name(cell: Cell) -> str:
    """Return what a cell is called in both datasets."""
    return " batch ".join([cell["series"], *([str(cell["batch"])] if cell["batch"] else [])])


def section(build: TableBuilder, comparison: DatasetComparison, old: Dataset, new: Dataset) -> Section:
    """Return the section that compares a dataset with an older one."""
    own = tables(build, comparison, old, new)
    verdicts = Counter(row[2].partition(" (")[0] for row in own[0].rows)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none in common"
    return Section(
        title=f"Compared with {old.folder.name}",
        workload="comparison",
        answer=f"{COPY} " * comparison.is_copy + f"Cells of both datasets: {counts}.",
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
        f"Worse, better: the whole interval of the change is on that side of 0{limit}, in images/s or in energy; where "
        "there are too few runs for an interval, the change of the means. Energy is compared as images/s are.",
        *names.of_many(len(rows)),
    ]
    if comparison.is_copy:
        notes.append(COPY)
    elif comparison.shared_runs:
        notes.append(f"Both datasets have {pluralize(comparison.shared_runs, 'run')} in common, which cannot differ.")
    for side, alone in (("old", comparison.only_old), ("new", comparison.only_new)):
        listed = ", ".join(map(cell_name, alone))
        notes += [f"In the {side} dataset only: {listed}."] if alone else []
    strong = frozenset(i for i, row in enumerate(rows) if row[2].startswith(Verdict.WORSE))
    lead = {"lead_columns": (*columns[:5],), "lead_rows": (*sorted(range(len(rows)), key=lambda i: i not in strong),)}
    title = "Old and new dataset"
    table = build.table("comparison", title, columns, rows, note=" ".join(notes), strong_rows=strong, **lead)
    return table.made_by([pair.new["workload"] for pair in comparison.pairs])


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
    label = made(ALL_METRICS[metric].label.lower(), [pair.new["workload"]])
    return f"{verdict} ({label})" if others else str(verdict)


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
