"""One attempt from its configuration to its files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from inpaint_bench.core.attempt_state import SchedulerState
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json as read_json_or_none
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.records import Manifest, read_record
from inpaint_bench.core.schema import Reason, Status
from inpaint_bench.core.tables import STEPS
from inpaint_bench.ranks import group
from inpaint_bench.run import manifest, worker
from inpaint_bench.run.manifest import new_run_id
from inpaint_bench.workloads import finetune_inpaint
from inpaint_bench.workloads.finetune_inpaint import FineTuning

from .support import bench, compose, steps_of


def read_json(path: Path) -> Any:
    return read_json_or_none(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("run")
    worker.run(compose("recipe.num_workers=1"), run_dir, ["batch=2"])
    return run_dir, read_json(run_dir / "manifest.json")


class TestCompletedRun:
    def test_manifest_has_every_field(self, finished: tuple[Path, dict[str, Any]]) -> None:
        _, manifest = finished
        assert list(manifest) == list(Manifest.__struct_fields__)
        assert (manifest["status"], manifest["reason"], manifest["message"]) == ("completed", None, None)
        assert (manifest["site"], manifest["gpu"], manifest["batch"]) == ("local", "cpu", 2)
        assert manifest["ended_unix_ns"] > manifest["started_unix_ns"]
        assert (manifest["overrides"], manifest["seed"]) == (["batch=2"], 0)
        assert manifest["telemetry"]["source"] == "none"
        assert manifest["memory"] is None

    def test_has_a_warmup_and_a_measure_window(self, finished: tuple[Path, dict[str, Any]]) -> None:
        windows = json.loads((finished[0] / "windows.json").read_text())
        assert [(w["kind"], w["status"], w["steps"], w["images"]) for w in windows] == [
            ("warmup", "completed", 1, 2),
            ("measure", "completed", 3, 6),
        ]
        assert all(w["t_end_mono_ns"] > w["t_start_mono_ns"] for w in windows)

    def test_step_rows_follow_the_schema(self, finished: tuple[Path, dict[str, Any]]) -> None:
        run_dir, manifest = finished
        for part in (run_dir / "steps").glob("*.parquet"):
            assert pq.read_schema(part).equals(STEPS)
            assert pq.read_schema(part).metadata[b"run_id"].decode() == manifest["run_id"]
        rows = steps_of(run_dir)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        assert {row["window_id"] for row in rows[1:]} == {"measure-1"}
        assert all(row["device_ms"] is None and row["images"] == 2 and row["loss"] > 0 for row in rows)

    def test_images_per_second_are_images_over_window_time(self, finished: tuple[Path, dict[str, Any]]) -> None:
        run_dir, manifest = finished
        window = json.loads((run_dir / "windows.json").read_text())[-1]
        seconds = (window["t_end_mono_ns"] - window["t_start_mono_ns"]) / 1e9
        assert manifest["progress"]["images_per_s"] == pytest.approx(window["images"] / seconds)
        assert (manifest["progress"]["step"], manifest["progress"]["steps_total"]) == (4, 4)
        within = [row for row in steps_of(run_dir) if row["window_id"] == window["window_id"]]
        assert sum(row["images"] for row in within) == window["images"]
        assert within[0]["t_start_mono_ns"] >= window["t_start_mono_ns"]
        assert within[-1]["t_end_mono_ns"] <= window["t_end_mono_ns"]

    def test_measure_window_lasts_at_least_min_measure_s(self, tmp_path: Path) -> None:
        worker.run(compose("workload.min_measure_s=1", "workload.warmup_steps=0"), tmp_path, [])
        (window,) = json.loads((tmp_path / "windows.json").read_text())
        assert window["t_end_mono_ns"] - window["t_start_mono_ns"] >= 1e9
        assert window["steps"] > 3

    def test_load_before_the_measurement_is_a_warmup_of_its_own_that_lasts_min_warmup_s(self, tmp_path: Path) -> None:
        manifest = worker.run(compose("workload.min_warmup_s=1"), tmp_path, [])
        first, load, measure = json.loads((tmp_path / "windows.json").read_text())
        assert [w["kind"] for w in (first, load, measure)] == ["warmup", "warmup", "measure"]
        assert first["steps"] == 1
        assert load["t_end_mono_ns"] - load["t_start_mono_ns"] >= 1e9
        assert measure["t_start_mono_ns"] >= load["t_end_mono_ns"]
        assert manifest.workload_facts is not None
        assert manifest.workload_facts["warmup_s"] >= 1
        assert manifest.progress is not None
        assert manifest.progress.steps_total == 1 + load["steps"] + 3

    def test_load_before_the_measurement_is_refused_for_a_training(self) -> None:
        with pytest.raises(UserError, match=r"min_warmup_s=5: a training does not read this\. Set workload\.warmup"):
            bench("workload.min_warmup_s=5", "workload.train_steps=4")


class TestLearning:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_loss_on_a_fixed_set_falls_within_thirty_steps(self, precision: str) -> None:
        config = bench(
            "batch=8",
            "data.num_images=8",
            "workload.learning_rate=0.003",
            f"recipe.precision={precision}",
        )
        workload = finetune_inpaint.build(config, torch.device("cpu"))
        batch = workload.next_batch()
        losses = [float(workload.step(batch)) for _ in range(30)]
        assert all(torch.isfinite(torch.tensor(losses)))
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])

    def test_equal_seeds_give_equal_losses(self) -> None:
        first, second = (finetune_inpaint.build(bench(), torch.device("cpu")) for _ in range(2))
        for _ in range(2):
            ours, theirs = (float(one.step(one.next_batch())) for one in (first, second))
            assert ours == theirs

    def test_steps_skipped_for_fp16_overflow_are_counted(self) -> None:
        workload = finetune_inpaint.build(bench("recipe.precision=fp16"), torch.device("cpu"))
        batch = workload.next_batch()
        workload.step(batch)
        assert workload.training_step.scaler.is_enabled()
        before = workload.skipped_steps()
        workload.training_step.scaler.update(torch.tensor(3e38))  # no gradient survives such a scale
        workload.step(batch)
        assert workload.skipped_steps() == before + 1


class TestLosses:
    """Those of a training, and of a benchmark."""

    @pytest.fixture(params=[("workload.train_steps=6", "workload.checkpoint_every_s=0.001"), ()])
    def given(self, request: pytest.FixtureRequest) -> tuple[str, ...]:
        return tuple(request.param)

    def spoil(self, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        real = FineTuning.step

        def step(self: FineTuning, batch: Any) -> torch.Tensor:
            loss = real(self, batch)
            return loss if self.training_step.steps <= first else loss * torch.nan

        monkeypatch.setattr(FineTuning, "step", step)

    def test_run_without_a_finite_one_has_failed_and_leaves_no_checkpoint(
        self, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.spoil(monkeypatch, first=0)
        with pytest.raises(UserError, match=r"none of the \d+ losses is finite; lower workload\.learning_rate"):
            worker.run(compose(*given), tmp_path, [])
        manifest = read_json(tmp_path / "manifest.json")
        assert (manifest["status"], manifest["reason"]) == ("failed", "app_error")
        assert manifest["workload_facts"]["losses_not_finite"] == len(steps_of(tmp_path))
        assert not list(tmp_path.glob("checkpoints/*"))

    def test_run_in_which_some_are_finite_counts_the_others(
        self, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.spoil(monkeypatch, first=1)
        worker.run(compose(*given), tmp_path, [])
        manifest = read_json(tmp_path / "manifest.json")
        assert manifest["status"] == "completed"
        assert manifest["workload_facts"]["losses_not_finite"] == len(steps_of(tmp_path)) - 1


class TestFailure:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (ZeroDivisionError("by nothing"), "app_error"),
            (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom_gpu"),
            (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "oom_gpu"),
            (MemoryError(), "oom_host"),
            (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "oom_host"),
        ],
    )
    def test_is_recorded_in_the_manifest_and_raised_again(
        self, error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = FineTuning.step

        def step(self: FineTuning, batch: Any) -> torch.Tensor:
            if self.training_step.steps == 3:
                raise error
            return real(self, batch)

        monkeypatch.setattr(FineTuning, "step", step)
        with pytest.raises(type(error)):
            worker.run(compose(), tmp_path, [])
        manifest = read_json(tmp_path / "manifest.json")
        assert (manifest["status"], manifest["reason"]) == ("failed", reason)
        assert type(error).__name__ in manifest["message"]
        warmup, measure = json.loads((tmp_path / "windows.json").read_text())
        assert (warmup["status"], measure["status"], measure["steps"]) == ("completed", "failed", 2)
        assert len(steps_of(tmp_path)) == 3, "the steps before the failure are kept"

    def test_replay_without_a_capture_is_a_usage_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"needs telemetry\.capture=<name or file of a capture>"):
            worker.run(compose("telemetry=replay"), tmp_path, [])

    def test_gpu_recipe_without_cuda_is_a_usage_error(self, tmp_path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        with pytest.raises(UserError, match=r"recipe baseline needs CUDA.*recipe=cpu"):
            worker.run(compose("gpu=a100", "recipe=baseline"), tmp_path, [])
        assert read_json(tmp_path / "manifest.json")["status"] == "failed"

    def test_cpu_run_is_not_recorded_as_a_gpu(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"gpu=a100.*demonstration=true"):
            worker.run(compose("gpu=a100"), tmp_path, [])

    def test_unknown_workload_module_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"workload\.module=inpaint_bench\.nothing: no such module"):
            worker.run(compose("workload.module=inpaint_bench.nothing"), tmp_path, [])

    def test_other_gpu_than_configured_is_a_usage_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Properties:
            name, uuid = "NVIDIA A40", "1234"

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
        with pytest.raises(UserError, match=r"gpu=a100.*'NVIDIA A40'"):
            group.choose_device(bench("gpu=a100", "recipe=baseline"))
        _, uuids = group.choose_device(bench("gpu=a40", "recipe=baseline"))
        assert uuids == ["GPU-1234"]

    @pytest.mark.parametrize("visible", ["3", "GPU-99999999", "2,GPU-1234"])
    def test_uuid_is_that_of_the_cuda_device(self, visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Numbers in CUDA_VISIBLE_DEVICES are CUDA's order, not NVML's: they are never looked up."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(name="NVIDIA A40", uuid="1234")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        assert group.choose_device(bench("gpu=a40", "recipe=baseline"))[1] == ["GPU-1234"]

    @pytest.mark.parametrize(
        ("name", "uuid"), [("NVIDIA H200 MIG 1g.18gb", "1234"), ("NVIDIA H200", "MIG-1234")], ids=["by name", "by UUID"]
    )
    def test_mig_slice_is_refused(self, name: str, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever watches it: steps on a slice are not steps on the card that the tables name."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        properties = SimpleNamespace(name=name, uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        with pytest.raises(UserError, match=r"MIG slice \(NVIDIA H200.*\).*request a whole GPU"):
            group.choose_device(bench("gpu=h200", "recipe=baseline", "telemetry=none"))

    def test_empty_cuda_visible_devices_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES empty"):
            group.choose_device(bench("gpu=h200", "recipe=baseline"))


class TestInterruption:
    @pytest.mark.parametrize(
        ("signum", "end_in_s", "reason"),
        [
            (signal.SIGTERM, 20, Reason.TIMEOUT),
            (signal.SIGTERM, 3600, Reason.CANCELLED),
            (signal.SIGUSR2, 3600, Reason.TIMEOUT),
        ],
    )
    def test_signal_near_the_time_limit_is_a_timeout(
        self, signum: int, end_in_s: int, reason: Reason, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("INPAINT_BENCH_END_UNIX", str(int(time.time()) + end_in_s))
        status, found, _ = worker.diagnose(worker.Terminated(signum), bench("site=local"))
        assert (status, found) == (Status.INTERRUPTED, reason)

    def test_interruption_is_diagnosed_without_importing_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: a signal during the import of torch was lost in the error of importing it again."""
        monkeypatch.setitem(sys.modules, "inpaint_bench.workloads.batch_search", None)  # importing it fails
        status, reason, _ = worker.diagnose(KeyboardInterrupt(), bench("site=local"))
        assert (status, reason) == (Status.INTERRUPTED, Reason.CANCELLED)

    def test_second_start_in_the_directory_keeps_the_first_manifest_and_windows(
        self, finished: tuple[Path, dict[str, Any]], tmp_path: Path
    ) -> None:
        cut: dict[str, Any] = {"window_id": "measure-0", "kind": "measure", "status": "running", "t_end_mono_ns": None}
        cut |= {"t_start_mono_ns": 1, "t_start_unix_ns": 1}
        (tmp_path / "windows.json").write_text(json.dumps([cut]))
        (tmp_path / "manifest.json").write_text(json.dumps({"run_id": "first"}))
        worker.run(compose(), tmp_path, [])
        assert read_json(tmp_path / "manifest.1.json") == {"run_id": "first"}
        before, *after = read_json(tmp_path / "windows.json")
        assert (before["status"], before["t_end_mono_ns"]) == ("interrupted", None)
        assert [w["window_id"] for w in after] == ["warmup-1", "measure-2"]


