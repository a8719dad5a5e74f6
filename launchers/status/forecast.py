"""Forecast when points start and end, and how fast they run now. Nothing is guessed: an unsupported value is None.

A running point ends after its remaining steps at its current pace, plus the share of time that validations and
checkpoints have taken so far. Before its first step, and from the expected start of a pending job, a point takes the
median time of similar completed runs in this sweep, else its time limit at most. What a run does after its last step
(pictures, weights) is part of the times of completed runs, not of the pace.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.records import ManifestHead, Window, read_record
from inpaint_bench.core.schema import JOURNAL, WINDOWS, PointState, Status, WindowKind

from .survey import PointStatus

STALE_PACE_S = 30.0  # a pace older than this is shown with its age, and an end this long ago is not shown
PACE_S = 30.0  # the current pace is that of the steps in the last PACE_S seconds


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of one point; None where unknown. Times are Unix seconds by this machine's clock."""

    step: int | None = None
    steps_total: int | None = None
    images_per_s: float | None = None  # now, or when the run ended
    pace_age_s: float | None = None  # age of images_per_s of a running point
    start_unix: float | None = None  # of a queued point
    end_unix: float | None = None
    basis: str = "not known"  # of end_unix
    is_latest: bool = False  # end_unix is the end of the time limit


def forecast_points(points: Sequence[PointStatus], now: float | None = None) -> dict[int, Forecast]:
    """Return a forecast for every point, by its number."""
    now = time.time() if now is None else now
    run_times = _RunTimes(points)
    forecasts: dict[int, Forecast] = {}
    for point in points:
        match point.state:
            case PointState.RUNNING:
                forecast = _running(point, run_times, now)
            case PointState.QUEUED:
                forecast = _queued(point, run_times, now)
            case _:
                forecast = replace(_progress(point.artifacts.manifest), basis="")
        forecasts[point.record.num] = forecast
    return forecasts | _local_queue(points, forecasts, run_times)


def sweep_end(points: Sequence[PointStatus], forecasts: Mapping[int, Forecast]) -> tuple[float | None, str]:
    """Return when the last open point ends, and "expected" or "at the latest"; or None and why that is not known."""
    open_forecasts = [forecasts[point.record.num] for point in points if point.is_open]
    if not open_forecasts:
        return None, ""
    ends = [forecast.end_unix for forecast in open_forecasts if forecast.end_unix is not None]
    if unknown := len(open_forecasts) - len(ends):
        return None, f"no end can be forecast for {unknown} of {len(open_forecasts)} open points"
    return max(ends), "at the latest" if any(forecast.is_latest for forecast in open_forecasts) else "expected"


class _RunTimes:
    """Durations of completed runs, by similarity key."""

    def __init__(self, points: Iterable[PointStatus]) -> None:
        self._durations_s: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for point in points:
            if point.state is PointState.COMPLETED and (duration_s := _duration_s(point.artifacts.manifest)):
                for key in _similarity_keys(point):
                    self._durations_s[key].append(duration_s)

    def median_s(self, point: PointStatus) -> tuple[float, str] | None:
        """Return the median duration of the completed runs most similar to this point, and their number."""
        for key in _similarity_keys(point):
            if durations_s := self._durations_s.get(key):
                return statistics.median(durations_s), pluralize(len(durations_s), "similar completed run")
        return None


def _similarity_keys(point: PointStatus) -> list[tuple[object, ...]]:
    """Return keys from the most similar runs (all but the seed) to the least (GPU and batch at the same site)."""
    record = point.record
    overrides = tuple(sorted(o for o in record.overrides if not o.startswith("seed=")))
    return [("overrides", record.site, overrides), ("cell", record.site, record.gpu, record.batch)]


def _duration_s(manifest: ManifestHead | None) -> float | None:
    if manifest is None or not manifest.started_unix_ns or not manifest.ended_unix_ns:
        return None
    return max(0.0, (manifest.ended_unix_ns - manifest.started_unix_ns) / 1e9)


def _progress(manifest: ManifestHead | None) -> Forecast:
    """Return the progress of a run according to its manifest, and its last pace."""
    progress = manifest.progress if manifest else None
    if progress is None:
        return Forecast()
    return Forecast(step=progress.step, steps_total=progress.steps_total, images_per_s=progress.images_per_s)


def _running(point: PointStatus, run_times: _RunTimes, now: float) -> Forecast:
    manifest, scheduler = point.artifacts.manifest, point.scheduler
    forecast = _progress(manifest)
    # The worker has written how it ended; Slurm lags behind by some seconds.
    if manifest and manifest.status != Status.RUNNING:
        return replace(forecast, basis="")
    windows = _windows(point.run_dir)
    age_s: float | None = None  # of the manifest's progress; the node's clock may be ahead
    if manifest and manifest.progress and manifest.progress.t_unix_ns is not None:
        age_s = max(now - manifest.progress.t_unix_ns / 1e9, 0.0)
    recent = _recent_pace(point.run_dir, windows, now)
    # Rows of the open part are the latest source, unless they remain from a window that ended long before.
    if recent and (age_s is None or recent[1] <= age_s + PACE_S):
        forecast = replace(forecast, images_per_s=recent[0], pace_age_s=recent[1])
    elif forecast.images_per_s is not None:
        forecast = replace(forecast, pace_age_s=age_s)
    # A run with steps ends at its own pace; before the first one, similar runs or the time limit decide.
    end: dict[str, Any] = {}
    if manifest and forecast.step is not None:
        batch, total, pace = manifest.batch, forecast.steps_total, forecast.images_per_s
        if total and pace and age_s is not None and isinstance(batch, int):
            remaining_s = (total - forecast.step) * batch / pace * _overhead(windows)
            end = {"end_unix": now - age_s + remaining_s, "basis": "its own pace"}
    else:
        started_unix = scheduler.start_unix if scheduler else None
        if manifest and manifest.started_unix_ns:
            started_unix = manifest.started_unix_ns / 1e9
        end = _expected_end(point, run_times, started_unix, scheduler.end_unix if scheduler else None)
    # An end in the past is no forecast: the run hangs, or does what comes after its last step.
    if end and end["end_unix"] < now - STALE_PACE_S:
        return replace(forecast, basis=f"should have ended by {end['basis']}")
    return replace(forecast, **end)


