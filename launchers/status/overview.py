"""What is said below the table of a sweep: how many, until when, who was asked, what waits and why, what to do."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from inpaint_bench.core.config import RerunConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import PointState, Reason
from launchers.remote import plan_file
from launchers.slurm.pending_reasons import explain
from launchers.slurm.query import NOT_ASKED, OK

from .forecast import Forecast, last_end
from .survey import PointStatus, SweepStatus
from .tables import clock, span, spans, summary


def footer(survey: SweepStatus, found: Mapping[int, Forecast], folder: Path) -> list[str]:
    """A line each; the first has the counts, the last what to do next, where there is something to do."""
    lines = [f"{summary(survey.points)}. {end(survey, found)}".strip(), witnesses(survey)]
    lines += waits(survey)
    lines += [f"Note: {note}" for note in survey.notes]
    return lines + list(following(survey, folder))


def end(survey: SweepStatus, found: Mapping[int, Forecast]) -> str:
    unix, how = last_end(survey.points, found)
    if unix is None:
        return f"When the last one ends is not known: {how}." if how else ""
    when = clock(unix, survey.polled_unix)
    return f"The last one ends at {when} ({span(max(0.0, unix - survey.polled_unix))} from now), {how}."


def witnesses(survey: SweepStatus) -> str:
    """Who answered, and what the states rest on where not all of Slurm did."""
    said = []
    for site, answer in sorted(survey.answers.items()):
        both = (("squeue", answer.squeue), ("sacct", answer.sacct))
        asked = [(name, how) for name, how in both if how != NOT_ASKED]
        heard = [name for name, how in asked if how == OK]
        line = f"{site} {', '.join(f'{name} {how}' for name, how in asked) or answer.no_answer_reason}"
        if not heard:
            line += ", so its states come from the files alone"
        elif len(heard) < len(asked):
            line += f", so its states come from {heard[0]} and the files"
        said.append(line)
    attempts = pluralize(sum(len(point.attempts) for point in survey.points), "attempt")
    return f"Asked at {clock(survey.polled_unix)}: {'; '.join([*said, f'files of {attempts}'])}."


def waits(survey: SweepStatus) -> list[str]:
    """A line per site and pending reason, those first that will not start by themselves."""
    alike: dict[tuple[str, str, str], list[PointStatus]] = {}
    for point in survey.points:
        if point.pending and point.record.last and point.scheduler:
            key = (point.record.last.site, point.scheduler.state or "", point.pending.code)
            alike.setdefault(key, []).append(point)
    lines = []
    for (site, state, code), waiting in alike.items():
        jobs = [s.record.last.job_id for s in waiting if s.record.last and s.record.last.job_id]
        why = explain(code, survey.sites[site], state=state, jobs=together(jobs))
        if why.advice != "nothing to do":
            will = "will not start as it is" if why.stuck else "waits"
            text = f"{pluralize(len(waiting), 'point')} of {site} ({code or state}): {why.text}; {why.advice}."
            lines.append((not why.stuck, f"{will.capitalize()}: {text}"))
    return [line for _, line in sorted(lines)]


def together(job_ids: Iterable[str]) -> list[str]:
    """Tasks of one array as Slurm's commands take them: 7_0, 7_1, 7_4 as 7_[0-1,4]."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, _, task = job_id.partition("_")
        arrays.setdefault(array, []).extend([int(task)] if task.isdecimal() else [])
    return [f"{array}_[{spans(sorted(tasks))}]" if tasks else array for array, tasks in arrays.items()]


def following(survey: SweepStatus, folder: Path) -> Iterator[str]:
    """What to type next."""
    where, points = shlex.quote(str(folder)), survey.points
    failed = [s for s in points if s.state is PointState.FAILED and s.reason is not None]
    planned = [s for s in points if s.state is PointState.PLANNED]
    rules = RerunConfig()
    again = Counter(s.reason for s in failed if s.reason and getattr(rules, s.reason).send)
    again.update(Reason.NEVER_STARTED for s in planned if not s.record.plan)
    kept = [s for s in failed if s.reason not in again and s.reason is not Reason.UNAVAILABLE]
    if again:
        yield f"Next: `inpaint-bench rerun {where}` sends {_counted(again)} again."
    if kept:
        reasons = Counter(s.reason for s in kept if s.reason)
        num = kept[0].record.num
        yield (
            f"Next: {_counted(reasons)} would end the same way again: `inpaint-bench status {where} --point {num}` "
            f"shows why, `inpaint-bench rerun {where} --only {','.join(sorted(reasons))} KEY=VALUE` sends them with "
            "what is to differ."
        )
    for plan, site in sorted({(s.record.plan, s.record.site) for s in planned if s.record.plan}):
        if survey.sites[site].connect.method == "ssh":
            yield f"Next: once {site} answers, `inpaint-bench rerun {where}` sends what waits in {plan}."
        else:
            carried = plan_file.path_to_carry(folder / plan)
            yield f"Next: carry {carried} to its site and run there: {plan_file.launch_command(carried.name)}"
    away = [s for s in points if s.state is PointState.COMPLETED and not s.is_collected]
    if away:
        yield f"Next: `inpaint-bench collect {where}` brings what {pluralize(len(away), 'point')} measured elsewhere."
    elif points and all(s.state is PointState.COMPLETED for s in points):
        yield f"Next: `inpaint-bench merge {where} -o dataset`"


def _counted(reasons: Mapping[Reason, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
