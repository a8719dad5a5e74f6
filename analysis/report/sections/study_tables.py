"""Tables and figures of a study (ladder, one lever at a time, all levers but one), and of recipes outside studies."""

from typing import Any

import altair as alt
import polars as pl

from analysis import recipe_labels
from analysis.columns import METRICS
from analysis.report import names
from analysis.report.estimate import Estimate
from analysis.report.figures import base, by_batch, svg
from analysis.report.figures.base import Figure, Limits
from analysis.report.tables import (
    COUNTS,
    DASH,
    FIRST_ROWS,
    Section,
    Table,
    TableBuilder,
    counts,
    key_heading,
    mean_text,
)
from analysis.stats import cells
from analysis.stats.intervals import TIE_THRESHOLD, Gain
from analysis.stats.study import LADDER, LEAVE_ONE_OUT, ONE_AT_A_TIME, TITLES, Comparison, Step, comparisons, gain_over
from analysis.units import gpu_label, number
from inpaint_bench.core.console import pluralize

NOT_ACTIVE = "\u2717"  # before a lever that was requested but is not active, and before a parity error out of tolerance
_METRICS = ("vram_used_mib_peak", "vram_run_mib_peak", "power_w", "joules_per_image", "energy_error_pct", "compile_s")
_HEADINGS = {
    LADDER: ["Step", "Images/s", "Relative to previous step", "Relative to base"],
    ONE_AT_A_TIME: ["Lever", "Images/s", "Relative to base"],
    LEAVE_ONE_OUT: ["Recipe", "Images/s", "Change without it"],
}
_RATE = "images_per_s"
KINDS = {LADDER: "ladder of levers", ONE_AT_A_TIME: "one lever at a time", LEAVE_ONE_OUT: "all levers but one"}
_SCHEMA = {"label": pl.String, "text": pl.String, "n": pl.Int64}
_SCHEMA |= dict.fromkeys(("value", "low", "high", "least", "most"), pl.Float64)
_NAMED = 4  # levers that an answer names


def sections(build: TableBuilder) -> list[Section]:
    """Return a section for each study on each GPU and batch, whether its steps ran or not."""
    return [
        Section(
            title=f"{TITLES[study.kind]}: {study.setting}",
            workload=study.name,
            studied=study.workload,
            kinds=(KINDS[study.kind],),
            answer=_answer(study),
            best=f"{number(max(filter(None, _speeds(study)), default=None))} images/s",
            tables=[table(build, study)],
            figures=[figure for figure in [draw(study)] if figure],
        )
        for study in comparisons(build.runs)
    ]


def _speeds(study: Comparison) -> list[float | None]:
    return [step.summarise(_RATE)[_RATE] for step in study.steps]


def _answer(study: Comparison) -> str:
    """Return what the last step of a ladder gained in all, or which levers gain and which lose."""
    gains = [(i, gain) for i in range(1, len(study.steps)) if (gain := gain_over(study, i, 0))]
    if not gains:
        return f"{study.setting}: no step can be compared with the first."
    few = "" if any(gain.low is not None for _, gain in gains) else "; too few runs for an interval"
    if study.kind == LADDER:
        last, total = gains[-1]
        step, own = study.steps[last], gain_over(study, last, study.previous(last))
        rate = f"{step.attempts[0][recipe_labels.COLUMN]} reaches {number(_speeds(study)[last])} images/s"
        ratio = names.versus(1 + total.value, study.steps[0].label, tie=total.tie)
        change = "makes no difference that the runs show"
        if own and not own.tie:
            change = f"{'adds' if own.value > 0 else 'costs'} {abs(100 * own.value):.1f} %"
        return f"{study.setting}: {rate}, {ratio}; its last step, {step.label.removeprefix('+ ')}, {change}{few}."
    verbs = ("gain", "lose") if study.kind == ONE_AT_A_TIME else ("run faster without it", "run slower without it")
    parts = []
    for verb, sign in zip(verbs, (1, -1), strict=True):
        side = [(i, gain) for i, gain in gains if sign * gain.value > TIE_THRESHOLD and not gain.tie]
        side.sort(key=lambda pair: -sign * pair[1].value)
        changes = [f"{study.steps[i].label} {100 * gain.value:+.0f} %" for i, gain in side]
        parts += [f"{len(side)} {verb} ({names.join(changes, _NAMED)})"] if side else []
        gains = [pair for pair in gains if pair not in side]
    parts += [f"{len(gains)} show no difference or less than 2 %"] if gains else []
    measured = sum(bool(step.runs) for step in study.steps[1:])
    return f"{study.setting}: of {measured} levers {names.join(parts)}{few}."