def _queued(point: PointStatus, run_times: _RunTimes, now: float) -> Forecast:
    scheduler = point.scheduler
    if scheduler is None or scheduler.start_unix is None:
        return Forecast(basis="Slurm expects no start yet")
    start_unix = max(scheduler.start_unix, now)
    limit_unix = None if scheduler.time_limit_s is None else start_unix + scheduler.time_limit_s
    return Forecast(start_unix=start_unix, **_expected_end(point, run_times, start_unix, limit_unix))


def _expected_end(
    point: PointStatus, run_times: _RunTimes, start_unix: float | None, limit_unix: float | None
) -> dict[str, Any]:
    """Return fields of a forecast: the end after the time of similar runs, else at the time limit."""
    if start_unix is not None and (median := run_times.median_s(point)):
        return {"end_unix": start_unix + median[0], "basis": median[1]}
    return {} if limit_unix is None else {"end_unix": limit_unix, "basis": "time limit", "is_latest": True}


def _local_queue(
    points: Sequence[PointStatus], forecasts: dict[int, Forecast], run_times: _RunTimes
) -> dict[int, Forecast]:
    """Return forecasts of the points that are queued on this machine: each starts when a running one ends."""
    local = [p for p in points if p.record.last and (p.record.last.job_id or "pid:").startswith("pid:")]
    ends = [forecasts[p.record.num].end_unix for p in local if p.state is PointState.RUNNING]
    slots = [end for end in ends if end is not None]
    # Where one running point has no expected end, nobody knows when the next one can start.
    if not ends or len(slots) < len(ends):
        return {}
    heapq.heapify(slots)
    result: dict[int, Forecast] = {}
    for point in local:
        if point.state is not PointState.QUEUED:
            continue
        if (median := run_times.median_s(point)) is None:
            break  # later ones cannot be forecast either
        # The next point takes the slot that becomes free first.
        start = heapq.heappop(slots)
        heapq.heappush(slots, start + median[0])
        result[point.record.num] = Forecast(start_unix=start, end_unix=start + median[0], basis=median[1])
    return result


def _windows(run_dir: Path | None) -> list[Window]:
    try:
        return (read_record(run_dir / WINDOWS, list[Window], follow_links=False) if run_dir else None) or []
    except (ValueError, OSError):
        return []


def _overhead(windows: list[Window]) -> float:
    """Return the ratio of the time since the first measured step to the time of measured steps, at least 1."""
    measured = [w for w in windows if w.kind is WindowKind.MEASURE and w.t_end_unix_ns]
    if not measured:
        return 1.0
    measured_ns = sum((w.t_end_unix_ns or 0) - w.t_start_unix_ns for w in measured)
    elapsed_ns = max(w.t_end_unix_ns or 0 for w in windows) - min(w.t_start_unix_ns for w in measured)
    return max(1.0, elapsed_ns / measured_ns) if measured_ns else 1.0


def _recent_pace(run_dir: Path | None, windows: list[Window], now: float) -> tuple[float, float] | None:
    """Return images/s over the last rows of the part that is still open, and their age in seconds.

    Rows are timed by the node's monotonic clock, which their window relates to Unix time.
    """
    path = run_dir / "steps" / JOURNAL if run_dir else None
    if path is None or path.is_symlink() or not path.is_file():
        return None
    from inpaint_bench.telemetry.storage.parts import read_journal  # loads pyarrow, slow to import

    try:
        journal = read_journal(path)
        if journal is None or journal.table.num_rows < 2:
            return None
        ends_ns = journal.table["t_end_mono_ns"].to_numpy()
        first = int(ends_ns.searchsorted(ends_ns[-1] - PACE_S * 1e9))
        rows = journal.table.slice(first)
        window_ids = rows["window_id"].to_pylist()
        # Rows of the last window alone: a validation between two windows is not part of the pace.
        last = [index for index, window_id in enumerate(window_ids) if window_id == window_ids[-1]]
        ends_ns, images = ends_ns[first:][last], rows["images"].to_numpy()[last]
        window = next(w for w in windows if w.window_id == window_ids[-1])
    # The part was closed in the meantime, or its window is not written yet.
    except (OSError, LookupError, ValueError, TypeError, StopIteration):
        return None
    span_s = (ends_ns[-1] - ends_ns[0]) / 1e9
    if span_s <= 0:
        return None
    end_unix_ns = int(ends_ns[-1]) + window.t_start_unix_ns - window.t_start_mono_ns
    # The span begins at the first end, so the images of the first row lie before it.
    return float(images[1:].sum() / span_s), max(now - end_unix_ns / 1e9, 0.0)
