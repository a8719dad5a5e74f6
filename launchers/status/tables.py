"""Show a sweep: its points before they are submitted, their states afterwards, and one point in detail."""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, tzinfo
from pathlib import Path
from textwrap import shorten
from typing import Any

from ClusterShell.RangeSet import RangeSet
from rich.table import Table

from inpaint_bench.core.config.bench import RerunConfig
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize, sanitize, table
from inpaint_bench.core.files import open_plain
from inpaint_bench.core.schema import JOBS, PointState, Reason
from launchers.points.point import Point
from launchers.remote import plan_file
from launchers.remote.sync import LOGS
from launchers.slurm.pending_reasons import explain
from launchers.slurm.query import NOT_ASKED, OK
from launchers.sweep.attempt import queue_name

from .cost import point_cost
from .forecast import Forecast, forecast_point, sweep_end
from .survey import AttemptStatus, PointStatus, SweepStatus, is_behind_link

LOG_LINES = 15
LOG_BYTES = 16384  # read from the end: a log may be long
FOLD_ABOVE = 100  # points: with more, similar points share a row
FOLD_FROM = 3  # similar points
DIFFERING = dict.fromkeys(("point", "batch", "overrides", "step", "cost"))  # columns that a shared row leaves out

# point, GPU, batch, overrides, array, cost
_PlannedRow = tuple[int | str, str, int | str | None, str, str, float | str | None]
LIKELY = ("likely memory", "likely min")
Likely = tuple[str | None, float | None]  # memory in words, minutes


def differing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each point the overrides that not all points share, without those that have a column."""
    common = set(overrides[0]).intersection(*overrides) if overrides else set()
    return [
        " ".join(o for o in point if o not in common and not o.startswith(("gpu=", "batch="))) for point in overrides
    ]


def plan_tables(
    points: Sequence[Point], starts: Mapping[str, str] | None = None, likely: Mapping[int, Likely] | None = None
) -> list[Table]:
    """Return the arrays, and the points in them, before submission.

    `starts` maps an array to the time at which Slurm expects to start it, `likely` a point to what it will likely need.
    If there are more than 100 points, similar ones share a row, which leaves that out.
    """
    units = {point.site.charging.unit for point in points if point.service_units is not None}
    arrays: dict[str, list[Point]] = {}
    for point in points:
        arrays.setdefault(_array(point), []).append(point)
    array_rows = []
    for array, members in arrays.items():
        point = members[0]
        again = f", up to {point.starts} times" if point.starts > 1 else ""
        limit_basis = ", ".join(dict.fromkeys(member.limit_basis for member in members if member.limit_basis))
        jobs = len({member.block for member in members}) if point.block is not None else None
        request = (len(members), jobs, str(point.request), f"{point.request.time_min} min{again}", limit_basis)
        start = (starts or {}).get(point.group)
        array_rows.append((array, point.site.name, point.request.partition, *request, start, point.site_basis))
    optional = ("limit from", "expected start", "soonest")  # soonest: what each site has said
    columns = ("array", "site", "partition", "points", "jobs", "request", "time limit", *optional)
    max_cost = f"max {next(iter(units))}" if len(units) == 1 else "max cost"
    rows: list[_PlannedRow] = [
        (point.num, point.bench.gpu.name, point.bench.batch, changed, _array(point), _cost(point, units))
        for point, changed in zip(points, differing([point.overrides for point in points]), strict=True)
    ]
    if len(points) > FOLD_ABOVE:
        similar: dict[object, list[_PlannedRow]] = {}
        for row in rows:
            _, gpu, _, _, array, cost = row
            similar.setdefault((gpu, array, cost), []).append(row)
        rows = [_folded(members) for members in similar.values()]
        likely = None
    needs = [(likely or {}).get(point.num, (None, None)) for point in points] if likely else [(None, None)] * len(rows)
    point_columns = ("point", "gpu", "batch", "overrides", "array", max_cost, *LIKELY)
    return [
        table(columns, array_rows, optional=("jobs", *optional)),
        table(point_columns, [(*row, *need) for row, need in zip(rows, needs, strict=True)], optional=LIKELY),
    ]


def _folded(rows: Sequence[_PlannedRow]) -> _PlannedRow:
    """Return one row for those that differ in point, batch and overrides; the cost is that of each point."""
    numbers, gpus, all_batches, all_overrides, arrays, costs = zip(*rows, strict=True)
    batches, overrides, cost = list(dict.fromkeys(all_batches)), list(dict.fromkeys(all_overrides)), costs[0]
    whole = all(isinstance(batch, int) for batch in batches)
    return (
        str(RangeSet(numbers)),
        gpus[0],
        shorten(str(RangeSet(batches)) if whole else ",".join(map(str, batches)), 40),
        overrides[0] if len(overrides) == 1 else f"{len(overrides):,} different",
        arrays[0],
        cost if cost is None else f"{cost:.4g} each" if isinstance(cost, float) else f"{cost} each",
    )


def _array(point: Point) -> str:
    """Return the number of the point's array, or the plan file that it waits in."""
    return point.group.partition("-")[0] or f"plan.{point.site.name}.yaml"


