"""Interrupted and resumed trainings compute bit by bit what an uninterrupted one does. Real processes and signals."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.merge import merge
from analysis.metrics.facts import Facts
from analysis.metrics.run_row import summarise
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.signals import StopSignal, Terminated, terminable
from inpaint_bench.run import worker
from inpaint_bench.telemetry.storage.parts import recover_run
from tests.analysis.build import load_run

from . import support
from .small_disk import small_disk_on
from .support import compose, steps_of

pytestmark = pytest.mark.timeout(1200)

WAIT_S = 240  # for a child on a busy machine: importing torch alone may take half a minute
TRAINING = ("workload.module=tests.run.support", "workload.name=tiny", "workload.learning_rate=0.01")
STEPS = 24
ROOT = Path(__file__).parents[2]


def training(steps: int = STEPS, *overrides: str) -> list[str]:
    return [*TRAINING, f"workload.train_steps={steps}", *overrides]


def start(run_dir: Path, *overrides: str, **environment: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "tests.run.child", str(run_dir), *overrides]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment)


def cut(run_dir: Path, *overrides: str, at: int, by: int, phase: str = "update", step_s: float = 0.0) -> int:
    """A run that a signal meets within step `at`. Returns its exit code."""
    child = start(run_dir, *overrides, TINY_SIGNAL=f"{at}:{by}:{phase}", TINY_STEP_S=str(step_s))
    return child.wait(WAIT_S)


def whole(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """A run to its end, in this process."""
    worker.run(compose(*overrides), run_dir, [])
    return manifest(run_dir)


def losses(*run_dirs: Path) -> dict[int, set[bytes]]:
    """Bits of every loss, by step; more than one only where a step that was done twice gave two."""
    found: dict[int, set[bytes]] = {}
    for run_dir in run_dirs:
        if not (run_dir / "steps").is_dir():
            continue
        for row in steps_of(run_dir):
            found.setdefault(row["step"], set()).add(struct.pack("<f", row["loss"]))
    return found


def windows(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in read_json(run_dir / "windows.json") or [] if not kinds or one["kind"] in kinds]


def manifest(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(run_dir / "manifest.json") or {}
    return found


def saved(run_dir: Path) -> list[str]:
    return sorted(one.name for one in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[bytes]]:
    run_dir = tmp_path_factory.mktemp("unbroken")
    whole(run_dir, *training(60))
    found = losses(run_dir)
    assert sorted(found) == list(range(60))
    assert len(set.union(*found.values())) > 50, "the losses tell the steps apart"
    return found


def expected(unbroken: dict[int, set[bytes]], steps: int = STEPS) -> dict[int, set[bytes]]:
    return {step: bits for step, bits in unbroken.items() if step < steps}


class TestSignal:
    def test_losses_after_ten_interruptions_are_bit_identical_to_an_uninterrupted_run(
        self, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        """Requeued into its directory or sent again as a further attempt; validation draws random numbers too."""
        chance = random.Random(1)
        overrides = training(60, "workload.checkpoint_every_s=0.02", "workload.validate_every=7")
        signals = [signal.SIGKILL] * 4 + [signal.SIGUSR2] * 3 + [signal.SIGTERM] * 3
        chance.shuffle(signals)
        attempt = at = 1
        for by in signals:
            run_dir = tmp_path / f"attempt-{attempt}"
            at += chance.randrange(1, 6)
            phase = chance.choice(["data", "backward", "update"])
            code = cut(run_dir, *overrides, at=at, by=by, phase=phase, step_s=0.01)
            assert code == (-by if by == signal.SIGKILL else 128 + by)
            assert manifest(run_dir)["status"] == ("running" if by == signal.SIGKILL else "interrupted")
            attempt += chance.randrange(2)
        last = whole(tmp_path / f"attempt-{attempt}", *overrides)
        run_dirs = sorted(tmp_path.glob("attempt-*"))
        assert losses(*run_dirs) == unbroken
        assert len(run_dirs) > 2
        assert last["status"] == "completed"
        assert all("step" in one for one in last["resumed"]), "no checkpoint was refused"
        assert last["quality"]["metrics"]["draws"]["value"] == 120
        assert [one["step"] for one in last["quality"]["validation"]] == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]

    @pytest.mark.usefixtures("real_processes")
    @pytest.mark.parametrize(
        "by",
        [signal.SIGTERM, *(pytest.param(by, marks=pytest.mark.faults) for by in (signal.SIGUSR2, signal.SIGINT))],
    )
    def test_step_is_finished_checkpoint_written_and_run_marked_interrupted(
        self, by: signal.Signals, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        assert cut(tmp_path, *training(), at=10, by=by, phase="backward") == 128 + by
        left = manifest(tmp_path)
        assert (left["status"], left["reason"]) == ("interrupted", "timeout" if by == signal.SIGUSR2 else "cancelled")
        assert left["message"] == f"received {by.name}; resumes from step-00000011"
        assert [(one["kind"], one["status"], one["reason"], one["steps"]) for one in windows(tmp_path)] == [
            ("warmup", "completed", None, 1),
            ("measure", "interrupted", by.name, 10),
            ("checkpoint", "completed", None, 0),
        ]
        assert saved(tmp_path) == ["step-00000011"]
        after = whole(tmp_path, *training())
        assert after["resumed"] == [{"step": 11, "checkpoint": "checkpoints/step-00000011"}]
        assert [row["step"] for row in steps_of(tmp_path)] == list(range(STEPS)), "no step was done twice"
        assert losses(tmp_path) == expected(unbroken)

    def test_signal_from_outside_may_arrive_at_any_time(self, tmp_path: Path, unbroken: dict[int, set[bytes]]) -> None:
        """Also while the workload is built, a validation runs or a checkpoint is written."""
        chance = random.Random(4)
        overrides = training(60, "workload.checkpoint_every_s=0.01", "workload.validate_every=2")
        for _ in range(4):
            child = start(tmp_path, *overrides, TINY_STEP_S="0.01")
            before = len(windows(tmp_path))
            deadline = time.monotonic() + WAIT_S
            while len(windows(tmp_path)) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.25 * chance.random())
            for _ in range(3):  # only the first one counts
                child.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR2]))
            assert child.wait(WAIT_S) in (143, 140, 0)
            assert not any(name.startswith(".") for name in saved(tmp_path))
        whole(tmp_path, *overrides)
        assert losses(tmp_path) == unbroken

    def test_validation_in_progress_is_finished_and_not_repeated(
        self, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        overrides = training(STEPS, "workload.validate_every=8")
        assert cut(tmp_path, *overrides, at=8, by=signal.SIGTERM, phase="validation") == 143
        assert saved(tmp_path) == ["step-00000008"]
        done = whole(tmp_path, *overrides)
        assert [one["status"] for one in windows(tmp_path, "validation")] == ["completed"] * 4
        assert [one["step"] for one in done["quality"]["validation"]] == [0, 8, 16, 24]
        assert [one["steps"] for one in windows(tmp_path, "warmup")] == [1, 1], "warmed up again"
        assert losses(tmp_path) == expected(unbroken)

    def test_run_killed_before_its_first_checkpoint_starts_at_step_zero(
        self, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        assert cut(tmp_path, *training(), at=10, by=signal.SIGKILL) == -9
        assert whole(tmp_path, *training())["resumed"] == []
        assert losses(tmp_path) == expected(unbroken)


class TestNextAttempt:
    def test_resumes_from_the_checkpoint_of_an_earlier_attempt(
        self, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        first, second, third = (tmp_path / f"attempt-{number}" for number in (1, 2, 3))
        overrides = training(STEPS, "workload.validate_every=6")
        cut(first, *overrides, at=10, by=signal.SIGTERM)
        cut(second, *overrides, at=17, by=signal.SIGTERM)
        done = whole(third, *overrides)
        assert done["resumed"] == [
            {"step": 11, "checkpoint": "../attempt-1/checkpoints/step-00000011"},
            {"step": 18, "checkpoint": "../attempt-2/checkpoints/step-00000018"},
        ]
        assert [row["step"] for row in steps_of(third)] == list(range(18, STEPS))
        assert losses(first, second, third) == expected(unbroken)
        assert [one["step"] for one in done["quality"]["validation"]] == [0, 6, 12, 18, 24]
        assert saved(first) == ["step-00000011"], "another attempt's checkpoints are only read"

    def test_finished_training_is_not_trained_again(self, tmp_path: Path) -> None:
        overrides = training(5, "workload.validate_every=5")
        first = whole(tmp_path / "attempt-1", *overrides)
        again = whole(tmp_path / "attempt-2", *overrides)
        assert again["quality"] == first["quality"]
        assert windows(tmp_path / "attempt-2") == []
        assert (tmp_path / "attempt-2" / "finished.txt").read_text() == "5"
        longer = whole(tmp_path / "attempt-3", *training(8, "workload.validate_every=5"))
        assert [one["step"] for one in longer["quality"]["validation"]] == [0, 5, 8]

    def test_fewer_steps_than_already_trained_are_refused(self, tmp_path: Path) -> None:
        whole(tmp_path, *training(12))
        with pytest.raises(UserError, match="train_steps=6: 12 steps were already trained here"):
            whole(tmp_path, *training(6))

    def test_starts_at_step_zero_with_resume_off(self, tmp_path: Path, unbroken: dict[int, set[bytes]]) -> None:
        whole(tmp_path / "attempt-1", *training(5))
        done = whole(tmp_path / "attempt-2", *training(5, "workload.resume=false"))
        assert done["resumed"] == []
        assert losses(tmp_path / "attempt-2") == expected(unbroken, 5)

    def test_weights_of_another_shape_are_refused_by_the_workload(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = support.TiedNet
        with monkeypatch.context() as wide:
            wide.setattr(support, "TiedNet", lambda width: real(width + 1))
            whole(tmp_path, *training(5))
        done = whole(tmp_path, *training(5))
        (refused,) = done["resumed"]
        assert refused["reason"] == "first.weight is [9, 3, 3, 3] there and [8, 3, 3, 3] here"
        assert {step: bits for step, bits in losses(tmp_path).items() if len(bits) == 2}.keys() == set(range(5))


class TestDamagedCheckpoint:
    @pytest.fixture(scope="class")
    def twice_cut(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        run_dir = tmp_path_factory.mktemp("cut")
        cut(run_dir, *training(), at=5, by=signal.SIGTERM)
        cut(run_dir, *training(), at=15, by=signal.SIGTERM)
        assert saved(run_dir) == ["step-00000006", "step-00000016"]
        return run_dir

    @pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
    def test_is_refused_by_name_and_the_previous_one_gives_the_same_losses(
        self, harm: str, twice_cut: Path, tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        run_dir = Path(shutil.copytree(twice_cut, tmp_path / "run"))
        path = run_dir / "checkpoints" / "step-00000016" / "tensors.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(data if harm == "flip" else data[: len(data) // 2])
        gone_on, refused = whole(run_dir, *training())["resumed"]
        assert gone_on == {"step": 6, "checkpoint": "checkpoints/step-00000006"}
        assert refused["checkpoint"] == "checkpoints/step-00000016"
        assert "tensors.safetensors" in refused["reason"]
        assert losses(run_dir) == expected(unbroken)
        assert saved(run_dir) == ["step-00000006", "step-00000024"], "the damaged one is gone, a good one is not"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints lie on a file system of 256 KiB."""
    run_dir = tmp_path / "attempt-1"
    with small_disk_on(run_dir / "checkpoints"):
        yield run_dir


