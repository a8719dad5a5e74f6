"""Tables of a study (ladder, one lever at a time, all levers but one), and of recipes that ran outside studies."""

from __future__ import annotations

from typing import Any

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.report.estimate import Estimate
from analysis.report.tables import DASH, PARENTHESES, Table, TableBuilder, mean_text
from analysis.stats import cells
from analysis.stats.intervals import Gain
from analysis.stats.study import LADDER, LEAVE_ONE_OUT, ONE_AT_A_TIME, TITLES, Comparison, Step, gain_over
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize

NOT_ACTIVE = "\u2717"  # before a lever that was requested but is not active, and before a parity error out of tolerance
_METRICS = ("vram_used_mib_peak", "power_w", "joules_per_image", "compile_s")
_HEADINGS = {
    LADDER: ["Step", "Images/s", "Relative to previous step", "Relative to base"],
    ONE_AT_A_TIME: ["Lever", "Images/s", "Relative to base"],
    LEAVE_ONE_OUT: ["Recipe", "Images/s", "Change without it"],
}
METHOD = (
    "Gains are ratios of images/s with 95 % confidence intervals (Student's t of the logarithms) over pairs of runs on "
    "one card with one seed. With fewer than three pairs the two means are compared instead, over cards if several "
    "were used, and marked unpaired. Fewer than three pairs, runs or cards give no interval. Tie: the interval "
    "contains 0. The intervals are not corrected for multiple comparisons: about one in twenty misses the true value."
)


def table(build: TableBuilder, study: Comparison) -> Table:
    """Return every step of the study, whether it ran or not; steps without a valid run are grey."""
    columns = [*_HEADINGS[study.kind], *(METRICS[name].heading for name in _METRICS), "Parity", "n", "Lever check"]
    columns += ["Recipe"] if study.kind == LADDER else []
    return build.table(
        study.name,
        f"{TITLES[study.kind]}: {study.setting}, {study.workload_label}",
        columns,
        [_row(study, index) for index in range(len(study.steps))],
        note=_note(study),
        row_runs=[[run["run_id"] for run in step.runs] for step in study.steps],
        muted_rows=frozenset(index for index, step in enumerate(study.steps) if not step.runs),
    )


def recipe_comparison(build: TableBuilder) -> list[Table]:
    """Compare the recipes that ran outside a study with that of the fewest levers, of several the slowest."""
    rows, row_runs = [], []
    models = build.cells["model"].n_unique()
    # Cells know the batch that ran, not the one that was requested.
    keys = ["batch" if name == "requested_batch" else name for name in cells.RECIPE_COMPARISON_KEYS]
    for group in build.cells.drop_nulls("images_per_s").partition_by(keys, maintain_order=True):
        each = group.sort("images_per_s").to_dicts()
        # `each` ascends: of several recipes of as many levers, min returns the slowest.
        base = min(each, key=lambda cell: recipe_labels.count_parts(cell["recipe"]))
        for cell in each:
            if cell is not base:
                names = [row[recipe_labels.COLUMN] or DASH for row in (cell, base)]
                gain = gain_text(cells.compare(cell, base, "images_per_s"), cell["n"])
                model = [base["model"] or DASH] if models > 1 else []
                rows.append([gpu_label(base["gpu"]), *model, str(base["batch"]), base["site"], *names, gain])
                row_runs.append(cell["run_ids"])
    columns = ["GPU", *(["Model"] if models > 1 else []), "Batch", "Site", "Recipe", "Reference", "Change of images/s"]
    note = f"At equal batch size, model and resolution. {METHOD}"
    table = build.table("recipe-ratios", "Recipe comparison", columns, rows, note=note, row_runs=row_runs)
    return [table] if rows else []


def gain_text(gain: Gain | None, runs: int | None = None, reference: str | None = None) -> str:
    """Return `+12.3 % (+10.1 to +14.5)`, with `tie` before it if the interval contains 0.

    The number of pairs is added if it is not `runs`, and `reference` if the heading does not name it.
    """
    if gain is None:
        return DASH
    low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
    remarks = [] if gain.paired else ["unpaired"]
    # Only where the column n would mislead: three runs on each side may form two pairs.
    pairs = [pluralize(gain.n, "pair")] if gain.paired and gain.n != runs else []
    if low is None or high is None:
        remarks = [*(pairs or [f"n = {gain.n}"]), "no interval", *remarks]
    elif runs is not None:
        remarks += pairs
    remarks += [f"relative to {reference}"] if reference else []
    verdict = "tie" if gain.tie else ""
    return Estimate(100 * gain.value, low, high, form="{:+.1f}".format, unit="%", remarks=remarks, verdict=verdict)


