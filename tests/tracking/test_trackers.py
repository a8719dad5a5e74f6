"""Runs of the worker beside each tracker, read back by the tracker's own library; and trackers that fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.core.config.config_hash import config_hash
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.records import Manifest, TrackingReport, read_record
from inpaint_bench.core.schema import Status
from inpaint_bench.run import tracked, worker
from tests.run.support import compose, last_given, steps_of

from .painting import PICTURE

STEPS = 12
TRAINING = (
    "workload.module=tests.tracking.painting",
    "telemetry=replay",
    "telemetry.capture=h200",
    "workload.warmup_steps=1",
    f"workload.train_steps={STEPS}",
    "workload.validate_every=4",
    "track.every_s=0.5",
    "identity.run_id=r-20260101T000000-0000abcd",
    "seed=3",
)


def train(run_dir: Path, *overrides: str, step_s: float = 0.15) -> Manifest:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_STEP_S", str(step_s))
        return worker.run(compose(*last_given(*TRAINING, *overrides)), run_dir, [])


def manifest_of(run_dir: Path) -> Manifest:
    manifest = read_record(run_dir / "manifest.json", Manifest)
    assert manifest is not None
    return manifest


def report_of(run_dir: Path) -> TrackingReport:
    report = read_record(run_dir / "tracking.json", TrackingReport)
    assert report is not None
    return report


def check_curves(run_dir: Path, curve: Callable[[str], list[tuple[int, float]]]) -> None:
    """Compare what a tracker has with what the run wrote; `curve` gives the points of a name in order of steps."""
    manifest = manifest_of(run_dir)
    assert manifest.quality is not None
    assert manifest.progress is not None
    rows = steps_of(run_dir)
    assert [step for step, _ in curve("loss")] == list(range(STEPS))
    assert [value for _, value in curve("loss")] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert [value for _, value in curve("lr")] == pytest.approx([row["lr"] for row in rows], rel=1e-6)
    assert curve("validation/loss") == [
        (entry["step"], pytest.approx(entry["loss"], rel=1e-6)) for entry in manifest.quality.validation
    ]
    assert [step for step, _ in curve("validation/loss")] == [0, 4, 8, 12]
    step, rate = curve("images_per_s")[-1]
    assert (step, rate) == (STEPS, pytest.approx(manifest.progress.images_per_s, rel=1e-6))
    assert all(0 < watts < 800 for _, watts in curve("power_w"))
    assert all(0 <= share <= 100 for _, share in curve("gpu_util_pct"))
    assert curve("power_w")[-1][0] == curve("gpu_util_pct")[-1][0] == STEPS
    assert curve("quality/psnr") == [(STEPS, 21.5)]


def completed(run_dir: Path) -> TrackingReport:
    """Check what manifest and report of a tracked run say."""
    manifest, report = manifest_of(run_dir), report_of(run_dir)
    assert manifest.status is Status.COMPLETED
    assert manifest.tracking is not None
    assert (manifest.tracking.link, manifest.tracking.problem) == (report.link, None)
    assert (report.status, report.last_step, report.pictures) == ("complete", STEPS - 1, 1)
    return report


def events_of(run_dir: Path) -> Any:
    """Return the curves of a run as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(report_of(run_dir).link or "")
    events.Reload()
    return events


class TestTensorBoard:
    def test_curves_pictures_and_name_are_read_back_by_tensorboard(self, tmp_path: Path) -> None:
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        train(tmp_path, "track=tensorboard")
        report = completed(tmp_path)
        assert report.link == str(tmp_path / "tracking/tensorboard/cpu-batch=2-cpu-seed=3")
        events = events_of(tmp_path)
        check_curves(tmp_path, lambda name: [(point.step, point.value) for point in events.Scalars(name)])
        (picture,) = events.Images("samples")
        assert (picture.step, picture.width, picture.height) == (STEPS, 4, 4)
        assert picture.encoded_image_string == (tmp_path / PICTURE).read_bytes()
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        tags = HParamsPluginData.FromString(content).session_start_info.hparams
        assert (tags["gpu"].string_value, tags["batch"].string_value, tags["seed"].string_value) == ("cpu", "2", "3")

    def test_run_that_goes_on_in_its_directory_adds_what_is_new(self, tmp_path: Path) -> None:
        train(tmp_path, "track=tensorboard", "workload.train_steps=6", step_s=0.02)
        train(tmp_path, "track=tensorboard", step_s=0.02)
        events = events_of(tmp_path)
        assert [point.step for point in events.Scalars("loss")] == list(range(STEPS))
        assert [point.step for point in events.Scalars("validation/loss")] == [0, 4, 6, 8, 12]

    def test_benchmark_has_its_losses_when_the_window_closes(self, tmp_path: Path) -> None:
        train(tmp_path, "track=tensorboard", "workload.train_steps=null", "workload.validate_every=0")
        events = events_of(tmp_path)
        losses = [(point.step, pytest.approx(point.value)) for point in events.Scalars("loss")]
        assert losses == [(row["step"], row["loss"]) for row in steps_of(tmp_path)]


