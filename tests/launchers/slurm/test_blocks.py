"""A job of several points: its turns, by real processes, and the state of each point."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inpaint_bench.core.attempt_state import SchedulerState
from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import LEDGER
from launchers.slurm.blocks import WAITS, Turn, path, state_of
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Cancelled
from tests.launchers.sweeps import a_point, a_sweep

TURNS = [
    Turn(point=0, attempt=1, started_unix=1, ended_unix=2, exit_code=0),
    Turn(point=1, attempt=1, started_unix=2, ended_unix=3, exit_code=3),
    Turn(point=2, attempt=1, started_unix=3),
    Turn(point=3, attempt=1),
    Turn(point=4, attempt=1, left_out="CANCELLED"),
]


def states(job: SchedulerState | None, steps: dict[str, SchedulerState] | None = None) -> list[str | None]:
    attempts = [Attempt(point=turn.point, attempt=1, site="delta", block=0) for turn in TURNS]
    found = [state_of(attempt, job, TURNS, steps or {}) for attempt in attempts]
    return [state and state.state for state in found]


class TestState:
    """Points 0 to 4 have completed, failed, begun, not begun, and were cancelled before their turn."""

    @pytest.mark.parametrize(
        ("job", "expected"),
        [
            ("PENDING", ["COMPLETED", "FAILED", "PENDING", "PENDING", "CANCELLED"]),
            ("RUNNING", ["COMPLETED", "FAILED", "RUNNING", "PENDING", "CANCELLED"]),
            ("TIMEOUT", ["COMPLETED", "FAILED", "TIMEOUT", "TIMEOUT", "CANCELLED"]),
            ("NODE_FAIL", ["COMPLETED", "FAILED", "NODE_FAIL", "NODE_FAIL", "CANCELLED"]),
            ("CANCELLED", ["COMPLETED", "FAILED", "CANCELLED", "CANCELLED", "CANCELLED"]),
            # The two contradict each other, so it did not complete.
            ("COMPLETED", ["COMPLETED", "FAILED", "FAILED", "FAILED", "CANCELLED"]),
            ("NEWSTATE", ["COMPLETED", "FAILED", "NEWSTATE", "NEWSTATE", "CANCELLED"]),
            (None, ["COMPLETED", "FAILED", None, None, "CANCELLED"]),
        ],
    )
    def test_by_the_job_and_the_turns(self, job: str | None, expected: list[str | None]) -> None:
        assert states(job and SchedulerState(state=job)) == expected

    def test_step_of_slurm_knows_why_a_point_failed(self) -> None:
        steps = {f"point-{num}-attempt-1": SchedulerState(state="OUT_OF_MEMORY") for num in range(5)}
        assert states(SchedulerState(state="RUNNING"), steps)[:3] == ["COMPLETED", "OUT_OF_MEMORY", "RUNNING"]

    def test_step_that_a_signal_has_killed_is_not_cancelled(self) -> None:
        """Slurm calls it so."""
        steps = {"point-1-attempt-1": SchedulerState(state="CANCELLED", exit_code="0:9")}
        assert states(SchedulerState(state="RUNNING"), steps)[1] == "FAILED"

    def test_waiting_point_names_the_one_before_it(self) -> None:
        attempt = Attempt(point=3, attempt=1, site="delta", block=0)
        state = state_of(attempt, SchedulerState(state="RUNNING"), TURNS, {})
        assert state
        assert state.detail == f"{WAITS} behind point 2"

    @pytest.mark.parametrize("job", ["PENDING", "TIMEOUT"])
    def test_before_the_first_turn_all_have_the_state_of_the_job(self, job: str) -> None:
        state = SchedulerState(state=job)
        assert state_of(Attempt(point=0, attempt=1, site="delta", block=0), state, [], {}) == state


def test_end_that_a_job_could_not_write_is_known_from_its_step() -> None:
    steps = {f"point-{num}-attempt-1": SchedulerState(state="COMPLETED") for num in (2, 3)}
    assert states(SchedulerState(state="FAILED"), steps)[2:4] == ["COMPLETED", "COMPLETED"]
    steps = {"point-2-attempt-1": SchedulerState(state="CANCELLED")}
    assert states(SchedulerState(state="NODE_FAIL"), steps)[2] == "NODE_FAIL"
    assert states(SchedulerState(state="RUNNING"), steps)[2] == "RUNNING"


class Job:
    """The job of three points, whose steps are shell commands that write which file they got."""

    def __init__(self, folder: Path) -> None:
        self.ledger = a_sweep(folder, [a_point(num) for num in range(3)], {})
        self.folder, self.order = folder / "jobs" / "00", folder / "order"
        self.folder.mkdir(parents=True, mode=0o700)

    def start(self, step: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start the second task of the array, with this shell command as step; $0 is the file of the point."""
        job = [sys.executable, "-m", "launchers.slurm.blocks", str(self.folder), "9.yaml", "0.yaml,1.yaml,2.yaml"]
        step = f"echo $0 >> {self.order}; {step}"
        return subprocess.Popen(
            [*job, "--", "sh", "-c", step], env={**os.environ, "SLURM_ARRAY_TASK_ID": "1", **environment}
        )

    def turns(self) -> list[tuple[int | None, str | None]]:
        """Return exit code and reason of each point."""
        turns = read_record(path(self.folder, 1), list[Turn]) or []
        return [(turn.exit_code, turn.left_out) for turn in turns]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.subprocess
