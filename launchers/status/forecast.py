"""Forecast when points start and end. Nothing is guessed: an unsupported value is None.

A running point ends after its remaining steps at its own pace. Before its first step, and from the expected start of a
pending job, only the time limit is known.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inpaint_bench.core.console import share
from inpaint_bench.core.schema import PointState, Status

from .survey import PointStatus

PAST_S = 30.0  # an end that was expected so long ago is not shown


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of one point; None if unknown. Times are Unix seconds by this machine's clock."""

    step: int | None = None
    steps_total: int | None = None
    images_per_s: float | None = None  # the last value
    start_unix: float | None = None  # start of a queued point
    end_unix: float | None = None
    basis: str = "not known"  # basis of end_unix
    is_latest: bool = False  # end_unix is the end of the time limit


def sweep_end(points: Sequence[PointStatus], now: float | None = None) -> tuple[float | None, str]:
    """Return when the last open point ends, and "expected" or "at the latest"; or None and why that is not known."""
    open_forecasts = [forecast_point(point, now) for point in points if point.is_open]
    if not open_forecasts:
        return None, ""
    ends = [forecast.end_unix for forecast in open_forecasts if forecast.end_unix is not None]
    if unknown := len(open_forecasts) - len(ends):
        return None, f"no end can be forecast for {share(unknown, len(open_forecasts), 'open point')}"
    return max(ends), "at the latest" if any(forecast.is_latest for forecast in open_forecasts) else "expected"


def forecast_point(point: PointStatus, now: float | None = None) -> Forecast:
    """Return when a point starts and ends, as far as that is known."""
    now = time.time() if now is None else now
    manifest, scheduler = point.artifacts.manifest, point.scheduler
    progress, forecast = manifest.progress if manifest else None, Forecast()
    if progress:
        forecast = Forecast(step=progress.step, steps_total=progress.steps_total, images_per_s=progress.images_per_s)
    if point.state is PointState.QUEUED:
        if scheduler is None or scheduler.start_unix is None:
            return Forecast(basis="Slurm expects no start yet") if scheduler else Forecast()
        start_unix, limit_s = max(scheduler.start_unix, now), scheduler.time_limit_s
        return _until_limit(Forecast(start_unix=start_unix), None if limit_s is None else start_unix + limit_s)
    # A worker that has written how it ended is done, though Slurm lags behind by some seconds.
    if point.state is not PointState.RUNNING or (manifest and manifest.status != Status.RUNNING):
        return replace(forecast, basis="")
    if manifest is None or progress is None:
        forecast = _until_limit(forecast, scheduler.end_unix if scheduler else None)
    elif progress.steps_total and progress.images_per_s and progress.t_unix_ns and manifest.batch:
        remaining_s = (progress.steps_total - progress.step) * manifest.batch / progress.images_per_s
        written_unix = min(progress.t_unix_ns / 1e9, now)  # the node's clock may be ahead
        forecast = replace(forecast, end_unix=written_unix + remaining_s, basis="its own pace")
    # An end in the past is no forecast: the run hangs, or does what comes after its last step.
    if forecast.end_unix is not None and forecast.end_unix < now - PAST_S:
        return replace(forecast, end_unix=None, is_latest=False, basis=f"should have ended by {forecast.basis}")
    return forecast


def _until_limit(forecast: Forecast, limit_unix: float | None) -> Forecast:
    if limit_unix is None:
        return forecast
    return replace(forecast, end_unix=limit_unix, basis="time limit", is_latest=True)
