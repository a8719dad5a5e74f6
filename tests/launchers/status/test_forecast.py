"""forecast_point: expected starts and ends, and the current pace."""

from pathlib import Path

import pytest

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.records import ManifestHead, Progress
from inpaint_bench.core.schema import PointState, Status
from launchers.status.forecast import forecast_point, sweep_end
from launchers.status.survey import AttemptStatus, PointStatus
from launchers.sweep.attempt import Attempt
from launchers.sweep.ledger import PointRecord

NOW = 1_800_000_000.0
RUNNING, QUEUED, COMPLETED = PointState.RUNNING, PointState.QUEUED, PointState.COMPLETED
HALF = {"step": 30, "steps_total": 60, "images_per_s": 32.0}


def manifest(status: Status = Status.RUNNING, *, age_s: float = 0.0, started_ago_s: float = 100.0, **progress):
    """Return a manifest of a run that started so long ago, with progress of that age."""
    return ManifestHead(
        status=status,
        batch=16,
        started_unix_ns=int((NOW - started_ago_s) * 1e9),
        ended_unix_ns=int(NOW * 1e9) if status is Status.COMPLETED else None,
        progress=Progress(t_unix_ns=int((NOW - age_s) * 1e9), **progress) if progress else None,
    )


def point(num, state, manifest=None, *, scheduler=None, run_dir=None, overrides=("gpu=h200",), job="7_0"):
    attempt = Attempt(point=num, attempt=1, run_id="r", site="delta", group="g", planned_unix=NOW, job_id=job)
    record = PointRecord(num=num, overrides=list(overrides), gpu="h200", batch=16, site="delta", attempts=[attempt])
    sources = {
        "artifacts": RunArtifacts(manifest=manifest),
        "run_dir": run_dir or Path("no-such-folder"),
        "scheduler": scheduler,
    }
    last = AttemptStatus(state=state, attempt=attempt, **sources)
    return PointStatus(state=state, record=record, attempts=(last,))


def pending(**times):
    return SchedulerState(state="PENDING", **times)


def forecast(point):
    return forecast_point(point, NOW)


class TestRunning:
    def test_ends_when_its_steps_are_done_at_its_pace(self):
        result = forecast(point(0, RUNNING, manifest(age_s=10, **HALF)))
        assert result.end_unix == pytest.approx(NOW - 10 + 30 * 16 / 32)
        assert (result.step, result.steps_total, result.images_per_s) == (30, 60, 32.0)

    @pytest.mark.parametrize("missing", ["steps_total", "images_per_s"])
    def test_has_no_end_without_a_pace_or_a_last_step(self, missing):
        result = forecast(point(0, RUNNING, manifest(**HALF | {missing: None})))
        assert (result.end_unix, result.basis) == (None, "not known")

    def test_ends_at_the_time_limit_at_the_latest_before_its_first_step(self):
        scheduler = SchedulerState(state="RUNNING", end_unix=NOW + 600)
        result = forecast(point(0, RUNNING, manifest(), scheduler=scheduler))
        assert (result.end_unix, result.is_latest, result.basis) == (NOW + 600, True, "time limit")

    def test_clock_that_is_ahead_counts_as_now(self):
        result = forecast(point(0, RUNNING, manifest(age_s=-90, **HALF)))
        assert result.end_unix == pytest.approx(NOW + 15)

    def test_end_in_the_past_is_not_given(self):
        result = forecast(point(0, RUNNING, manifest(age_s=900, **HALF)))
        assert result.end_unix is None
        assert result.basis == "should have ended by its own pace"


class TestQueued:
    def test_ends_at_the_time_limit_after_its_expected_start(self):
        result = forecast(point(0, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0)))
        assert (result.start_unix, result.end_unix, result.is_latest) == (NOW + 60, NOW + 660, True)

    def test_has_no_end_without_an_expected_start(self):
        result = forecast(point(0, QUEUED, scheduler=pending(time_limit_s=600.0)))
        assert (result.end_unix, result.start_unix, result.basis) == (None, None, "Slurm expects no start yet")

    def test_expected_start_in_the_past_is_now(self):
        queued = point(0, QUEUED, scheduler=pending(start_unix=NOW - 999, time_limit_s=60.0))
        assert forecast(queued).start_unix == NOW


def test_sweep_ends_with_its_last_point_unless_one_end_is_unknown():
    first = point(0, RUNNING, manifest(**HALF))
    later = point(1, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0))
    unknown = point(2, QUEUED, scheduler=pending())
    assert sweep_end([first], NOW) == (pytest.approx(NOW + 15), "expected")
    assert sweep_end([first, later], NOW) == (NOW + 660, "at the latest")
    every = [first, later, unknown]
    reason = "no end can be forecast for 1 of 3 open points"
    assert sweep_end(every, NOW) == (None, reason)
