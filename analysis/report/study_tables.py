"""Tables of a study: the ladder, one lever at a time, all levers but one."""

from __future__ import annotations

from typing import Any

import polars as pl

from analysis import recipe_labels
from analysis.stats import cells
from analysis.stats.intervals import Gain
from analysis.stats.study import LADDER, LEAVE_ONE_OUT, ONE_AT_A_TIME, Comparison, Step, step_gain
from analysis.units import METRICS, gpu_label, number

from .estimate import Estimate
from .tables import BRACKETS, Builder, Table, spread

# stands before every lever that was asked for and found not to work, and before a parity that is far off
NOT_ACTIVE = "\u2717"
BASELINE = "baseline"
_FIGURES = ("vram_used_mib_peak", "power_w", "joules_per_image", "compile_s")
_TITLES = {
    LADDER: "Ladder, one lever more each step",
    ONE_AT_A_TIME: "One lever at a time",
    LEAVE_ONE_OUT: "All levers but one",
}
_HEADS = {
    LADDER: ["Step", "Images/s", "Against the step before", "Against the base"],
    ONE_AT_A_TIME: ["Lever", "Images/s", "Against the base"],
    LEAVE_ONE_OUT: ["Recipe", "Images/s", "Change without it"],
}
METHOD = (
    "Gains are ratios of images/s with 95 % t-intervals of their logarithms, over pairs of runs of one card with one "
    "seed; where there are fewer than three, of the two means, over cards where several ran, and the cell says "
    "unpaired. No interval with fewer than three pairs, runs or cards. No difference seen: the interval holds 0. Each "
    "interval stands for itself: among twenty levers one may miss the truth by chance."
)


def table(build: Builder, one: Comparison) -> Table:
    """Every step of the study, ran or not; steps without a run that counts are greyed."""
    rows = [_row(one, index) for index in range(len(one.steps))]
    figures = [_heading(name) for name in _FIGURES]
    columns = [*_HEADS[one.kind], *figures, "Parity", "n", "Levers as found"]
    columns += ["Recipe"] if one.kind == LADDER else []
    return build.table(
        one.name,
        f"{_TITLES[one.kind]}: {one.setting}, {one.workload_label}",
        columns,
        rows,
        note=_note(one),
        key_columns=1,
        muted_rows=frozenset(i for i, step in enumerate(one.steps) if not step.runs),
    )


def between(build: Builder) -> Table | None:
    """Recipes that were sent outside a study, against the baseline or else the slowest; None where none compare."""
    rows = []
    keys = ["batch" if name == "requested_batch" else name for name in cells.RECIPE_COMPARISON_KEYS]
    known = build.cells.filter(pl.col("images_per_s").is_not_null())
    for group in known.partition_by(keys, maintain_order=True) if known.height else []:
        each = group.sort("images_per_s").to_dicts()
        base = next((cell for cell in each if cell["recipe"] == BASELINE), each[0])
        where = [gpu_label(base["gpu"]), str(base["batch"]), base["site"]]
        for cell in each:
            if cell is not base:
                found = cells.compare(cell, base, "images_per_s")
                rows.append(
                    [
                        *where,
                        *(one[recipe_labels.COLUMN] or "\u2013" for one in (cell, base)),
                        gain_words(found, cell["n"]),
                    ]
                )
    columns = ["GPU", "Batch", "Site", "Recipe", "Against", "Change of images/s"]
    note = f"At equal batch, model and resolution. {METHOD}"
    return build.table("recipe-ratios", "Recipes against each other", columns, rows, note=note) if rows else None


def gain_words(gain: Gain | None, runs: int | None = None, over: str | None = None) -> str:
    """`+12.3 % (+10.1 to +14.5)`, or that no difference was seen. Pairs are counted where they are not `runs`.

    `over` names the reference where the column's heading does not.
    """
    if gain is None:
        return "\u2013"
    kind = [] if gain.paired else ["unpaired"]
    ends = [None if end is None else 100 * end for end in (gain.low, gain.high)]
    if None in ends:
        pairs = gain.paired and gain.n != runs
        remarks = [f"{gain.n} pair{'s' if gain.n > 1 else ''}" if pairs else f"n = {gain.n}", "no interval", *kind]
    else:
        remarks = kind + ([f"{gain.n} pairs"] if gain.paired and runs not in (None, gain.n) else [])
    remarks += [f"against {over}"] if over else []
    verdict = "no difference seen" if None not in ends and gain.tie else ""
    return Estimate(100 * gain.value, *ends, form=_signed, unit="%", remarks=remarks, verdict=verdict)


