"""Studies, i.e. planned comparisons of recipes: every step with its runs, whether they ran or not.

Runs of a study are compared only with each other, within one workload, model, site, GPU, number of GPUs, batch and
resolution; recipe and precision are what is compared. A step without a valid run stays in its place and says why:
not run yet, unavailable on that machine, or failed.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from analysis.columns import PARITY
from analysis.metrics.run_row import is_unavailable
from analysis.units import gpu_label, gpu_order
from inpaint_bench.core.config.recipe import BASELINE, EARLIER, STUDIES

from . import agreement, cells
from .intervals import Gain, observations

LADDER, ONE_AT_A_TIME, LEAVE_ONE_OUT = "ladder", "one_at_a_time", "leave_one_out"
TITLES = {LADDER: "Ladder", ONE_AT_A_TIME: "One lever at a time", LEAVE_ONE_OUT: "All levers but one"}
_PLAIN = {BASELINE, EARLIER}
NOT_RUN = "not run yet"
_WORK = ("workload", "model", "variant", "gpus", "nodes", "resolution_px")
Row = dict[str, Any]  # row of runs.parquet


@dataclass(frozen=True, kw_only=True)
class Step:
    """One recipe of a study."""

    label: str
    recipe: str
    added: list[str] = field(default_factory=list)  # levers that distinguish it from what it is compared with
    attempts: list[Row]

    @property
    def runs(self) -> list[Row]:
        return [row for row in self.attempts if row["valid"]]

    @property
    def failures(self) -> str:
        """Return what happened to the attempts that are not valid, unless a later attempt at their point is."""
        if not self.attempts:
            return NOT_RUN
        points = {(run["sweep_id"], run["point"]) for run in self.runs if None not in (run["sweep_id"], run["point"])}
        # A failed attempt that a rerun of its point made good is no failure of the step.
        lost = [row for row in self.attempts if not row["valid"] and (row["sweep_id"], row["point"]) not in points]
        counts = Counter(map(_failure, lost))
        if not self.runs and len(counts) == 1:
            return next(iter(counts))
        return "; ".join(f"{count} {reason}" for reason, count in counts.items())

    @property
    def status(self) -> str:
        """Return a label for a step without a valid run."""
        if not self.attempts:
            return NOT_RUN
        return "unavailable" if any(map(is_unavailable, self.attempts)) else "no valid run"

    def levers(self) -> list[dict[str, Any]]:
        """Return every lever as its runs report it, the worst report of each: inactive before not checked."""
        rank = {False: 0, None: 1, True: 2}
        reports = [lever for row in self.runs for lever in json.loads(row["levers"] or "[]")]
        names = dict.fromkeys(lever["name"] for lever in reports)
        own = ([lever for lever in reports if lever["name"] == name] for name in names)
        return [min(levers, key=lambda lever: rank[lever.get("active")]) for levers in own]

    def parity(self) -> tuple[float, str] | None:
        """Return the largest error against the reference in any run, and the quantity that it is the error of."""
        errors = [
            (row[name], name.removeprefix("parity_").removesuffix("_rel"))
            for row in self.runs
            for name in PARITY
            if row[name] is not None
        ]
        return max(errors, default=None)

    @property
    def parity_exceeded(self) -> bool:
        return any(row["parity_exceeded"] for row in self.runs)

    @property
    def counts(self) -> dict[str, Any]:
        """Return n, cards and runs that were not steady, named as in a cell."""
        cards = {uuid for run in self.runs for uuid in (run["gpu_uuid"] or "").split(", ") if uuid}
        return {"n": len(self.runs), "cards": len(cards), "unsteady": sum(run["steady"] == "no" for run in self.runs)}

    @property
    def withheld(self) -> bool:
        return agreement.is_withheld(self.runs)

    def summarise(self, metric: str) -> dict[str, Any]:
        """Return mean, range, interval and n of a metric, named as in a cell."""
        known = observations(self.runs, metric)
        values = [value for _, value in known]
        mean, least, most = (sum(values) / len(values), min(values), max(values)) if values else (None, None, None)
        low, high = cells.metric_interval(metric, known) or (None, None)
        spread = {f"{metric}_min": least, f"{metric}_max": most, f"{metric}_low": low, f"{metric}_high": high}
        if self.withheld:
            mean, spread[f"{metric}_low"], spread[f"{metric}_high"] = None, None, None
        return {metric: mean, **spread, f"{metric}_n": len(values), "n": len(self.runs), "withheld": self.withheld}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A study on one GPU at one batch."""

    kind: str
    setting: str  # GPU, batch and site, with what other runs of the dataset differ in
    workload: str
    workload_label: str  # what else is equal in all of it
    name: str  # for ids and file names
    steps: list[Step]
    differences: str  # what its runs differ in, besides the recipe
    unmatched_runs: int  # runs of the study whose recipe is none of its steps

    def previous(self, index: int) -> int | None:
        """Return the nearest earlier step that has runs, None if there is none."""
        return next((i for i in range(index - 1, -1, -1) if self.steps[i].runs), None)