class TestMLflow:
    @pytest.fixture(autouse=True)
    def _folder_is_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # of this process, which reads
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def test_curves_pictures_and_tags_are_read_back_by_mlflow(self, tmp_path: Path) -> None:
        from mlflow import MlflowClient

        run_dir = tmp_path / "sweep" / "0" / "attempt-1"
        train(run_dir, "track=mlflow", "track.project=two cards", "identity.sweep_id=s-1")
        report = completed(run_dir)
        client = MlflowClient(tracking_uri=str(tmp_path / "sweep" / "mlruns"))
        run = client.get_run(report.tracked_run or "")
        assert (run.info.run_name, run.info.status) == ("cpu batch=2 cpu seed=3", "FINISHED")
        assert client.get_experiment(run.info.experiment_id).name == "two cards"
        expected = {"gpu": "cpu", "site": "local", "batch": "2", "recipe": "cpu", "seed": "3", "sweep": "s-1"}
        assert expected.items() <= run.data.tags.items()
        assert (report.link or "").endswith(f"sweep/mlruns/{run.info.experiment_id}/{run.info.run_id}")

        def curve(name: str) -> list[tuple[int, float]]:
            return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))

        check_curves(run_dir, curve)
        (picture,) = client.list_artifacts(run.info.run_id, "samples")
        path = client.download_artifacts(run.info.run_id, picture.path, str(tmp_path))
        assert Path(path).read_bytes() == (run_dir / PICTURE).read_bytes()

    def test_address_and_experiment_of_the_environment_are_used_and_keys_come_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mlflow import MlflowClient

        monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "of-environment"))
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the shell")
        keys = (f"track.uri={tmp_path}/of-key", "track.project=of the key")
        for name, place, experiment, given in (
            ("a", "of-environment", "of the shell", ()),
            ("b", "of-key", "of the key", keys),
        ):
            train(tmp_path / name, "track=mlflow", *given, step_s=0)
            assert (report_of(tmp_path / name).link or "").startswith(str(tmp_path / place))
            experiments = MlflowClient(tracking_uri=str(tmp_path / place)).search_experiments()
            assert experiment in {found.name for found in experiments}

    def test_failed_run_is_marked_as_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from mlflow import MlflowClient

        monkeypatch.setenv("TINY_SIGNAL", f"5:{int(signal.SIGTERM)}:update")
        with pytest.raises(SystemExit):
            train(tmp_path, "track=mlflow")
        report = report_of(tmp_path)
        client = MlflowClient(tracking_uri=str(tmp_path / "mlruns"))
        assert client.get_run(report.tracked_run or "").info.status == "KILLED"
        assert report.last_step == 5


def wandb_records(folder: Path) -> list[Any]:
    """Return the records of an offline run, decoded by W&B's own protocol; its log has the format of LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("run-*.wandb")
    content, at, whole, records = path.read_bytes(), 7, b"", []
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too short for a header: zeros to the end of the block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


class TestWandB:
    def test_offline_run_has_curves_pictures_and_tags_without_network_and_login(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
        train(tmp_path, "track=wandb", "track.project=cards")
        folder = Path(completed(tmp_path).link or "")
        assert folder.parent == tmp_path / "tracking" / "wandb"
        records = wandb_records(folder)
        run = next(record.run for record in records if record.HasField("run"))
        assert (run.project, run.display_name, run.run_id) == (
            "cards",
            "cpu batch=2 cpu seed=3",
            "r-20260101T000000-0000abcd",
        )
        assert {"gpu=cpu", "site=local", "batch=2", "recipe=cpu", "seed=3"} <= set(run.tags)
        rows = []
        for record in records:
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})

        def curve(name: str) -> list[tuple[int, float]]:
            return sorted((row["step"], row[name]) for row in rows if name in row)

        check_curves(tmp_path, curve)
        (picture,) = [row["samples/path"] for row in rows if "samples/path" in row]
        assert (folder / "files" / picture).read_bytes()[:4] == b"\x89PNG"
        assert next(record.exit.exit_code for record in records if record.HasField("exit")) == 0
        listed = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", "--dry-run", str(folder)], capture_output=True, text=True
        )
        assert "Would sync 1 run" in listed.stdout + listed.stderr

    def test_project_and_folder_of_the_environment_are_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_PROJECT", "of-the-shell")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / "scratch"))
        monkeypatch.delenv("WANDB_MODE", raising=False)
        train(tmp_path / "run", "track=wandb", step_s=0)
        folder = Path(completed(tmp_path / "run").link or "")
        assert folder.parent == tmp_path / "scratch" / "wandb"
        run = next(record.run for record in wandb_records(folder) if record.HasField("run"))
        assert run.project == "of-the-shell"

    @pytest.mark.parametrize("online", [{"WANDB_MODE": "online"}, {}])
    def test_online_without_a_key_costs_the_curves_and_not_the_run(
        self, online: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in online.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        train(tmp_path / "run", "track=wandb", f"track.online={not online}", step_s=0)
        manifest = manifest_of(tmp_path / "run")
        assert manifest.status is Status.COMPLETED
        assert manifest.tracking is not None
        assert manifest.tracking.problem


def processes_of_session(session: int) -> list[int]:
    """Return the processes that the tracker has started, and itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