def against(one: Comparison, index: int, reference: int | None) -> Gain | None:
    """Of one step over another; None for the reference itself and where either has no runs."""
    return None if reference in (None, index) else step_gain(one.steps[index], one.steps[reference or 0])


def _row(one: Comparison, index: int) -> list[str]:
    step = one.steps[index]
    speed = spread(step.summarise("images_per_s"), "images_per_s") if step.runs else step.status
    gains = [gain_words(against(one, index, 0), len(step.runs))]
    if one.kind == LADDER:
        gains.insert(0, _before(one, index))
    figures = [spread(step.summarise(name), name) for name in _FIGURES]
    found = "; ".join(text for text in (_levers(step), step.failures) if text) or "\u2013"
    tail = [_parity(step), str(len(step.runs)), found, *([_recipe(step)] if one.kind == LADDER else [])]
    return [step.label, speed, *gains, *figures, *tail]


def _recipe(step: Step) -> str:
    """As the other tables call it, where any run of the step knows that."""
    return next((row[recipe_labels.COLUMN] for row in step.attempts if row.get(recipe_labels.COLUMN)), step.recipe)


def _before(one: Comparison, index: int) -> str:
    step, before = one.steps[index], one.previous_measured(index)
    if before is None or not step.runs:
        return "\u2013"
    over = None if before == index - 1 else one.steps[before].label
    return gain_words(against(one, index, before), len(step.runs), over)


def _signed(value: float) -> str:
    return f"{value:+.1f}"


def _heading(name: str) -> str:
    return METRICS[name].heading


def _parity(step: Step) -> str:
    worst, far = step.parity(), step.parity_exceeded
    if worst is not None:
        return f"{NOT_ACTIVE} far: {number(worst[0])} ({worst[1]})" if far else f"{number(worst[0])} ({worst[1]})"
    if far:
        return f"{NOT_ACTIVE} far: not finite"
    if any(row["parity_unavailable"] for row in step.runs):
        return "unavailable"
    reference = any(row["parity_reference"] and row["parity_reference"] == row["recipe"] for row in step.runs)
    return "reference" if reference else "\u2013"


def _levers(step: Step) -> str:
    """What the step's own levers were asked to do and do, and every other one that is not as asked.

    Not active comes first, with a mark and the evidence.
    """
    found = sorted(step.levers(), key=lambda lever: lever.get("active") is not False)
    words = [_lever(lever) for lever in found if lever["name"] in step.added or lever.get("active") is not True]
    others = len(found) - len(words)
    return "; ".join([*words, *([f"{others} more active" if words else f"all {others} active"] if others else [])])


def _lever(lever: dict[str, Any]) -> str:
    asked, got = lever.get("requested"), lever.get("effective")
    if lever.get("active") is False:
        why = f" ({lever['evidence']})" if lever.get("evidence") else ""
        return f"{NOT_ACTIVE} {lever['name']} not active: asked {_value(asked)}, found {_value(got)}{why}"
    checked = "" if lever.get("active") else ", not checked"
    if asked == got:
        return f"{lever['name']}: {_value(got)} as asked{checked}"
    return f"{lever['name']}: asked {_value(asked)}, found {_value(got)}{checked}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _batches(step: Step) -> str:
    return "/".join(str(batch) for batch in sorted({row["batch"] for row in step.runs}))


def _note(one: Comparison) -> str:
    words = [BRACKETS, METHOD]
    cards = {row["gpu_uuid"] for step in one.steps for row in step.runs if row["gpu_uuid"]}
    if len(cards) == 1:
        words.append("All on one card: the intervals say nothing about another.")
    if any(one.steps[i].parity() for i in range(len(one.steps))):
        words.append("Parity: the largest relative error against the reference on fixed seeds, and of what.")
    far = [step.label for step in one.steps if step.parity_exceeded]
    if far:
        words.append(f"Far from the reference, and so no longer the same computation: {', '.join(far)}.")
    found = [f"{step.label} {_batches(step)}" for step in one.steps if step.runs]
    if found and all(row["batch_requested"] for step in one.steps for row in step.runs):
        words.append(f"Each recipe has the batch that a search found for it (batch=auto): {', '.join(found)}.")
    every = [(step.label, row["parity_unavailable"]) for step in one.steps for row in step.runs]
    lacking = {f"{label}: {why}" for label, why in every if why}
    if lacking:
        words.append(f"Parity unavailable for {'; '.join(sorted(lacking))}.")
    if one.differences:
        words.append(f"Its runs differ in: {one.differences}.")
    if one.unmatched_runs:
        words.append(f"{one.unmatched_runs} run(s) of this study have a recipe that is none of its steps.")
    return " ".join(words)
