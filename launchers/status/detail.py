"""One point in detail: its attempts, the scheduler's own words, where its log lies, and how that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from inpaint_bench.core.attempt_state import AttemptState
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.schema import JOBS, PointState, Status
from launchers.remote.results import LOGS

from .forecast import Forecast
from .survey import AttemptStatus, PointStatus, SweepStatus
from .tables import clock, span, state

TAIL_LINES = 15
TAIL_BYTES = 16384  # read from the end: a log may be long


def point(survey: SweepStatus, point: PointStatus, forecast: Forecast, folder: Path) -> Iterator[str]:
    """Lines of text."""
    record, word = point.record, point.resolved
    yield f"point {record.num} at {record.site}: {' '.join(record.overrides) or 'as configured'}"
    yield "  " + _said(state(point), word)
    if point.pending:
        yield f"  to do: {point.pending.advice}"
    if forecast.step is not None:
        pace = f", {forecast.images_per_s:.4g} images/s" if forecast.images_per_s is not None else ""
        age = f" ({span(forecast.pace_age_s)} ago)" if pace and forecast.pace_age_s is not None else ""
        yield f"  step {forecast.step} of {forecast.steps_total or '?'}{pace}{age}"
    if forecast.start_unix is not None:
        yield f"  expected to start at {clock(forecast.start_unix, survey.polled_unix)}"
    if point.is_open:
        latest = "at the latest " if forecast.at_most else ""
        ends = None if forecast.end_unix is None else clock(forecast.end_unix, survey.polled_unix)
        yield f"  ends {latest}at {ends}, by {forecast.basis}" if ends else f"  ends: {forecast.basis}"
    for tried in point.attempts:
        yield from _attempt(tried, folder)


def _attempt(tried: AttemptStatus, folder: Path) -> Iterator[str]:
    attempt, word, left = tried.attempt, tried.resolved, tried.artifacts
    yield f"  attempt {attempt.attempt}: {_said(str(word.state), word)}"
    yield f"    sent      {_time(attempt.planned_unix)} as job {attempt.job_id or '-'} ({attempt.run_id})"
    yield f"    scheduler {_scheduler(tried)}"
    yield f"    manifest  {_manifest(tried)}"
    yield f"    parts     {left.missing_parts or left.sidecar_status or 'no account of them (telemetry.json)'}"
    yield f"    directory {tried.run_dir}{'' if tried.run_dir.is_dir() else ' (not there)'}"
    files = logs(tried, folder)
    for file in files:
        yield f"    log       {file}"
    if word.state is PointState.FAILED:
        for file in files:
            for line in tail(file):
                yield f"      | {line}"


def _said(state: str, word: AttemptState) -> str:
    reason = f" ({word.reason})" if word.reason and word.reason != state else ""
    return f"{state}{reason}{f': {word.message}' if word.message else ''}"


def _scheduler(tried: AttemptStatus) -> str:
    if tried.scheduler is None:
        return "gave no word"
    return tried.scheduler.raw or tried.scheduler.detail or "knows no such job (any more)"


def _manifest(tried: AttemptStatus) -> str:
    left = tried.artifacts
    if left.damage:
        return f"cannot be read: {left.damage}"
    if left.manifest is None:
        return "none"
    begun, ended = left.manifest.get("started_unix_ns"), left.manifest.get("ended_unix_ns")
    both = (("begun", begun), ("ended", ended))
    times = [f"{word} {_time(ns / 1e9)}" for word, ns in both if isinstance(ns, int) and ns]
    if left.manifest["status"] == Status.RUNNING and left.manifest_age_s is not None:
        times.append(f"written {span(left.manifest_age_s)} ago")
    return ", ".join([str(left.manifest["status"]), *times])


def logs(tried: AttemptStatus, folder: Path) -> list[Path]:
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
