"""A job that runs several points one after another, `python -m launchers.slurm.blocks`: each is a step of its own.

What became of each point is in `block-<task>.json` beside the job's logs, written before a step starts and after it
has ended. A start that Slurm requeued goes on with the first point that has not ended. The exit code is 0 if every
point had its turn, however it ended: the state of a point is that of its step, or of its turn.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from inpaint_bench.core.attempt_state import COMPLETED, RunArtifacts, SchedulerState
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import read_record, write_record
from inpaint_bench.core.schema import PointState, Reason
from inpaint_bench.core.signals import SIGNALS
from launchers.sweep import private_dirs
from launchers.sweep.attempt import Attempt, AttemptKey
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import Ledger

CANCELLED, TIMEOUT = "CANCELLED", "TIMEOUT"  # states of Slurm, for points that had no turn
WAITS = "waits in its job"
LEAST_S = 60  # before the end of the job no further point starts
REQUEUE_S = 120  # that Slurm has to end a job that a point has requeued


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One point in a job of several."""

    point: int
    attempt: int
    started_unix: float | None = None
    ended_unix: float | None = None
    exit_code: int | None = None
    left_out: str | None = None  # CANCELLED or TIMEOUT: it did not start, and will not

    @property
    def key(self) -> AttemptKey:
        return self.point, self.attempt

    @property
    def has_ended(self) -> bool:
        return self.ended_unix is not None or self.left_out is not None


def step_name(key: AttemptKey) -> str:
    """Return the name of the step of an attempt."""
    return "point-{}-attempt-{}".format(*key)


def command(python: str, folder: Path, tasks: Sequence[Sequence[Path]]) -> str:
    """Return the beginning of a command line that runs the rest of it, and a file of a point, for each of a task."""
    files = [",".join(file.name for file in task) for task in tasks]
    return shlex.join([python, "-u", "-m", __name__, str(folder), *files, "--"])


def state_of(
    attempt: Attempt, job: SchedulerState | None, turns: Sequence[Turn], steps: Mapping[str, SchedulerState]
) -> SchedulerState | None:
    """Return the state of an attempt in a job of several, by the job's own, its turn and Slurm's record of its step."""
    turn = next((turn for turn in turns if turn.key == attempt.key), None)
    phase = job.meaning.phase if job else None
    if turn and turn.has_ended:
        step = steps.get(step_name(attempt.key))
        # To Slurm a step that a signal has killed is CANCELLED, whoever sent it: only a cause of its own counts.
        if step and turn.exit_code and step.meaning.reason not in (None, Reason.APP_ERROR, Reason.CANCELLED):
            return step
        state = turn.left_out or (COMPLETED if turn.exit_code == 0 else "FAILED")
        detail = "left out of its job" if turn.left_out else f"exit code {turn.exit_code}" if turn.exit_code else ""
        return SchedulerState(state=state, exit_code=f"{turn.exit_code or 0}:0", detail=detail, raw=f"step: {state}")
    if turn and job and job.ended and (step := steps.get(step_name(attempt.key))) and step.state == COMPLETED:
        return step  # the job died before it could write this end
    if job is None or phase is PointState.QUEUED:
        return job
    if phase is PointState.RUNNING:
        if turn and turn.started_unix:
            return job
        running = next((other.point for other in turns if other.started_unix and not other.has_ended), None)
        behind = "" if running is None else f" behind point {running}"
        return replace(job, state="PENDING", detail=f"{WAITS}{behind}", raw="", start_unix=None)
    if job.state == COMPLETED and turns:
        return replace(job, state="FAILED", detail="its job ended before it did")
    return job


def path(folder: Path, task: int) -> Path:
    """Return the file of a task in the folder of its array."""
    return folder / f"block-{task}.json"


class _Block:
    """The turns of this job."""

    def __init__(self, sweep: Path, file: Path, points: Sequence[AttemptKey]) -> None:
        self._sweep, self._file, self._stop = sweep, file, list[int]()
        self.turns = read_record(file, list[Turn]) or [Turn(point=point, attempt=k) for point, k in points]

    def run(self, commands: Sequence[Sequence[str]]) -> int:
        """Run each command whose turn has not ended. Returns an exit code."""
        for signum in SIGNALS:  # Slurm signals the steps itself
            signal.signal(signum, lambda number, _: self._stop.append(number))
        for turn, line in zip(self.turns, commands, strict=True):
            if turn.has_ended:
                continue
            if turn.key in self._cancelled():
                turn.left_out = CANCELLED
            elif _is_late() or any(other.exit_code == 128 + signal.SIGUSR2 for other in self.turns):
                turn.left_out = TIMEOUT
            elif not self._run(turn, line):
                break
            self._write()
        return 128 + self._stop[0] if self._stop else 0

    def _run(self, turn: Turn, line: Sequence[str]) -> bool:
        """Run a point to its end. Returns False if the job ends with it: Slurm then says why."""
        if self._stop:
            return False
        turn.started_unix = time.time()
        self._write()
        print(f"point {turn.point}, attempt {turn.attempt}", flush=True)
        start = {"INPAINT_BENCH_START_UNIX": str(int(turn.started_unix))}
        code = subprocess.Popen(line, env={**os.environ, **start}).wait()
        manifest = RunArtifacts.read(self._sweep / str(turn.point) / f"attempt-{turn.attempt}").manifest
        if manifest and manifest.slurm and manifest.slurm.requeued:
            deadline_s = time.monotonic() + REQUEUE_S
            while time.monotonic() < deadline_s:
                time.sleep(1)
            return False
        if self._stop and code:
            return False
        turn.ended_unix, turn.exit_code = time.time(), code if code >= 0 else 128 - code
        return True

    def _cancelled(self) -> Collection[AttemptKey]:
        try:
            return {key for event in Ledger(self._sweep).events(Cancelled) for key in event.attempts}
        except (OSError, UserError) as error:
            print(f"warning: which points were cancelled is not known: {error}", file=sys.stderr, flush=True)
            return ()

    def _write(self) -> None:
        try:
            write_record(self._file, self.turns)
        except OSError as error:  # the next write has all of it, and a point that is done is not repeated
            print(f"warning: {self._file}: {error.strerror}", file=sys.stderr, flush=True)


def _is_late() -> bool:
    end = os.environ.get("INPAINT_BENCH_END_UNIX", "")
    return end.isdigit() and time.time() > int(end) - LEAST_S


def main(argv: Sequence[str]) -> int:
    """Run the points of this array task; returns an exit code."""
    folder, task = Path(argv[0]), int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    end = argv.index("--")
    files, line = argv[1:end][task].split(","), list(argv[end + 1 :])
    points = [point_file_key(file) for file in files]
    try:
        private_dirs.check(folder)
        block = _Block(folder.parents[1], path(folder, task), points)
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.exit_code
    commands = []
    for key, file in zip(points, files, strict=True):
        named = [line[0], f"--job-name={step_name(key)}", *line[1:]] if line[0] == "srun" else line
        commands.append([*named, file])
    return block.run(commands)


def point_file_key(name: str) -> AttemptKey:
    """Return point and attempt of a file that launchers/points/point_file.py names."""
    point, _, attempt = name.removesuffix(".yaml").partition("-")
    return int(point), int(attempt or 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