def step_gain(new: Step, old: Step, steps: Sequence[Step], metric: str = "images_per_s") -> Gain | None:
    """Return the relative change, new over old, with its interval; pairs are runs of one card with one seed.

    None if the runs of either disagree. The runs of all `steps` tell how much runs of this kind scatter.
    """
    if new.withheld or old.withheld:
        return None
    scatter = cells.scatter_of((step.runs for step in steps), metric)
    return cells.compare_runs(new.runs, old.runs, metric, [scatter, scatter])


def requested_batch() -> pl.Expr:
    """Return the batch as requested: `auto` is one group, whatever batch the search of each recipe found."""
    return pl.coalesce("batch_requested", pl.col("batch").cast(pl.String)).alias("requested_batch")


def comparisons(runs: pl.DataFrame) -> list[Comparison]:
    """Return every study on every GPU and batch that it was submitted for, also those without a valid run."""
    rows = runs.filter(pl.col("study_name").is_in(list(STUDIES))).with_columns(requested_batch())
    groups = comparable_groups(rows, "study_name", "study_base", "study_levers")
    groups.sort(key=lambda group: _order(group.row(0, named=True)))
    # Beside other work a study has to say whose it is; of nothing else in the dataset its kind is known without.
    among = {key: runs if key in ("workload", "model") else rows for key in ("site", *_WORK)}
    varying = {key for key, table in among.items() if table[key].drop_nulls().n_unique() > 1}
    return [_comparison(group, index, varying) for index, group in enumerate(groups)]


def comparable_groups(runs: pl.DataFrame, *more_keys: str) -> list[pl.DataFrame]:
    """Split runs, which have requested_batch, into groups whose recipes may be compared.

    A run that failed before it knew its resolution belongs to every resolution of its group; the same goes for its
    comparability key.
    """
    if runs.is_empty():
        return []
    # Not by these two, which a run that ended early may not know: it is added to every part below.
    keys = [name for name in cells.RECIPE_COMPARISON_KEYS if name not in ("resolution_px", "comparability_key")]
    result = []
    for group in runs.partition_by([*more_keys, *keys], maintain_order=True):
        resolution = pl.col("resolution_px")
        known = group["resolution_px"].drop_nulls().unique().sort().to_list()
        for part in [group.filter((resolution == px) | resolution.is_null()) for px in known] or [group]:
            labels = part.filter("valid")["comparability_key"].fill_null("").unique().sort().to_list()
            result += [part.filter(cells.same_comparability_key(label)) for label in labels] or [part]
    return result


def _order(row: Row) -> tuple[Any, ...]:
    kind = (LADDER, ONE_AT_A_TIME, LEAVE_ONE_OUT).index(row["study_name"])
    # Requested batches are text, one of them `auto`: padded, 8 comes before 16.
    return kind, gpu_order(row["gpu"]), row["site"], (row["requested_batch"] or "").zfill(8), row["study_levers"]