def _cost(point: Point, units: Collection[str]) -> float | str | None:
    cost: float | str | None = point.service_units
    # A unit that all sites share is in the heading of the column instead.
    if cost is not None and len(units) > 1:
        cost = f"{cost:.4g} {point.site.charging.unit}"
    return bounded(cost, point.has_bounded_rate)


def bounded(cost: float | str | None, is_upper_bound: bool) -> float | str | None:
    """Return a cost, marked if it is an upper bound."""
    if cost is None or not is_upper_bound:
        return cost
    return f"<= {cost if isinstance(cost, str) else f'{cost:.4g}'}"


def points_table(points: Sequence[PointStatus], sites: Mapping[str, SiteConfig], *, fold: bool = True) -> Table:
    """Return a row per point. `fold`: of more than 100 points those in the same state share a row."""
    groups: dict[object, list[dict[str, Any]]] = {}
    for point, overrides in zip(points, differing([point.record.overrides for point in points]), strict=True):
        row = _row(point, sites, overrides)
        # Running points keep a row each: step and expected end are their own.
        alone = not fold or len(points) <= FOLD_ABOVE or point.state is PointState.RUNNING
        state = tuple((row | DIFFERING | {"job": bool(row["job"])}).values())
        groups.setdefault(row["point"] if alone else state, []).append(row)
    rows: list[dict[str, Any]] = []
    for similar in groups.values():
        if len(similar) < FOLD_FROM:
            rows += similar
        else:
            job = pluralize(len(similar), "job") if similar[0]["job"] else None
            numbers = str(RangeSet([row["point"] for row in similar]))
            rows.append(similar[0] | DIFFERING | {"point": numbers, "job": job})
    columns = list(rows[0]) if rows else []
    optional = ("attempt", "job", "site", "cost", "end", "overrides")
    return table(columns, [list(row.values()) for row in rows], optional=optional)


def _row(point: PointStatus, sites: Mapping[str, SiteConfig], overrides: str) -> dict[str, Any]:
    record, last = point.record, point.record.last
    forecast, cost = forecast_point(point), point_cost(point, sites)
    return {
        "point": record.num,
        "gpu": record.gpu,
        "batch": record.batch,
        "overrides": overrides,
        "site": record.site,
        "attempt": last.attempt if last else None,
        "job": last.job_id if last else None,
        "state": state_label(point),
        "reason": str(point.reason) if point.reason else None,
        "step": _steps(forecast),
        "cost": bounded(cost.at_most, cost.is_upper_bound or cost.actual != cost.at_most),
        "end": None if forecast.end_unix is None else f"{'by ' * forecast.is_latest}{clock(forecast.end_unix)}",
        "message": _message(point, forecast),
    }


def state_label(point: PointStatus) -> str:
    """Return the state as shown: `unavailable` is separate, though the attempt itself has failed."""
    return str(Reason.UNAVAILABLE if point.reason is Reason.UNAVAILABLE else point.state)


def _steps(forecast: Forecast) -> str | None:
    return None if forecast.step is None else f"{forecast.step} of {forecast.steps_total or '?'}"


def _message(point: PointStatus, forecast: Forecast) -> str:
    message = point.message
    if point.state is PointState.RUNNING:
        message = message.removeprefix(f"step {_steps(forecast)}").strip(" ,")  # has a column of its own
    parts = [message]
    if forecast.start_unix is not None:
        parts.append(f"expected to start at {clock(forecast.start_unix)}")
    if forecast.basis.startswith("should"):
        parts.append(forecast.basis)
    return "; ".join(filter(None, parts))


def calendar_time(unix: float, zone: tzinfo | None = None) -> datetime | None:
    """Return a time in a time zone, by default the local one; None for what is no time, as a damaged file may have."""
    try:
        return datetime.fromtimestamp(unix, zone)
    except (ValueError, OverflowError, OSError):
        return None


