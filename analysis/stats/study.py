"""Comparisons of recipes as they were asked for: every step of a study with its runs, ran or not.

A study's runs are compared with each other only, within one workload, model, site, GPU, card count, batch and
resolution. Recipe and precision differ: they are what is compared. A step without a run that counts stays in
its place and says why: not run yet, unavailable here, or failed.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis.columns import PARITY
from analysis.metrics.run_row import is_unavailable
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.recipe import STUDIES

from . import cells
from .intervals import MIN_DF, Gain, Observation, gain, pairing_key

LADDER, ONE_AT_A_TIME, LEAVE_ONE_OUT = "ladder", "one_at_a_time", "leave_one_out"
_STUDY = ["study_name", "study_base", "study_levers"]
NOT_RUN = "not run yet"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One recipe of a study."""

    label: str
    recipe: str
    added: list[str] = field(default_factory=list)  # levers that set it apart from what it is compared with
    attempts: list[dict[str, Any]]  # rows of the run table, whether they count or not
    runs: list[dict[str, Any]] = field(init=False)  # those that count

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", [row for row in self.attempts if row["valid"]])

    @property
    def failures(self) -> str:
        """Empty where everything that was tried counts; else what happened to the rest."""
        lost = [_fate(row) for row in self.attempts if not row["valid"] and not _made_good(row, self.runs)]
        if not self.attempts:
            return NOT_RUN
        counts = Counter(lost)
        if not self.runs and len(counts) == 1:
            return lost[0]
        return "; ".join(f"{count} {why}" for why, count in counts.items())

    @property
    def status(self) -> str:
        """One word or two for a step without a run that counts."""
        if not self.attempts:
            return NOT_RUN
        return "unavailable" if any(map(is_unavailable, self.attempts)) else "no run counts"

    def levers(self) -> list[dict[str, Any]]:
        """Every lever as found in its runs, the worst finding of each: not active before not checked."""
        rank = {False: 0, None: 1, True: 2}
        found: dict[str, dict[str, Any]] = {}
        for row in self.runs:
            for lever in json.loads(row["levers"] or "[]"):
                kept = found.get(lever["name"])
                if kept is None or rank[lever.get("active")] < rank[kept.get("active")]:
                    found[lever["name"]] = lever
        return list(found.values())

    def parity(self) -> tuple[float, str] | None:
        """The largest error against the reference that any of its runs found, and of what."""
        known = [
            (row[name], name.removeprefix("parity_").removesuffix("_rel"))
            for row in self.runs
            for name in PARITY
            if row[name] is not None
        ]
        return max(known, default=None)

    @property
    def parity_exceeded(self) -> bool:
        """Whether any of its runs was so far from the reference that something else is computed."""
        return any(row["parity_exceeded"] for row in self.runs)

    def summarise(self, metric: str) -> dict[str, Any]:
        """Mean, range, interval and n, named as in a cell."""
        found = observations(self.runs, metric)
        values = [value for _, value in found]
        ends = (sum(values) / len(values), min(values), max(values)) if values else (None, None, None)
        stats = dict(zip((metric, f"{metric}_min", f"{metric}_max"), ends, strict=True))
        low, high = cells.metric_interval(metric, found) or (None, None)
        return {**stats, f"{metric}_low": low, f"{metric}_high": high, f"{metric}_n": len(values), "n": len(self.runs)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A study on one GPU at one batch."""

    kind: str
    setting: str  # GPU, batch and site
    workload_label: str  # the rest of what is equal in all of it
    name: str  # for ids and file names
    steps: list[Step]
    differences: str  # what its runs differ in, beside the recipe
    unmatched_runs: int  # runs of the study whose recipe is none of its steps

    @property
    def has_runs(self) -> bool:
        return any(step.runs for step in self.steps)

    def previous_measured(self, index: int) -> int | None:
        """The nearest earlier step that has runs."""
        return next((i for i in range(index - 1, -1, -1) if self.steps[i].runs), None)


def step_gain(new: Step, old: Step, metric: str = "images_per_s") -> Gain | None:
    """New over old; pairs are runs of one card with one seed."""
    return gain(observations(new.runs, metric), observations(old.runs, metric), min_df=MIN_DF)


def observations(rows: list[dict[str, Any]], metric: str) -> list[Observation]:
    """A figure of each run that has it, by card and seed; see `pairing_key`."""
    known = [row for row in rows if row[metric] is not None]
    return [(pairing_key(row["gpu_uuid"] or row["node"], row["seed"], row["run_id"]), row[metric]) for row in known]


def is_study_run() -> pl.Expr:
    """Runs that a study sent."""
    return pl.col("study_name").is_in(list(STUDIES)).fill_null(False)


def comparisons(runs: pl.DataFrame) -> list[Comparison]:
    """Every study on every GPU and batch it was sent to, those without any run that counts included."""
    mine = runs.filter(is_study_run()).with_columns(requested_batch())
    if mine.is_empty():
        return []
    found = sorted(comparable_groups(mine, *_STUDY), key=lambda part: _order(part.row(0, named=True)))
    return [_comparison(part, index) for index, part in enumerate(found)]


def requested_batch() -> pl.Expr:
    """The batch as it was asked for: `auto` is one group, whatever each recipe's search found."""
    return pl.coalesce("batch_requested", pl.col("batch").cast(pl.String)).alias("requested_batch")


def comparable_groups(runs: pl.DataFrame, *more: str) -> list[pl.DataFrame]:
    """Runs whose recipes may be compared. `runs` has requested_batch.

    A run that failed before it knew its resolution belongs to every resolution of its group; the same where runs
    are told apart by what they must not be averaged across.
    """
    if runs.is_empty():
        return []
    keys = [
        *more,
        *(name for name in cells.RECIPE_COMPARISON_KEYS if name not in ("resolution_px", "comparability_key")),
    ]
    found = []
    for group in runs.partition_by(keys, maintain_order=True):
        own = pl.col("resolution_px")
        known = group["resolution_px"].drop_nulls().unique().sort().to_list()
        for part in [group.filter((own == px) | own.is_null()) for px in known] or [group]:
            apart = part.filter("valid")["comparability_key"].fill_null("").unique().sort().to_list()
            found += [part.filter(cells.same_comparability_key(one)) for one in apart] or [part]
    return found


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    kinds = (LADDER, ONE_AT_A_TIME, LEAVE_ONE_OUT)
    batch = row["requested_batch"] or ""
    return kinds.index(row["study_name"]), gpu_order(row["gpu"]), row["site"], batch.zfill(8), row["study_levers"]


def _comparison(part: pl.DataFrame, index: int) -> Comparison:
    rows = part.to_dicts()
    first = rows[0]
    kind, base, levers = first["study_name"], first["study_base"], first["study_levers"].split(",")
    wanted = STUDIES[kind](base, levers)
    labels = {
        LADDER: [base, *(f"+ {lever}" for lever in levers)],
        ONE_AT_A_TIME: [base, *levers],
        LEAVE_ONE_OUT: ["all", *(f"without {lever}" for lever in levers)],
    }[kind]
    places = [_place(row, wanted) for row in rows]
    added = [[], *(lever.split("+") for lever in levers)] if kind != LEAVE_ONE_OUT else [[] for _ in labels]
    steps = []
    for place, (label, parts) in enumerate(zip(labels, wanted, strict=True)):
        mine = [row for row, at in zip(rows, places, strict=True) if at == place]
        name = next((row["recipe"] for row in mine if row["recipe"]), "+".join(parts).removeprefix("baseline+"))
        steps.append(Step(label=label, recipe=name, attempts=mine, added=added[place]))
    what = [first["model"] or "model unknown"]
    what += [f"{first['gpus']} GPUs"] if (first["gpus"] or 1) > 1 else []
    what += [f"{px} px" for px in part["resolution_px"].drop_nulls().head(1)]
    valid = part.filter(pl.col("valid"))
    apart = sorted(set(valid["comparability_key"].drop_nulls()) - {""})
    return Comparison(
        kind=kind,
        setting=f"{gpu_label(first['gpu'])}, batch {first['requested_batch']}, {', '.join([first['site'], *apart])}",
        workload_label=", ".join(what),
        name=f"{kind.replace('_', '-')}-{index}",
        steps=steps,
        differences=cells.list_differences(valid, but=("config_hash", "runtime_kind")),
        unmatched_runs=places.count(None),
    )


def _place(row: dict[str, Any], wanted: list[list[str]]) -> int | None:
    """Which step a run is, by the recipes that its point asked for, or by its recipe's name."""
    parts = (row["recipe_parts"] or "").split(",")
    if parts in wanted:
        return wanted.index(parts)
    name = {*(row["recipe"] or "").split("+")} - {"baseline"}
    return next((i for i, one in enumerate(wanted) if {*one} - {"baseline"} == name), None)


def _fate(row: dict[str, Any]) -> str:
    if is_unavailable(row):
        return f"unavailable: {row['message'] or 'no reason given'}"
    if row["status"] == "completed":
        return f"does not count: {row['invalid_reason']}"
    return f"{row['status']}" + (f" ({row['reason']})" if row["reason"] else "")


def _made_good(row: dict[str, Any], runs: list[dict[str, Any]]) -> bool:
    """A later attempt at the same point counts."""
    point = (row["sweep_id"], row["point"])
    return None not in point and any((run["sweep_id"], run["point"]) == point for run in runs)


def overview_runs(runs: pl.DataFrame) -> pl.DataFrame:
    """Runs for the tables and figures over GPUs and batches: of the recipes that were sent outside a study.

    Where there are only studies, of their bases; the other recipes have the tables of their study.
    """
    outside = runs.filter(~is_study_run())["recipe"].unique()
    named = outside if len(outside) else runs["study_base"].unique()
    shown = runs.filter(pl.col("recipe").is_in(named.drop_nulls().to_list()))
    return shown if shown.height else runs