def _row(study: Comparison, index: int) -> list[str]:
    step = study.steps[index]
    speed = mean_text(step.summarise("images_per_s"), "images_per_s") if step.runs else step.status
    gains = [gain_text(gain_over(study, index, 0), len(step.runs))]
    if study.kind == LADDER:
        # In the order of _HEADINGS: previous step, then base.
        gains.insert(0, _gain_over_previous(study, index))
    metrics = [mean_text(step.summarise(name), name) for name in _METRICS]
    levers = "; ".join(filter(None, (_levers(step), step.failures))) or DASH
    row = [step.label, speed, *gains, *metrics, _parity(step), str(len(step.runs)), levers]
    # The short name, as in the other tables; a step that never ran has its full name only.
    recorded = filter(None, (attempt.get(recipe_labels.COLUMN) for attempt in step.attempts))
    return [*row, next(recorded, step.recipe)] if study.kind == LADDER else row


def _gain_over_previous(study: Comparison, index: int) -> str:
    """Return the gain over the nearest earlier step that has runs, which is named if it is not the previous one."""
    step = study.steps[index]
    previous = study.previous(index)
    if previous is None or not step.runs:
        return DASH
    reference = None if previous == index - 1 else study.steps[previous].label
    return gain_text(gain_over(study, index, previous), len(step.runs), reference)


def _parity(step: Step) -> str:
    mark = f"{NOT_ACTIVE} out of tolerance: " if step.parity_exceeded else ""
    if worst := step.parity():
        return f"{mark}{number(worst[0])} ({worst[1]})"
    if step.parity_exceeded:
        return f"{mark}not finite"
    if any(row["parity_unavailable"] for row in step.runs):
        return "unavailable"
    is_reference = any(row["parity_reference"] and row["parity_reference"] == row["recipe"] for row in step.runs)
    return "reference" if is_reference else DASH


def _levers(step: Step) -> str:
    """Return requested and effective value of the step's own levers, and of every other one that is not active.

    Levers that are not active come first, marked and with the evidence.
    """
    levers = sorted(step.levers(), key=lambda lever: lever.get("active") is not False)
    parts = [_lever(lever) for lever in levers if lever["name"] in step.added or lever.get("active") is not True]
    # A ladder's step has all levers of the steps before it: those that work are only counted.
    if others := len(levers) - len(parts):
        parts.append(f"{others} more active" if parts else f"all {others} active")
    return "; ".join(parts)


def _lever(lever: dict[str, Any]) -> str:
    requested, effective = _value(lever.get("requested")), _value(lever.get("effective"))
    evidence = f" ({lever['evidence']})" if lever.get("evidence") else ""
    if lever.get("active") is False:
        return f"{NOT_ACTIVE} {lever['name']} not active: requested {requested}, effective {effective}{evidence}"
    if lever.get("active") is None and lever.get("effective") is None:
        return f"{lever['name']}: requested {requested}, not verified{evidence}"
    unverified = "" if lever.get("active") else ", not verified"
    if requested == effective:
        return f"{lever['name']}: {effective} as requested{unverified}"
    return f"{lever['name']}: requested {requested}, effective {effective}{unverified}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _note(study: Comparison) -> str:
    runs = [row for step in study.steps for row in step.runs]
    notes = [PARENTHESES, METHOD]
    if len({row["gpu_uuid"] for row in runs if row["gpu_uuid"]}) == 1:
        notes.append("All runs used one card: the intervals say nothing about others.")
    if any(step.parity() for step in study.steps):
        notes.append("Parity: the largest relative error against the reference on fixed seeds, and of which quantity.")
    if far := [step.label for step in study.steps if step.parity_exceeded]:
        notes.append(f"Parity error out of tolerance, so not the same computation: {', '.join(far)}.")
    if runs and all(row["batch_requested"] for row in runs):
        batches = {step.label: sorted({row["batch"] for row in step.runs}) for step in study.steps if step.runs}
        sizes = ", ".join(f"{label} {'/'.join(map(str, values))}" for label, values in batches.items())
        notes.append(f"Batch sizes found by search (batch=auto): {sizes}.")
    unavailable = {(step.label, row["parity_unavailable"]) for step in study.steps for row in step.runs}
    if reasons := sorted(f"{label}: {reason}" for label, reason in unavailable if reason):
        notes.append(f"Parity unavailable for {'; '.join(reasons)}.")
    disagreeing = [f"{step.label}: {step.disagreement}" for step in study.steps if step.disagreement]
    notes += [f"Runs disagree: {'; '.join(disagreeing)}."] if disagreeing else []
    if study.differences:
        notes.append(f"The runs differ in: {study.differences}.")
    if study.unmatched_runs:
        count = pluralize(study.unmatched_runs, "run")
        notes.append(f"{count} of this study with a recipe that is not one of its steps.")
    return " ".join(notes)