def fill(disk: Path) -> Path:
    """Leave no room for a checkpoint, but for its first few pages."""
    (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free - 8192))
    return disk / "filler"


class TestFullDisk:
    def test_is_recorded_while_training_continues_and_an_error_at_its_end(
        self, small_disk: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        cut(small_disk, *training(), at=3, by=signal.SIGTERM)
        assert saved(small_disk) == ["step-00000004"]
        filler = fill(small_disk / "checkpoints")
        assert start(small_disk, *training(STEPS, "workload.checkpoint_every_s=0.01")).wait(WAIT_S) != 0
        left = manifest(small_disk)
        assert (left["status"], left["reason"]) == ("failed", "app_error")
        assert left["message"].startswith("CheckpointError: could not write the checkpoint of step 24")
        assert left["message"].endswith("No space left on device; the last good one is step-00000004")
        gone_on, *problems = left["resumed"]
        assert gone_on["step"] == 4
        assert problems
        assert all("No space left on device" in one["problem"] for one in problems)
        assert saved(small_disk) == ["filler", "step-00000004"]
        assert losses(small_disk) == expected(unbroken)
        assert {one["status"] for one in windows(small_disk, "checkpoint")[1:]} == {"failed"}
        filler.unlink()
        assert whole(small_disk, *training())["status"] == "completed"
        assert losses(small_disk) == expected(unbroken)

    def test_is_reported_with_the_signal_that_ended_the_run(self, small_disk: Path) -> None:
        fill(small_disk / "checkpoints")
        assert cut(small_disk, *training(), at=3, by=signal.SIGTERM) == 143
        left = manifest(small_disk)
        assert (left["status"], left["reason"]) == ("interrupted", "cancelled")
        assert left["message"].startswith("received SIGTERM; could not write the checkpoint of step 4 in ")
        assert "No space left on device" in left["message"]
        assert saved(small_disk) == ["filler"]


class TestWindows:
    def test_batches_prefetched_during_a_validation_are_not_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(support.TinyTraining, "prefetched_batches", 3)
        whole(tmp_path, *training(20, "workload.validate_every=10", "workload.warmup_steps=2"))
        found = [(one["kind"], one["steps"]) for one in windows(tmp_path, "warmup", "measure", "validation")]
        assert [one for one in found if one[0] != "validation"] == [
            ("warmup", 2), ("measure", 8), ("warmup", 3), ("measure", 7),
        ]  # fmt: skip

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        run_dir = tmp_path_factory.mktemp("windows")
        whole(run_dir, *training(10, "workload.validate_every=4", "workload.warmup_steps=2"))
        return run_dir

    def test_each_validation_has_a_window_and_appears_once_per_step(self, done: Path) -> None:
        assert [(one["kind"], one["steps"]) for one in windows(done)] == [
            ("validation", 0),
            ("warmup", 2),
            ("measure", 2),
            ("validation", 0),
            ("measure", 4),
            ("validation", 0),
            ("measure", 2),
            ("validation", 0),
            ("checkpoint", 0),
        ]
        assert {one["status"] for one in windows(done)} == {"completed"}
        figures = manifest(done)["quality"]["validation"]
        assert [one["step"] for one in figures] == [0, 4, 8, 10]
        assert all(one["loss"] is not None and one["diverged"] is None for one in figures)

    def test_never_overlap(self, done: Path) -> None:
        edges = [edge for one in windows(done) for edge in (one["t_start_mono_ns"], one["t_end_mono_ns"])]
        assert edges == sorted(edges)

    def test_throughput_counts_only_the_measure_windows(self, done: Path) -> None:
        run, tables = load_run(done)
        row = summarise(Facts(manifest=run.manifest, windows=run.windows, tables=tables))
        measured = windows(done, "measure")
        seconds = sum(one["t_end_mono_ns"] - one["t_start_mono_ns"] for one in measured) / 1e9
        assert (row["n_steps"], row["images"]) == (8, 16)
        assert row["window_s"] == pytest.approx(seconds)
        assert row["images_per_s"] == pytest.approx(16 / seconds)
        assert "step table" not in (row["warnings"] or "")

    def test_periodic_checkpoints_split_the_measured_window(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: dict[int, set[bytes]]
    ) -> None:
        monkeypatch.setenv("TINY_STEP_S", "0.02")
        whole(tmp_path, *training(STEPS, "workload.checkpoint_every_s=0.1", "workload.keep_checkpoints=3"))
        kinds = [one["kind"] for one in windows(tmp_path)]
        assert kinds.count("checkpoint") > 2
        assert sum(one["steps"] for one in windows(tmp_path, "warmup", "measure")) == STEPS
        assert len(saved(tmp_path)) == 3
        assert saved(tmp_path)[-1] == "step-00000024"
        assert losses(tmp_path) == expected(unbroken)


class TestKillInALongWindow:
    """Neither validation nor checkpoint: one window to the end. Its rows must not be in memory alone."""

    JOURNAL_S = 0.5

    @pytest.fixture(scope="class")
    def killed(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
        """Its run directory, and when it was killed on the monotonic clock."""
        run_dir = tmp_path_factory.mktemp("killed")
        overrides = training(100_000, f"telemetry.journal_s={self.JOURNAL_S}", "workload.warmup_steps=3")
        child = start(run_dir, *overrides, TINY_STEP_S="0.005")
        deadline = time.monotonic() + WAIT_S
        while not windows(run_dir, "measure") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(10 * self.JOURNAL_S)
        assert child.poll() is None
        at_ns = time.monotonic_ns()
        child.kill()
        child.wait(WAIT_S)
        return run_dir, at_ns

    def test_loses_at_most_journal_s_of_step_rows(self, killed: tuple[Path, int], tmp_path: Path) -> None:
        run_dir = Path(shutil.copytree(killed[0], tmp_path / "run"))
        (record,) = [record for record in recover_run(run_dir) if record.table == "steps"]
        assert (record.outcome, record.truncated) == ("recovered", False)
        rows = steps_of(run_dir)
        assert [row["step"] for row in rows] == list(range(len(rows))), "without a gap from the first step on"
        lost_s = (killed[1] - rows[-1]["t_end_mono_ns"]) / 1e9
        assert lost_s < self.JOURNAL_S + 2, "two seconds for a busy machine"
        assert all(row["loss"] is not None for row in rows)

    def test_keeps_closed_windows_and_the_open_one_without_an_end(
        self, killed: tuple[Path, int], tmp_path: Path
    ) -> None:
        run_dir = Path(shutil.copytree(killed[0], tmp_path / "run"))
        warm, measured = windows(run_dir)
        assert (warm["kind"], warm["status"], warm["steps"]) == ("warmup", "completed", 3)
        assert (measured["kind"], measured["status"], measured["t_end_mono_ns"]) == ("measure", "running", None)
        recover_run(run_dir)
        ids = [row["window_id"] for row in steps_of(run_dir)]
        assert ids[:4] == [warm["window_id"]] * 3 + [measured["window_id"]]

    def test_is_merged_as_an_invalid_run(self, killed: tuple[Path, int], tmp_path: Path) -> None:
        merge([killed[0]], tmp_path / "dataset")
        (row,) = pl.read_parquet(tmp_path / "dataset" / "runs.parquet").to_dicts()
        assert not row["valid"]
        steps = pl.read_parquet(tmp_path / "dataset" / "steps" / "**" / "*.parquet")
        assert steps.height > 20

    def test_rows_before_the_kill_are_kept_when_resumed_in_the_same_directory(
        self, killed: tuple[Path, int], tmp_path: Path, unbroken: dict[int, set[bytes]]
    ) -> None:
        run_dir = Path(shutil.copytree(killed[0], tmp_path / "run"))
        whole(run_dir, *training(20, "workload.warmup_steps=3"))
        assert windows(run_dir)[1]["status"] == "interrupted"
        found = losses(run_dir)
        assert {step: found[step] for step in range(20)} == expected(unbroken, 20), "done twice, with the same bits"
        assert len(found) > 20

    def test_a_single_run_that_goes_on_is_one_run_and_valid(self, tmp_path: Path) -> None:
        """Regression: it had a new id at each start, and `merge` called its own rows those of another run."""
        overrides = training(60, "workload.warmup_steps=3")
        cut(tmp_path / "run", *overrides, at=30, by=signal.SIGTERM)
        earlier = manifest(tmp_path / "run")["run_id"]
        assert whole(tmp_path / "run", *overrides)["run_id"] == earlier
        merge([tmp_path / "run"], tmp_path / "dataset")
        (row,) = pl.read_parquet(tmp_path / "dataset" / "runs.parquet").to_dicts()
        assert (row["run_id"], row["invalid_reason"], row["valid"]) == (earlier, None, True)

    def test_a_single_run_of_another_batch_does_not_go_on(self, tmp_path: Path) -> None:
        cut(tmp_path, *training(60), at=3, by=signal.SIGKILL)
        with pytest.raises(UserError, match="holds a run with images per step 2, and this has 8; name another"):
            whole(tmp_path, *training(60), "batch=8")


class TestBenchmark:
    def test_writes_no_checkpoint_and_records_no_resume(self, tmp_path: Path) -> None:
        done = whole(tmp_path, *TRAINING)
        assert [one["kind"] for one in windows(tmp_path)] == ["warmup", "measure"]
        assert not (tmp_path / "checkpoints").exists()
        assert (done["resumed"], done["quality"]) == (None, None)

    def test_signal_interrupts_the_current_step(self, tmp_path: Path) -> None:
        assert cut(tmp_path, *TRAINING, at=2, by=signal.SIGTERM, phase="backward") == 143
        assert windows(tmp_path)[-1]["steps"] == 1, "the step that was under way is not counted"
        assert not (tmp_path / "checkpoints").exists()

    @pytest.mark.parametrize("override", ["workload.validate_every=5", "workload.checkpoint_every_s=60.0"])
    def test_keys_of_a_training_are_refused(self, override: str, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=rf"{override}: only training reads this\. Set workload\.train_steps"):
            whole(tmp_path, *TRAINING, override)
        assert not list(tmp_path.iterdir()), "it is refused before the run directory is touched"


class TestDeferredSignal:
    def test_raises_at_the_end_of_the_block(self) -> None:
        stop_signal, names = StopSignal(), []
        with pytest.raises(Terminated, match="received SIGTERM"), stop_signal.deferred():  # noqa: PT012
            stop_signal.receive(signal.SIGTERM)
            names.append(stop_signal.name)
        assert names == ["SIGTERM"]

    def test_does_not_hide_an_exception_of_the_block(self) -> None:
        stop_signal = StopSignal()
        with pytest.raises(ZeroDivisionError), stop_signal.deferred():  # noqa: PT012
            stop_signal.receive(signal.SIGTERM)
            raise ZeroDivisionError

    def test_is_the_cause_of_an_exception_after_ctrl_c(self) -> None:
        """A compiler in the same process group dies of it, and the step fails."""
        stop_signal = StopSignal()
        with pytest.raises(Terminated, match="received SIGINT; ZeroDivisionError while"), stop_signal.deferred():  # noqa: PT012
            stop_signal.receive(signal.SIGINT)
            raise ZeroDivisionError

    @pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
    def test_only_a_second_ctrl_c_interrupts_the_block(self, first: signal.Signals) -> None:
        stop_signal, passed = StopSignal(), False
        with pytest.raises(Terminated) as raised, stop_signal.deferred():  # noqa: PT012
            stop_signal.receive(first)
            stop_signal.receive(signal.SIGINT)
            passed = True
        assert passed is (first == signal.SIGTERM)
        assert raised.value.at_once is not passed


def test_sigint_interrupts_a_run_that_was_started_with_it_ignored() -> None:
    """Shells start background commands of a script so, and their children inherit it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Terminated, match="received SIGINT"), terminable():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
