"""forecast_points: expected starts and ends, and the current pace."""

import json
from pathlib import Path

import pytest

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.records import ManifestHead, Progress
from inpaint_bench.core.schema import PointState, Status
from inpaint_bench.core.tables import STEPS
from inpaint_bench.telemetry.storage.parts import PartWriter
from launchers.status.forecast import forecast_points, sweep_end
from launchers.status.survey import AttemptStatus, PointStatus
from launchers.sweep.ledger import Attempt, PointRecord

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


def completed(num: int, took_s: float, **more):
    return point(num, COMPLETED, manifest(Status.COMPLETED, started_ago_s=took_s), **more)


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


def forecast(*points):
    """Return the forecast of the first point."""
    return forecast_points(points, NOW)[points[0].record.num]


class TestRunning:
    def test_ends_when_its_steps_are_done_at_its_pace(self):
        result = forecast(point(0, RUNNING, manifest(age_s=10, **HALF)))
        assert result.end_unix == pytest.approx(NOW - 10 + 30 * 16 / 32)
        assert (result.step, result.steps_total, result.images_per_s, result.pace_age_s) == (30, 60, 32.0, 10.0)

    def test_time_of_validations_is_added(self, tmp_path):
        spans_s = (("measure", 0, 10), ("validation", 10, 15), ("measure", 15, 25))
        windows = [
            {
                **{"window_id": f"{kind}-{start}", "kind": kind, "status": "completed", "t_start_mono_ns": 0},
                **{"t_start_unix_ns": start * 10**9 + 1, "t_end_unix_ns": end * 10**9 + 1},
            }
            for kind, start, end in spans_s
        ]
        (tmp_path / "windows.json").write_text(json.dumps(windows))
        result = forecast(point(0, RUNNING, manifest(**HALF), run_dir=tmp_path))
        assert result.end_unix == pytest.approx(NOW + 1.25 * 30 * 16 / 32)

    @pytest.mark.parametrize("missing", ["steps_total", "images_per_s"])
    def test_has_no_end_without_a_pace_or_a_last_step(self, missing):
        result = forecast(point(0, RUNNING, manifest(**HALF | {missing: None})))
        assert (result.end_unix, result.basis) == (None, "not known")

    def test_takes_as_long_as_similar_runs_before_its_first_step(self):
        same_but_seed = completed(1, 80, overrides=("gpu=h200", "seed=1"))
        other = completed(2, 500, overrides=("gpu=h200", "model=b"))
        result = forecast(point(0, RUNNING, manifest(started_ago_s=30)), same_but_seed, other)
        assert result.end_unix == pytest.approx(NOW - 30 + 80)
        assert result.basis == "1 similar completed run"

    def test_ends_at_the_time_limit_at_the_latest_before_any_run_has_ended(self):
        scheduler = SchedulerState(state="RUNNING", end_unix=NOW + 600)
        result = forecast(point(0, RUNNING, manifest(), scheduler=scheduler))
        assert (result.end_unix, result.is_latest, result.basis) == (NOW + 600, True, "time limit")

    def test_clock_that_is_ahead_gives_no_negative_age(self):
        result = forecast(point(0, RUNNING, manifest(age_s=-90, **HALF)))
        assert result.pace_age_s == 0

    def test_end_in_the_past_is_not_given(self):
        result = forecast(point(0, RUNNING, manifest(age_s=900, **HALF)))
        assert result.end_unix is None
        assert result.basis == "should have ended by its own pace"

    def test_pace_is_that_of_the_last_rows_on_disk(self, tmp_path):
        window = {"window_id": "measure-0", "kind": "measure", "t_start_mono_ns": 0, "t_start_unix_ns": 0}
        start_ns = int((NOW - 100) * 1e9)
        (tmp_path / "windows.json").write_text(json.dumps([window | {"status": "running", "t_end_unix_ns": None}]))
        rows = PartWriter(tmp_path / "steps", STEPS, {"run_id": "r"}, part_s=600)
        rows.save(0.0)
        for step in range(90):  # one a second, the last 30 s twice as many images
            at_ns = start_ns + step * 10**9
            images = 16 if step < 60 else 32
            row = {"t_start_mono_ns": at_ns - 1, "t_end_mono_ns": at_ns, "data_wait_ns": 0, "images": images}
            rows.append(window_id="measure-0", step=step, **row)
        rows.save(1.0)
        running = point(0, RUNNING, manifest(age_s=5, **HALF), run_dir=tmp_path)
        result = forecast(running)
        assert result.images_per_s == pytest.approx(32, rel=0.02)
        assert result.pace_age_s == pytest.approx(11, abs=0.01)
        rows.close()
        assert forecast(running).pace_age_s == 5


class TestQueued:
    def test_ends_after_its_expected_start(self):
        like = completed(1, 80)
        queued = point(0, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0))
        assert forecast(queued, like).end_unix == NOW + 140
        assert forecast(queued).end_unix == NOW + 660
        assert forecast(queued).is_latest

    def test_has_no_end_without_an_expected_start(self):
        result = forecast(point(0, QUEUED, scheduler=pending(time_limit_s=600.0)))
        assert (result.end_unix, result.start_unix, result.basis) == (None, None, "Slurm expects no start yet")

    def test_expected_start_in_the_past_is_now(self):
        queued = point(0, QUEUED, scheduler=pending(start_unix=NOW - 999, time_limit_s=60.0))
        assert forecast(queued).start_unix == NOW

    def test_points_of_this_machine_start_one_after_another(self):
        done = completed(9, 80, job="pid:1@here")
        first = point(0, RUNNING, manifest(**HALF), job="pid:2@here")
        second, third = (point(num, QUEUED, job=None) for num in (1, 2))
        result = forecast_points([first, second, third, done], NOW)
        assert [result[num].end_unix - NOW for num in (0, 1, 2)] == pytest.approx([15, 95, 175])


def test_sweep_ends_with_its_last_point_unless_one_end_is_unknown():
    first = point(0, RUNNING, manifest(**HALF))
    later = point(1, QUEUED, scheduler=pending(start_unix=NOW + 60, time_limit_s=600.0))
    unknown = point(2, QUEUED, scheduler=pending())
    assert sweep_end([first], forecast_points([first], NOW)) == (pytest.approx(NOW + 15), "expected")
    assert sweep_end([first, later], forecast_points([first, later], NOW)) == (NOW + 660, "at the latest")
    every = [first, later, unknown]
    reason = "no end can be forecast for 1 of 3 open points"
    assert sweep_end(every, forecast_points(every, NOW)) == (None, reason)