def clock(unix: float) -> str:
    """Return a local time, with the day if it is not today; "?" for what is no time."""
    time = calendar_time(unix)
    if time is None:
        return "?"
    return f"{time:%H:%M}" if time.date() == datetime.now().date() else f"{time:%a %d %b %H:%M}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "45 s", "12 min", "3 h 5 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    # Rounded before it is divided: 3,599 s are 1 h, not 60 min.
    hours, minutes = divmod(round(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    parts = [f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if number]
    return " ".join(parts[:2])


# --- the lines below the table -------------------------------------------------------------------


def footer(sweep: SweepStatus, folder: Path) -> list[str]:
    """Return lines: counts and ETA, sources, pending reasons, notes, and what to do next."""
    counts = Counter(map(state_label, sweep.points))
    summary = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    end_unix, basis = sweep_end(sweep.points)
    eta = f"ETA unknown: {basis}." if basis else ""
    if end_unix is not None:
        eta = f"ETA {clock(end_unix)} (in {duration(max(0.0, end_unix - sweep.polled_unix))}), {basis}."
    lines = [f"{pluralize(len(sweep.points), 'point')}: {summary}. {eta}".strip(), sources(sweep)]
    lines += [*_pending_reasons(sweep), *_likely(sweep)]
    lines += [f"Note: {note}" for note in sweep.notes]
    return lines + list(next_steps(sweep, folder))


def sources(sweep: SweepStatus) -> str:
    """Return the results of Slurm's commands by site, and what its states are based on if one did not answer."""
    texts = []
    for queue, reply in sorted(sweep.replies.items()):
        commands = {"squeue": reply.squeue, "sacct": reply.sacct}
        queried = [f"{name} {result}" for name, result in commands.items() if result != NOT_ASKED]
        answered = [name for name, result in commands.items() if result == OK]
        text = f"{queue} {', '.join(queried) or reply.no_answer_reason}"
        if not answered or len(answered) < len(queried):
            text += f", so its states come from {' and '.join([*answered, 'the files'])}"
        texts.append(text)
    attempts = pluralize(sum(len(point.attempts) for point in sweep.points), "attempt")
    return f"Sources at {clock(sweep.polled_unix)}: {'; '.join([*texts, f'files of {attempts}'])}."


def _likely(sweep: SweepStatus) -> Iterator[str]:
    """Yield how long completed points took, beside what was predicted of them."""
    took_s, likely_s, count = 0.0, 0.0, 0
    for point in sweep.points:
        manifest, last = point.artifacts.manifest, point.record.last
        predicted = point.state is PointState.COMPLETED and last and last.likely_min
        if predicted and manifest and manifest.started_unix_ns and manifest.ended_unix_ns:
            took_s += (manifest.ended_unix_ns - manifest.started_unix_ns) / 1e9
            likely_s, count = likely_s + 60 * predicted, count + 1
    if count:
        yield f"{pluralize(count, 'completed run')} took {duration(took_s)}, {duration(likely_s)} were likely."


def _pending_reasons(sweep: SweepStatus) -> list[str]:
    """Return a line per site and pending reason, first those of jobs that will not start by themselves."""
    groups: dict[tuple[str, str | None, str, str], list[str]] = {}
    for point in sweep.points:
        if point.pending and point.record.last and point.scheduler:
            key = (point.record.last.site, point.record.last.cluster, point.scheduler.state or "", point.pending.code)
            groups.setdefault(key, []).append(point.record.last.job_id or "")
    lines = []
    for (name, cluster, state, code), job_ids in groups.items():
        pending = explain(code, replace(sweep.sites[name], cluster=cluster), state=state, jobs=folded_job_ids(job_ids))
        if pending.advice != "nothing to do":
            label = "Will not start" if pending.stuck else "Pending"
            points = f"{pluralize(len(job_ids), 'point')} at {queue_name(name, cluster)} ({code or state})"
            # False sorts before True: jobs that will not start by themselves come first.
            lines.append((not pending.stuck, f"{label}: {points}: {pending.explanation}; {pending.advice}."))
    return [line for _, line in sorted(lines)]


def folded_job_ids(job_ids: Iterable[str]) -> list[str]:
    """Return tasks of an array as Slurm's commands accept them: 7_0, 7_1, 7_4 as 7_[0-1,4], 7_0 as it is."""
    arrays: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, _, task = job_id.partition("_")
        arrays.setdefault(array, []).extend([int(task)] if task.isdecimal() else [])
    folded = ((array, RangeSet(tasks)) for array, tasks in arrays.items())
    return [f"{a}_[{tasks}]" if len(tasks) > 1 else f"{a}_{tasks}".removesuffix("_") for a, tasks in folded]


def next_steps(sweep: SweepStatus, folder: Path) -> Iterator[str]:
    """Yield the commands to run next."""
    path = shlex.quote(str(folder))
    # Also those that were never submitted.
    failed = [point for point in sweep.points if sweep.can_rerun and point.reason and not point.record.plan]
    resubmitted = Counter(str(point.reason) for point in failed if _is_resubmitted(point))
    permanent = [p for p in failed if not _is_resubmitted(p) and p.reason is not Reason.UNAVAILABLE]
    if resubmitted:
        yield f"Next: `inpaint-bench rerun {path}` resubmits {_counts(resubmitted)}."
    if permanent:
        reasons = Counter(str(point.reason) for point in permanent)
        yield (
            f"Next: {_counts(reasons)} would fail the same way again: "
            f"`inpaint-bench status {path} --point {permanent[0].record.num}` shows why, `inpaint-bench rerun {path} "
            f"--only {','.join(sorted(reasons))} KEY=VALUE` resubmits with changes."
        )
    for plan, site in sorted({(p.record.plan, p.record.site) for p in sweep.points if p.record.plan}):
        if sweep.sites[site].connection.over_ssh:
            yield f"Next: once {site} can be reached, `inpaint-bench rerun {path}` submits the points in {plan}."
        else:
            yield f"Next: {plan_file.advice(folder / plan, site)}"
    completed = [point for point in sweep.points if point.state is PointState.COMPLETED]
    if remote := sum(not point.is_collected for point in completed):
        yield f"Next: `inpaint-bench collect {path}` copies the results of {pluralize(remote, 'point')} here."
    elif completed and len(completed) == len(sweep.points):
        yield f"Next: `inpaint-bench merge {path} -o dataset`"


def _is_resubmitted(point: PointStatus) -> bool:
    """Return whether `rerun` submits a failed point without `--only`: the default policy, or the point's override."""
    policy = f"rerun.{point.reason}.send="
    values = [o.partition("=")[2] for o in point.record.overrides if o.lstrip("+").startswith(policy)]
    if values:
        return values[-1].strip().lower() in ("true", "yes", "on", "y", "1")  # as OmegaConf reads a bool
    return bool(getattr(RerunConfig(), str(point.reason)).send)


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))