def table(build: TableBuilder, study: Comparison) -> Table:
    """Return every step of the study, whether it ran or not; steps without a valid run are grey."""
    columns = [*_HEADINGS[study.kind], *(METRICS[name].heading for name in _METRICS), "Parity", *COUNTS, "Lever check"]
    columns += ["Recipe"] if study.kind == LADDER else []
    lead = (*_HEADINGS[study.kind], METRICS["joules_per_image"].heading)
    order = list(range(len(study.steps)))
    if study.kind != LADDER:  # whose steps are shown in their own order, as in the figure
        order.sort(key=lambda index: -(_speeds(study)[index] or 0))
    return build.table(
        study.name,
        ", ".join(filter(None, [f"{TITLES[study.kind]}: {study.setting}", study.workload_label])),
        columns,
        [_row(study, index) for index in range(len(study.steps))],
        note=_note(study),
        row_runs=[[run["run_id"] for run in step.runs] for step in study.steps],
        muted_rows=frozenset(index for index, step in enumerate(study.steps) if not step.runs),
        lead_columns=lead,
        lead_rows=tuple(order),
        lead_count=len(order) if study.kind == LADDER else FIRST_ROWS,
    )


def recipe_comparison(build: TableBuilder) -> Table:
    """Compare the recipes at equal work with the one of the fewest levers, of several the slowest."""
    rows, row_runs = [], []
    # Cells know the batch that ran, not the one that was requested.
    keys = ["batch" if name == "requested_batch" else name for name in cells.RECIPE_COMPARISON_KEYS]
    varying = [name for name in cells.varying_keys(build.cells) if name in keys and name != "model"]
    for group in build.cells.drop_nulls("images_per_s").partition_by(keys, maintain_order=True):
        each = group.sort("images_per_s").to_dicts()
        # `each` ascends: min returns the slowest of several recipes with as many levers.
        base = min(each, key=lambda cell: recipe_labels.count_parts(cell["recipe"]))
        work = [gpu_label(base["gpu"]), base["model"] or DASH, str(base["batch"]), base["site"]]
        work += [cells.key_text(base, name) or DASH for name in varying]
        for cell in [cell for cell in each if cell is not base]:
            recipes = [row[recipe_labels.COLUMN] or DASH for row in (cell, base)]
            rows.append([*work, *recipes, gain_text(cells.compare(cell, base, "images_per_s"), cell["n"])])
            row_runs.append(cell["run_ids"])
    columns = ["GPU", "Model", "Batch", "Site", *map(key_heading, varying), "Recipe", "Reference", "Change of images/s"]
    note = " ".join(names.of_many(len(rows)))
    return build.table("recipe-ratios", "Recipe comparison", columns, rows, note=note, row_runs=row_runs)


def gain_text(gain: Gain | None, runs: int | None = None, reference: str | None = None) -> str:
    """Return `+12.3 % (+10.1 to +14.5)`, with `tie` before it if the runs show no difference.

    The number of pairs is added if it is not `runs`, and `reference` if the heading does not name it.
    """
    if gain is None:
        return DASH
    low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
    remarks = [gain.remark] if gain.remark else []
    # Only if the column n would mislead: three runs on each side may form two pairs.
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
    speed = mean_text(step.summarise(_RATE), _RATE) if step.runs else step.status
    gains = [gain_text(gain_over(study, index, 0), len(step.runs))]
    if study.kind == LADDER:
        # The gain over the nearest earlier step that has runs, which is named if it is not the previous one.
        previous = study.previous(index) if step.runs else None
        skipped = study.steps[previous].label if previous is not None and previous != index - 1 else None
        gains.insert(0, gain_text(gain_over(study, index, previous), len(step.runs), skipped))
    metrics = [mean_text(step.summarise(name), name) for name in _METRICS]
    levers = "; ".join(filter(None, (_levers(step), step.failures))) or DASH
    row = [step.label, speed, *gains, *metrics, _parity(step), *counts(step.counts), levers]
    # The short name, as in the other tables; a step that never ran has its full name only.
    recorded = filter(None, (attempt.get(recipe_labels.COLUMN) for attempt in step.attempts))
    return [*row, next(recorded, step.recipe)] if study.kind == LADDER else row


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
    references = sorted({row["parity_reference"] for row in runs if row["parity_reference"]})
    against = f"the reference ({'; '.join(references)})" if references else "the reference"
    notes = [f"Parity: the largest relative error against {against} on fixed seeds, and of which quantity."]
    if far := [step.label for step in study.steps if step.parity_exceeded]:
        notes.append(f"Parity error out of tolerance, so not the same computation: {', '.join(far)}.")
    if runs and all(row["batch_requested"] for row in runs):
        batches = {step.label: sorted({row["batch"] for row in step.runs}) for step in study.steps if step.runs}
        sizes = ", ".join(f"{label} {'/'.join(map(str, values))}" for label, values in batches.items())
        notes.append(f"Batch sizes found by search (batch=auto): {sizes}.")
    unavailable = {(step.label, row["parity_unavailable"]) for step in study.steps for row in step.runs}
    if reasons := sorted(f"{label}: {reason}" for label, reason in unavailable if reason):
        notes.append(f"Parity unavailable for {'; '.join(reasons)}.")
    notes += [f"The runs differ in: {study.differences}."] if study.differences else []
    notes += names.of_many(len(study.steps))
    unmatched = pluralize(study.unmatched_runs, "run")
    notes += [f"{unmatched} of this study with a recipe that is not one of its steps."] if study.unmatched_runs else []
    return " ".join(notes)


