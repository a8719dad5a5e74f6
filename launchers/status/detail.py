"""One point in detail: its attempts, the scheduler's own words, where its log lies, and how that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from inpaint_bench.core.attempt_state import Verdict
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.schema import JOBS, PointState, Status
from launchers.remote.export import LOGS

from .forecast import Outlook
from .survey import Standing, Survey, Tried
from .tables import clock, span, state

TAIL_LINES = 15
TAIL_BYTES = 16384  # read from the end: a log may be long


def point(survey: Survey, standing: Standing, outlook: Outlook, folder: Path) -> Iterator[str]:
    """Lines of text."""
    record, word = standing.record, standing.verdict
    yield f"point {record.num} at {record.site}: {' '.join(record.overrides) or 'as configured'}"
    yield "  " + _said(state(standing), word)
    if standing.pending:
        yield f"  to do: {standing.pending.advice}"
    if outlook.step is not None:
        pace = f", {outlook.images_per_s:.4g} images/s" if outlook.images_per_s is not None else ""
        age = f" ({span(outlook.pace_age_s)} ago)" if pace and outlook.pace_age_s is not None else ""
        yield f"  step {outlook.step} of {outlook.steps_total or '?'}{pace}{age}"
    if outlook.begins_unix is not None:
        yield f"  expected to start at {clock(outlook.begins_unix, survey.looked_unix)}"
    if standing.open:
        latest = "at the latest " if outlook.at_most else ""
        ends = None if outlook.ends_unix is None else clock(outlook.ends_unix, survey.looked_unix)
        yield f"  ends {latest}at {ends}, by {outlook.basis}" if ends else f"  ends: {outlook.basis}"
    for tried in standing.tries:
        yield from _attempt(tried, folder)


def _attempt(tried: Tried, folder: Path) -> Iterator[str]:
    attempt, word, left = tried.attempt, tried.verdict, tried.left
    yield f"  attempt {attempt.attempt}: {_said(str(word.state), word)}"
    yield f"    sent      {_time(attempt.planned_unix)} as job {attempt.job_id or '-'} ({attempt.run_id})"
    yield f"    scheduler {_scheduler(tried)}"
    yield f"    manifest  {_manifest(tried)}"
    yield f"    parts     {left.missing or left.telemetry or 'no account of them (telemetry.json)'}"
    yield f"    directory {tried.folder}{'' if tried.folder.is_dir() else ' (not there)'}"
    files = logs(tried, folder)
    for file in files:
        yield f"    log       {file}"
    if word.state is PointState.FAILED:
        for file in files:
            for line in tail(file):
                yield f"      | {line}"


def _said(state: str, word: Verdict) -> str:
    reason = f" ({word.reason})" if word.reason and word.reason != state else ""
    return f"{state}{reason}{f': {word.message}' if word.message else ''}"


def _scheduler(tried: Tried) -> str:
    if tried.word is None:
        return "gave no word"
    return tried.word.said or tried.word.detail or "knows no such job (any more)"


def _manifest(tried: Tried) -> str:
    left = tried.left
    if left.damaged:
        return f"cannot be read: {left.damaged}"
    if left.manifest is None:
        return "none"
    begun, ended = left.manifest.get("started_unix_ns"), left.manifest.get("ended_unix_ns")
    both = (("begun", begun), ("ended", ended))
    times = [f"{word} {_time(ns / 1e9)}" for word, ns in both if isinstance(ns, int) and ns]
    if left.manifest["status"] == Status.RUNNING and left.silent_s is not None:
        times.append(f"written {span(left.silent_s)} ago")
    return ", ".join([str(left.manifest["status"]), *times])


def logs(tried: Tried, folder: Path) -> list[Path]:
    """What the job wrote to its output and error, as far as they are there, or were brought here."""
    job_id, group = tried.attempt.job_id, tried.attempt.group
    if job_id is None:
        return []
    stem = job_id.removeprefix("pid:").partition("@")[0]
    if job_id.startswith("pid:"):
        return sorted((folder / JOBS / group).glob(f"task-*/{stem}_0_log.*"))
    # numbers of arrays are another ledger's there; site, partition and GPU behind them are the same
    brought = sorted(one for one in (folder / LOGS).glob("*") if _kind(one.name) == _kind(group))
    places = [folder / JOBS / group, *brought]
    return [path for suffix in ("err", "out") for at in places if (path := at / f"{stem}_0_log.{suffix}").is_file()]


def _kind(group: str) -> str:
    """The name of an array without its number."""
    return group.partition("-")[2]


def tail(path: Path) -> list[str]:
    """The last lines, without what would steer a terminal."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    lines = [line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()]
    return [sanitize(line) for line in lines[-TAIL_LINES:]]


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix).strftime("%Y-%m-%d %H:%M:%S")