class TestTurns:
    def test_failed_point_takes_none_with_it(self, job: Job) -> None:
        assert job.start("case $0 in 1.yaml) exit 3;; 2.yaml) kill -9 $$;; esac").wait() == 0
        assert job.turns() == [(0, None), (3, None), (137, None)]
        assert job.order.read_text().split() == ["0.yaml", "1.yaml", "2.yaml"]

    def test_job_that_is_killed_goes_on_where_it_was(self, job: Job) -> None:
        first = job.start("case $0 in 1.yaml) kill -9 $PPID;; esac")
        assert first.wait() == -9
        assert job.turns() == [(0, None), (None, None), (None, None)]
        assert job.start(":").wait() == 0
        assert job.turns() == [(0, None)] * 3
        assert job.order.read_text().split() == ["0.yaml", "1.yaml", "1.yaml", "2.yaml"]

    def test_point_that_was_cancelled_is_left_out(self, job: Job) -> None:
        job.ledger.append(Cancelled(attempts=[(1, 1)]))
        assert job.start(":").wait() == 0
        assert job.turns() == [(0, None), (None, "CANCELLED"), (0, None)]

    def test_no_point_starts_shortly_before_the_end_of_the_job(self, job: Job) -> None:
        assert job.start(":", INPAINT_BENCH_END_UNIX=str(int(time.time()) + 30)).wait() == 0
        assert job.turns() == [(None, "TIMEOUT")] * 3

    def test_none_starts_after_the_warning_before_the_time_limit(self, job: Job) -> None:
        assert job.start("case $0 in 0.yaml) exit 140;; esac").wait() == 0
        assert job.turns() == [(140, None), (None, "TIMEOUT"), (None, "TIMEOUT")]

    def test_job_that_slurm_ends_starts_no_other_point(self, job: Job) -> None:
        assert job.start("kill -TERM $PPID; sleep 0.5; exit 143").wait() == 143
        assert job.turns() == [(None, None)] * 3  # Slurm says why

    def test_folder_that_others_can_write_is_refused(self, job: Job) -> None:
        job.folder.chmod(0o777)
        assert job.start(":").wait() == 2
        assert not job.order.exists()

    @pytest.mark.parametrize("damage", ["{", '[{"point": "x"}]'])
    def test_record_that_cannot_be_read_starts_no_point(self, job: Job, damage: str) -> None:
        path(job.folder, 1).write_text(damage)
        assert job.start(":").wait() == 2
        assert not job.order.exists()

    def test_record_that_cannot_be_written_stops_no_point(self, job: Job) -> None:
        """As on a full disk: here a folder is in its place for a while."""
        file = path(job.folder, 1)
        step = f"case $0 in 0.yaml) rm {file}; mkdir {file};; 2.yaml) rmdir {file};; esac"
        assert job.start(step).wait() == 0
        assert job.turns() == [(0, None)] * 3

    def test_ledger_that_cannot_be_read_stops_no_point(self, job: Job) -> None:
        file = job.ledger.folder / LEDGER
        assert job.start(f"rm -r {file}; mkdir {file}").wait() == 0
        assert job.turns() == [(0, None)] * 3
