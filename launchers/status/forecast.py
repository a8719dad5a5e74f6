"""How fast a point runs now, and when it is expected to end. A number that nothing supports is not given.

A running point: the steps that are left at the pace of now, and for a training the share of time that validations
and checkpoints took so far on top. Before its first step, and for a queued point whose start Slurm expects: the
median time of completed runs like it in this sweep, else its time limit, as the latest. What a run does after its
last step (pictures, weights) is in the times of completed runs, not in the pace.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.attempt_state import nested
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import JOURNAL, WINDOWS, PointState, Status, WindowKind
from inpaint_bench.telemetry.storage.journal import read_journal

from .survey import PointStatus

STALE_S = 30.0  # a pace older than this is told with its age
TAIL_S = 30.0  # the pace of now is that of the steps of so many seconds
SKEW_S = 5.0  # a node's clock that is further ahead than this is told


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Of one point. None: not known. Times are Unix seconds by this machine's clock."""

    step: int | None = None
    steps_total: int | None = None
    images_per_s: float | None = None  # now, or the last one before it ended
    pace_age_s: float | None = None  # how old that is, of a running point
    start_unix: float | None = None  # of a queued point, as Slurm expects
    end_unix: float | None = None
    basis: str = "not known"  # what ends_unix rests on
    at_most: bool = False  # ends_unix is the latest, by the time limit
    skew_s: float | None = None  # the node's clock is ahead of this one by so much


class Times:
    """How long completed runs took, by what they have in common."""

    def __init__(self, points: Iterable[PointStatus]) -> None:
        self._took: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for point in points:
            if point.state is PointState.COMPLETED and (took_s := _took_s(point.artifacts.manifest)):
                for likeness in _likenesses(point):
                    self._took[likeness].append(took_s)

    def like(self, point: PointStatus) -> tuple[float, str] | None:
        """Median seconds of the runs most like this one, and how many they are."""
        for likeness in _likenesses(point):
            if took := self._took.get(likeness):
                runs = pluralize(len(took), "completed run")
                return statistics.median(took), f"{runs} like it"
        return None


def forecast_points(points: Sequence[PointStatus], now: float | None = None) -> dict[int, Forecast]:
    """By point number."""
    now = time.time() if now is None else now
    times = Times(points)
    found: dict[int, Forecast] = {}
    for point in points:
        match point.state:
            case PointState.RUNNING:
                found[point.record.num] = _running(point, times, now)
            case PointState.QUEUED:
                found[point.record.num] = _queued(point, times, now)
            case _:
                found[point.record.num] = _ended(point.artifacts.manifest)
    return found | _turns(points, found, times)


def last_end(points: Sequence[PointStatus], found: Mapping[int, Forecast]) -> tuple[float | None, str]:
    """When the last open point is expected to end, or None and why that is not known."""
    open_ends = [s for s in points if s.is_open]
    if not open_ends:
        return None, ""
    unknown = sum(found[s.record.num].end_unix is None for s in open_ends)
    if unknown:
        return None, f"of {unknown} of {len(open_ends)} open points no end can be told yet"
    last = max((found[s.record.num] for s in open_ends), key=lambda forecast: forecast.end_unix or 0.0)
    return last.end_unix, "at the latest" if any(found[s.record.num].at_most for s in open_ends) else "expected"


def _ended(manifest: dict[str, Any] | None) -> Forecast:
    """How far it came, and its last pace."""
    progress = _progress(manifest)
    return Forecast(
        step=progress["step"], steps_total=progress["steps_total"], images_per_s=progress["images_per_s"], basis=""
    )


def _running(point: PointStatus, times: Times, now: float) -> Forecast:
    manifest = point.artifacts.manifest or {}
    if manifest and manifest["status"] != Status.RUNNING:
        return _ended(manifest)
    progress = _progress(manifest)
    step, total, noted = progress["step"], progress["steps_total"], progress["t_unix_ns"]
    age_s = None if noted is None else now - noted / 1e9
    skew_s = -age_s if age_s is not None and age_s < -SKEW_S else None
    age_s = None if age_s is None else max(age_s, 0.0)
    pace: float | None = progress["images_per_s"]
    pace_age_s: float | None = age_s
    windows = _windows(point.run_dir)
    if (tail := _tail(point.run_dir, windows, now)) and (age_s is None or tail[1] <= age_s + TAIL_S):
        pace, pace_age_s = tail
    ends: float | None = None
    basis, at_most = "not known", False
    batch = manifest.get("batch")
    if step is not None and total and pace and age_s is not None and isinstance(batch, int):
        left_s = (total - step) * batch / pace * _overhead(windows)
        ends, basis = now - age_s + left_s, "its own pace"
    elif step is None and (took := times.like(point)) and (begun := _begun(point)):
        ends, basis = begun + took[0], took[1]
    elif step is None and point.scheduler and point.scheduler.end_unix:
        ends, basis, at_most = point.scheduler.end_unix, "time limit", True
    if ends is not None and ends < now - STALE_S:
        ends, basis, at_most = None, f"should have ended by {basis}", False
    return Forecast(
        step=step,
        steps_total=total,
        images_per_s=pace,
        pace_age_s=pace_age_s if pace is not None else None,
        end_unix=ends,
        basis=basis,
        at_most=at_most,
        skew_s=skew_s,
    )