def draw(study: Comparison) -> Figure | None:
    """Draw a study on one GPU and batch; None if no step has a valid run."""
    rows = _rates(study) if study.kind == LADDER else _gains(study)
    if rows.is_empty():
        return None
    if study.kind == LADDER:
        limits = base.axis_limits(rows["value"], base.interval_ends(rows), zero=True)
        subtitle = "Images/s, and the gain over the previous step"
        notes = ["Each step keeps all levers of the steps before it.", by_batch.interval_note(rows, limits)]
    else:
        # Gains are read against 0, which must be on the axis.
        limits = base.axis_limits([0.0, *rows["value"]], base.interval_ends(rows), zero=False)
        reference = "all levers" if study.kind == LEAVE_ONE_OUT else "the base recipe"
        subtitle = f"Change of images/s relative to {reference}; bar: 95 % confidence interval"
        notes = ["Not significant if the interval contains 0. Hollow: too few runs for an interval."]
        notes += [base.CUT_NOTE] if base.is_cut(rows, limits) else []
    run_ids = [row["run_id"] for step in study.steps for row in step.runs]
    notes += [f"Equal in every step: {study.workload_label}."] if study.workload_label else []
    notes += [base.n_note(run_ids, sum(bool(step.runs) for step in study.steps))]
    title = f"{TITLES[study.kind]}: {study.setting}"
    return base.figure(f"fig-{study.name}", title, subtitle, notes, _chart(study, rows, limits), run_ids)


def _change(gain: Gain | None) -> str:
    return "" if gain is None else f"{100 * gain.value:+.1f} %"


def _rates(study: Comparison) -> pl.DataFrame:
    metric, rows = "images_per_s", []
    for index, step in enumerate(study.steps):
        stats = step.summarise(metric)
        parts = number(stats[metric]), _change(gain_over(study, index, study.previous(index)))
        row = {"label": step.label, "text": ", ".join(filter(None, parts)), "n": len(step.runs), "value": stats[metric]}
        rows.append(row | {end: stats[f"{metric}_{column}"] for end, column in base.ENDS.items()})
    return pl.DataFrame(rows, schema=_SCHEMA).drop_nulls("value")


def _gains(study: Comparison) -> pl.DataFrame:
    """Return the gain of each step over the base in percent with its interval, largest first."""
    rows = []
    for index, step in enumerate(study.steps[1:], start=1):
        if gain := gain_over(study, index, 0):
            low, high = (None if end is None else 100 * end for end in (gain.low, gain.high))
            row = {"label": step.label, "text": _change(gain), "n": gain.n}
            rows.append(row | {"value": 100 * gain.value, "low": low, "high": high})
    return pl.DataFrame(rows, schema=_SCHEMA).sort("value", descending=True, maintain_order=True)


def _chart(study: Comparison, rows: pl.DataFrame, limits: Limits) -> alt.LayerChart:
    """Return the steps of a ladder in order, or gains sorted; steps that were not measured last."""
    is_ladder = study.kind == LADDER
    steps = study.steps if is_ladder else study.steps[1:]
    lacking = {step.label: step.status for step in steps if step.label not in set(rows["label"])}
    labels = [step.label for step in steps] if is_ladder else [*rows["label"], *lacking]
    y, texts = base.labelled_rows(labels)
    shift = base.BELOW
    room = 0.3 * (limits[1] - limits[0])  # for the text behind the largest value
    x = alt.X("value:Q").title("Images/s" if is_ladder else "Change of images/s [%]")
    x = x.axis(tickCount=4, grid=not is_ladder).scale(domain=[limits[0], limits[1] + room], nice=False)
    if is_ladder:
        bars = alt.Chart(rows).mark_bar(color=svg.SERIES[0], size=base.BAR_PX, **shift).encode(x, y)
        marks = [bars, *base.whiskers(rows, y, axis="x", color=svg.TEXT, **shift)]
    else:
        zero = alt.Chart(alt.InlineData(values=[{}])).mark_rule(color=svg.TEXT).encode(x=alt.datum(0))
        marks = [zero, *base.whiskers(rows, y, axis="x", color=svg.SERIES[0], **shift)]
        point = {"color": svg.SERIES[0], "size": 80, "opacity": 1, "strokeWidth": 1.5, **shift}
        for filled in (True, False):
            dots = rows.filter(pl.col("low").is_not_null() == filled)
            marks.append(alt.Chart(dots).mark_point(filled=filled, **point).encode(x, y))
    # The text begins behind the whisker, or where the axis cuts it off.
    end = pl.max_horizontal("value", pl.coalesce("high", "most")).clip(upper_bound=limits[1])
    reasons = [{"label": label, "text": text, "end": max(0.0, limits[0])} for label, text in lacking.items()]
    for data in (rows.with_columns(end=end), pl.DataFrame(reasons)):
        text = alt.Chart(data).mark_text(align="left", dx=7, color=svg.TEXT, **shift)
        marks += [text.encode(alt.X("end:Q"), y, text="text:N")] if data.height else []
    return base.layer(*marks, texts).properties(width=svg.WIDTH, height=alt.Step(base.ROW_PX))