def _comparison(group: pl.DataFrame, index: int, varying: Collection[str]) -> Comparison:
    rows = group.to_dicts()
    first = rows[0]
    kind, base, levers = first["study_name"], first["study_base"], first["study_levers"].split(",")
    recipes = STUDIES[kind](base, levers)
    earlier = base == BASELINE and any((row["recipe"] or "").startswith(EARLIER) for row in rows)
    shown = EARLIER if earlier else base
    labels = {
        LADDER: [shown, *(f"+ {lever}" for lever in levers)],
        ONE_AT_A_TIME: [shown, *levers],
        LEAVE_ONE_OUT: ["all", *(f"without {lever}" for lever in levers)],
    }[kind]
    # A step may switch several levers on, e.g. `compile+cuda_graph`; leaving one out adds none.
    added = [[], *(lever.split("+") for lever in levers)] if kind != LEAVE_ONE_OUT else [[] for _ in labels]
    matches = [_matching_step(row, recipes) for row in rows]
    steps = []
    for place, (label, parts) in enumerate(zip(labels, recipes, strict=True)):
        attempts = [row for row, match in zip(rows, matches, strict=True) if match == place]
        # As its runs recorded it; a step that did not run is named by its parts.
        name = next((row["recipe"] for row in attempts if row["recipe"]), "+".join(parts).removeprefix("baseline+"))
        steps.append(Step(label=label, recipe=name, attempts=attempts, added=added[place]))
    first["resolution_px"] = next(iter(group["resolution_px"].drop_nulls()), None)
    first["model"] = first["model"] or "model unknown"
    work = {key: cells.key_text(first, key) for key in _WORK}
    named = [text for key, text in work.items() if key in varying]
    equal = [text for key, text in work.items() if key not in varying and first[key] != 1]  # one GPU, one node
    site = [first["site"]] if "site" in varying else []
    valid = group.filter("valid")
    # With what distinguishes these runs from others of this GPU and site, e.g. the driver version.
    environment = sorted(set(valid["comparability_key"].drop_nulls()))
    setting = [gpu_label(first["gpu"]), f"batch {first['requested_batch']}", *named, *site, *environment]
    return Comparison(
        kind=kind,
        setting=", ".join(filter(None, setting)),
        workload=first["workload"],
        workload_label=", ".join(filter(None, equal)),
        name=f"{kind.replace('_', '-')}-{index}",
        steps=steps,
        # Configurations differ by design: the recipe is part of them.
        differences=valid.select(cells.differences(ignore=("config_hash", "runtime_kind"))).item(),
        unmatched_runs=matches.count(None),
    )


def _matching_step(row: Row, recipes: list[list[str]]) -> int | None:
    """Return the step that a run belongs to: by the recipe that its point requested, else by its recipe's name."""
    levers = {lever for recipe in recipes for lever in recipe}
    # A key that was set for the whole sweep is not a lever of the study.
    requested = [part for part in (row["recipe_parts"] or "").split(",") if "=" not in part or part in levers]
    if requested in recipes:
        return recipes.index(requested)
    # As sets: in a recipe's name the levers may be in another order than in the study.
    named = {*(row["recipe"] or "").split("+")} - _PLAIN
    return next((index for index, recipe in enumerate(recipes) if {*recipe} - _PLAIN == named), None)


def _failure(row: Row) -> str:
    if is_unavailable(row):
        return f"unavailable: {row['message'] or 'no reason given'}"
    if row["status"] == "completed":
        return f"not valid: {row['invalid_reason']}"
    return f"{row['status']}" + (f" ({row['reason']})" if row["reason"] else "")


def gain_over(study: Comparison, index: int, reference: int | None) -> Gain | None:
    """Return the gain of one step over another; None for the reference itself and if either has no runs."""
    steps = study.steps
    return None if reference in (None, index) else step_gain(steps[index], steps[reference or 0], steps)