# --- one point -----------------------------------------------------------------------------------


def point_details(shown: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the fields of a point in `status --json` that have a value, and the end of the logs of failed attempts."""
    for key, value in shown.items():
        blocks = [value] if isinstance(value, dict) else value if key == "attempts" else []
        for block in blocks:
            yield f"{indent}{key.removesuffix('s')}:"
            yield from point_details(block, indent + "  ")
        if value not in (None, "", [], {}) and not blocks:
            yield f"{indent}{key}: {' '.join(map(str, value)) if isinstance(value, list) else value}"
    if shown.get("state") == PointState.FAILED:
        for log in map(Path, shown.get("logs", ())):
            yield f"{indent}end of {log}:"
            yield from (f"{indent}  | {line}" for line in _tail(log))


def log_files(status: AttemptStatus, folder: Path) -> list[Path]:
    """Return the existing files of the job's stderr and stdout, also those that `collect` has copied."""
    job_id, group = status.attempt.job_id, status.attempt.group
    if job_id is None:
        return []
    # A process of pid:1234@host has logs that are named by its process id.
    stem = job_id.removeprefix("pid:").partition("@")[0]
    if job_id.startswith("pid:"):
        return sorted(
            path for path in (folder / JOBS / group).glob(f"task-*/{stem}_0_log.*") if not is_behind_link(folder, path)
        )
    # The other site numbers its arrays itself; site, partition and GPU after the number are the same.
    kind = group.partition("-")[2]
    collected = sorted(path for path in (folder / LOGS).glob("*") if path.name.partition("-")[2] == kind)
    parents = [folder / JOBS / group, *collected]
    paths = [parent / f"{stem}_0_log.{suffix}" for suffix in ("err", "out") for parent in parents]
    with suppress(OSError):
        return [path for path in paths if path.is_file() and not is_behind_link(folder, path)]
    return []


def _tail(path: Path) -> list[str]:
    """Return the last lines of a log, without control characters."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    # A progress bar redraws its line after "\r": only its last state is of interest.
    lines = [line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()]
    return [sanitize(line) for line in lines[-LOG_LINES:]]
