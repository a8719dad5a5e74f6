"""Print the summary below the table of a sweep, and one point in detail."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ClusterShell.RangeSet import RangeSet

from inpaint_bench.core.config.bench import RerunConfig
from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.files import open_plain
from inpaint_bench.core.schema import JOBS, PointState, Reason
from launchers.remote import plan_file
from launchers.remote.sync import LOGS
from launchers.slurm.pending_reasons import explain
from launchers.slurm.query import NOT_ASKED, OK
from launchers.sweep.attempt import queue_name

from .forecast import sweep_end
from .survey import AttemptStatus, PointStatus, SweepStatus, is_behind_link
from .tables import clock, duration, state_label

LOG_LINES = 15
LOG_BYTES = 16384  # read from the end: a log may be long


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
