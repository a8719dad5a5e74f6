"""Cells of two datasets that do the same work, and whether the newer dataset is worse.

Cells belong together if all their keys agree except the site and the environment, which may differ. If several cells
have such keys, those of the same site belong together, and within one site those with the same environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import polars as pl

from analysis import recipe_labels

from . import cells
from .cells import CELL_KEYS, Cell
from .intervals import ONE_CARD_EACH, Gain

METRICS = {"images_per_s": 1, "joules_per_image": -1}  # 1: more is better, -1: less is better
_WORK_KEYS = [name for name in CELL_KEYS if name not in ("site", "comparability_key")]


class Verdict(StrEnum):
    """What a newer cell is beside the older one, the most notable first."""

    WORSE = "worse"
    WORSE_BY_MEAN = "worse, no interval"  # too few runs for one
    BETTER = "better"
    BETTER_BY_MEAN = "better, no interval"
    SIMILAR = "no difference shown"
    ONE_CARD = ONE_CARD_EACH  # and no difference shown
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

    def failures(self, tolerance: float) -> list[str]:
        """Return a sentence per cell that is worse by more than `tolerance`, or cannot be shown not to be."""
        texts = [f"{cell_name(cell)}: no valid run in the new dataset" for cell in self.only_old]
        for pair in self.pairs:
            known = [metric for metric in METRICS if pair.old[metric] is not None or pair.old["withheld"]]
            verdicts = {metric: pair.verdict(metric, tolerance) for metric in known}
            bad = {metric: verdict for metric, verdict in verdicts.items() if verdict in FAILURES}
            texts += [f"{cell_name(pair.new)}: {metric} {verdict}" for metric, verdict in bad.items()]
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
    shared = old.filter("valid").join(new.filter("valid"), on="run_id", how="semi").height
    return DatasetComparison(pairs=pairs, only_old=only_old, only_new=only_new, shared_runs=shared)


def cell_name(cell: Cell) -> str:
    """Return what a cell is called in both datasets."""
    return f"{cell['series']} batch {cell['batch']}"