def _queued(point: PointStatus, times: Times, now: float) -> Forecast:
    word = point.scheduler
    if word is None or word.start_unix is None:
        return Forecast(basis="Slurm expects no start yet")
    begins = max(word.start_unix, now)
    if took := times.like(point):
        return Forecast(start_unix=begins, end_unix=begins + took[0], basis=took[1])
    if word.time_limit_s is None:
        return Forecast(start_unix=begins)
    return Forecast(start_unix=begins, end_unix=begins + word.time_limit_s, basis="time limit", at_most=True)


def _turns(points: Sequence[PointStatus], found: dict[int, Forecast], times: Times) -> dict[int, Forecast]:
    """Points that wait for their turn on this machine: each begins when one that runs here ends."""
    here = [s for s in points if s.record.last and (s.record.last.job_id or "pid:").startswith("pid:")]
    free = [found[s.record.num].end_unix for s in here if s.state is PointState.RUNNING]
    if not free or None in free:
        return {}
    slots = [end for end in free if end is not None]
    heapq.heapify(slots)
    result: dict[int, Forecast] = {}
    for point in here:
        if point.state is not PointState.QUEUED:
            continue
        took = times.like(point)
        if took is None:
            break  # and what comes after it cannot be told either
        begins = heapq.heappop(slots)
        heapq.heappush(slots, begins + took[0])
        result[point.record.num] = Forecast(start_unix=begins, end_unix=begins + took[0], basis=took[1])
    return result


def _likenesses(point: PointStatus) -> list[tuple[object, ...]]:
    """From what is most alike: all but the seed, then the GPU and the batch at the site."""
    record = point.record
    asked = tuple(sorted(o for o in record.overrides if not o.startswith("seed=")))
    return [("asked", record.site, asked), ("cell", record.site, record.gpu, record.batch)]


def _number(value: Any) -> float | None:
    """A manifest that somebody else wrote may hold anything."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _took_s(manifest: dict[str, Any] | None) -> float | None:
    begun, ended = (_number((manifest or {}).get(name)) for name in ("started_unix_ns", "ended_unix_ns"))
    return (ended - begun) / 1e9 if begun and ended and ended > begun else None


def _begun(point: PointStatus) -> float | None:
    if begun := _number((point.artifacts.manifest or {}).get("started_unix_ns")):
        return begun / 1e9
    return point.scheduler.start_unix if point.scheduler else None


def _progress(manifest: dict[str, Any] | None) -> dict[str, Any]:
    progress = nested(manifest, "progress")
    return {key: _number(progress.get(key)) for key in ("step", "steps_total", "t_unix_ns", "images_per_s")}


def _windows(folder: Path | None) -> list[dict[str, Any]]:
    try:
        value = read_json(folder / WINDOWS) if folder else None
    except (ValueError, OSError):
        return []
    return [window for window in value if isinstance(window, dict)] if isinstance(value, list) else []


def _overhead(windows: list[dict[str, Any]]) -> float:
    """Time since the first measured step over the time of measured steps, at least 1: what is between them."""
    closed = [w for w in windows if _number(w.get("t_end_unix_ns")) and _number(w.get("t_start_unix_ns"))]
    measured = [w for w in closed if w.get("kind") == WindowKind.MEASURE]
    if not measured:
        return 1.0
    stepping = sum(w["t_end_unix_ns"] - w["t_start_unix_ns"] for w in measured)
    between = max(w["t_end_unix_ns"] for w in closed) - min(w["t_start_unix_ns"] for w in measured)
    return max(1.0, between / stepping) if stepping else 1.0


def _tail(folder: Path | None, windows: list[dict[str, Any]], now: float) -> tuple[float, float] | None:
    """Images/s over the last rows of the part that is still open, and their age in seconds.

    Rows carry the node's monotonic clock; the window they belong to tells what time that was.
    """
    path = folder / "steps" / JOURNAL if folder else None
    if path is None or not path.is_file():
        return None
    try:
        found = read_journal(path)
        if found is None or found.table.num_rows < 2:
            return None
        ends_ns = found.table["t_end_mono_ns"].to_numpy()
        first = int(ends_ns.searchsorted(ends_ns[-1] - TAIL_S * 1e9))
        rows = found.table.slice(first)
        ids = rows["window_id"].to_pylist()
        last = [place for place, window_id in enumerate(ids) if window_id == ids[-1]]
        ends_ns, images = ends_ns[first:][last], rows["images"].to_numpy()[last]
        window = next(w for w in windows if w["window_id"] == ids[-1])
        ended_unix_ns = int(ends_ns[-1]) + window["t_start_unix_ns"] - window["t_start_mono_ns"]
    except (
        OSError,
        LookupError,
        ValueError,
        TypeError,
        StopIteration,
    ):  # closed meanwhile, or not ours
        return None
    span_s = (ends_ns[-1] - ends_ns[0]) / 1e9
    if span_s <= 0:
        return None
    return float(images[1:].sum() / span_s), max(now - ended_unix_ns / 1e9, 0.0)