class TestFailures:
    def test_killed_tracker_leaves_the_run_intact_and_a_line_in_log_and_manifest(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        killed: list[int] = []

        def kill() -> None:
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s and not killed:
                time.sleep(0.05)
                if (tmp_path / "tracking.json").exists() and report_of(tmp_path).values:
                    killed.append(report_of(tmp_path).pid or 0)
                    os.kill(killed[0], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with caplog.at_level(logging.WARNING):
            train(tmp_path, "track=wandb", step_s=0.4)
        thread.join()
        assert killed
        manifest = manifest_of(tmp_path)
        assert manifest.status is Status.COMPLETED
        assert manifest.tracking is not None
        assert manifest.tracking.link
        assert manifest.tracking.problem == "its process ended with exit code -9; see tracking.log"
        assert "track=wandb: curves of this run are missing: its process ended" in caplog.text
        assert [row["step"] for row in steps_of(tmp_path)] == list(range(STEPS))
        assert processes_of_session(killed[0]) == []

    @pytest.mark.parametrize(
        ("where", "problem"),
        [
            ("log", "ConnectionError: the server is gone"),
            ("finish", "ConnectionError: the server is gone"),
            ("hang", "it did not end within 2 s and was killed; see tracking.log"),
        ],
    )
    def test_failure_of_the_tracker_costs_its_curves_only(
        self, where: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BAD_TRACKER", where)
        if where == "hang":
            monkeypatch.setattr(tracked, "FINISH_S", 2.0)
        own = ("track.name=mine", "track.module=tests.tracking.painting", "track.uri=anywhere")
        train(tmp_path, *own, step_s=0.05)
        manifest = manifest_of(tmp_path)
        assert manifest.status is Status.COMPLETED
        assert manifest.tracking is not None
        assert (manifest.tracking.name, manifest.tracking.link) == ("mine", "https://tracker.example/1")
        assert manifest.tracking.problem == problem

    @pytest.mark.parametrize(
        ("overrides", "sentence"),
        [
            (["track=wandb", "track.uri=x"], "track.uri is read by track=mlflow only, and this is track=wandb"),
            (["track.online=true"], "track.online is read by track=wandb only, and this is track=none"),
            (["track=mlflow", "track.uri='https://me:secret@host/'"], "without user and password"),
            (["track=wandb", "track.project=a/b"], "a name without /"),
            (["track=mlflow", "track.module=no_such_module"], "track.module=no_such_module: no such module"),
            (["track=mlflow", "track.every_s=0"], "track.every_s=0.0: must lie between"),
        ],
    )
    def test_wrong_key_is_one_sentence(self, overrides: list[str], sentence: str) -> None:
        with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
            parse_config(compose(*overrides))


def test_tracker_does_not_change_what_is_compared() -> None:
    assert config_hash(compose("track=tensorboard")) == config_hash(compose())


def test_without_a_tracker_there_is_nothing_of_one(tmp_path: Path) -> None:
    train(tmp_path, step_s=0)
    assert manifest_of(tmp_path).tracking is None
    assert not list(tmp_path.glob("tracking*"))


def test_training_loop_and_its_process_import_no_tracker() -> None:
    code = (
        "import sys, inpaint_bench.run.worker, inpaint_bench.run.loop; "
        "print([name for name in ('tensorboard', 'wandb', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