def test_run_ids_sort_by_time_and_differ() -> None:
    first, second = new_run_id(), new_run_id()
    assert first != second
    assert first[:17] <= second[:17]


def test_sidecar_report_is_in_the_manifest(tmp_path: Path) -> None:
    config = compose("gpu=a40", "demonstration=true", "telemetry=replay", "workload.min_measure_s=0.5")
    manifest = worker.run(config, tmp_path, [])
    assert manifest == read_record(tmp_path / "manifest.json", Manifest)
    assert manifest.telemetry is not None
    assert (manifest.telemetry.source or "").startswith("replay:")
    assert manifest.telemetry.status == "complete"
    assert manifest.devices[0].index_visible == 0


def test_progress_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = manifest.ManifestFile.start(tmp_path, bench("site=local"), compose(), [])
    writing, written = threading.Event(), threading.Event()

    def write(*_: Any) -> None:
        writing.set()
        written.wait(120)

    monkeypatch.setattr(manifest, "WRITE_INTERVAL_S", 0.05)
    monkeypatch.setattr(manifest, "replace_bytes", write)
    record.progress(1, None, None)
    assert writing.wait(60)
    start_s = time.monotonic()
    record.progress(2, None, None)
    assert time.monotonic() - start_s < 60, "the write takes twice as long"
    written.set()
    record.finish(Status.COMPLETED)


def test_second_start_removes_the_scheduler_state_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "scheduler.json").write_text('{"state": "PREEMPTED", "detail": ""}')
    manifest.ManifestFile.start(tmp_path, bench("site=local"), compose(), [])
    assert SchedulerState.load(tmp_path) is None


def test_run_with_other_code_than_was_submitted_measures_nothing_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was imported from"):
        worker.run(compose(f"identity.code={tmp_path}/code"), tmp_path / "run", [])
    written = read_json(tmp_path / "run" / "manifest.json")
    assert (written["status"], written["reason"]) == ("failed", "app_error")
    assert f"and not from {tmp_path}/code, the code that was submitted" in written["message"]
    assert not (tmp_path / "run" / "steps").exists()


def test_signals_after_the_final_manifest_end_nothing(tmp_path: Path) -> None:
    """Slurm may send them until the process has ended, and records a failure by its exit code."""
    command = [sys.executable, "-m", "tests.run.late_signal", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()[-5:]) == (0, "ended"), done.stderr
    manifest = read_json(tmp_path / "run" / "manifest.json")
    assert (manifest["status"], manifest["reason"]) == ("completed", None)
