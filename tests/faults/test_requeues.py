"""Time limit and pre-emption: checkpoints, requeues, and losses equal to those of an undisturbed training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from inpaint_bench.cli import app

from .matrix import LIMITED_STEPS, STEPS, Matrix
from .support import line, losses, manifest, nothing_to_submit, reasons, rerun_preview, starts, status_points

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


class TestTimeLimit:
    @pytest.mark.parametrize("name", ["late", "twice_late"])
    def test_is_the_reason_and_gets_longer(self, matrix: Matrix, name: str, capsys: Any) -> None:
        assert reasons(matrix[name], capsys) == [("failed", "timeout")]
        row = line(rerun_preview(matrix[name], capsys), "time limit of 2 min instead of 1")
        assert ("resumes from step-" in row) == (name == "twice_late")

    def test_at_the_partitions_limit_only_a_point_with_a_checkpoint_is_submitted(
        self, matrix: Matrix, capsys: Any
    ) -> None:
        limit = "sites.delta.gpus.a40.max_minutes=1"
        message = "it had the 1 min that gpuA40x4 allows"
        assert f"{message}; resumes from step-" in rerun_preview(matrix["twice_late"], capsys, limit)
        assert f"{message}; there is no checkpoint to resume from" in rerun_preview(matrix["late"], capsys, limit)
        preview = rerun_preview(matrix["late"], capsys, "--only", "timeout", "time_min=1")
        assert "time limit of 1 min, as requested" in preview

    def test_does_not_requeue_a_benchmark(self, matrix: Matrix) -> None:
        assert starts(matrix["late"]) == []
        assert not manifest(matrix["late"])["slurm"].get("requeued")

    def test_requeues_a_training_up_to_its_maximum(self, matrix: Matrix) -> None:
        first, last = *starts(matrix["twice_late"]), manifest(matrix["twice_late"])
        assert first["message"].startswith("received SIGTERM; resumes from step-")
        assert [start["reason"] for start in (first, last)] == ["timeout"] * 2
        assert [start["slurm"].get("requeued") for start in (first, last)] == [True, None]
        assert last["progress"]["step"] > first["progress"]["step"] == last["resumed"][0]["step"]

    def test_does_not_change_the_losses_of_a_training(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["limited"], capsys) == [("completed", None)]
        cut = starts(matrix["limited"])
        assert cut, "no start hit the time limit"
        assert all(start["message"].startswith("received SIGUSR2; resumes from step-") for start in cut)
        assert {(start["reason"], start["slurm"]["requeued"]) for start in cut} == {("timeout", True)}
        assert losses(matrix["limited"]) == losses(matrix["undisturbed"])
        assert len(losses(matrix["undisturbed"])) == LIMITED_STEPS
        assert nothing_to_submit(matrix["limited"], capsys)

    def test_flags_the_windows_that_it_interrupted(self, matrix: Matrix, tmp_path: Path) -> None:
        assert app.main(["merge", str(matrix["limited"]), "-o", str(tmp_path)]) == 0
        run = pl.read_parquet(tmp_path / "runs.parquet").row(0, named=True)
        assert run["valid"], run["invalid_reason"]
        measured = pl.read_parquet(tmp_path / "windows.parquet").filter(pl.col("kind") == "measure").to_dicts()
        cut = [window for window in measured if window["status"] == "interrupted"]
        assert len(cut) == len(starts(matrix["limited"]))
        assert all(window["flags"] == "requeued,interrupted" for window in cut)
        assert run["n_steps"] == sum(window["steps"] for window in measured) - sum(window["steps"] for window in cut)


class TestPreemption:
    def test_is_distinguished_from_a_cancellation_and_requeued_each_time(self, matrix: Matrix) -> None:
        assert [start["reason"] for start in matrix.observed["preempted"]] == ["preempted"] * 3
        assert all("resumes from step-" in start["message"] for start in matrix.observed["preempted"])
        assert all(start["slurm"]["requeued"] for start in matrix.observed["preempted"])

    def test_three_times_does_not_change_the_losses_of_a_training(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["preempted"], capsys) == [("completed", None)]
        assert [event["step"] > 0 for event in manifest(matrix["preempted"])["resumed"]] == [True] * 3
        assert losses(matrix["preempted"]) == losses(matrix["undisturbed"])[:STEPS]
        assert nothing_to_submit(matrix["preempted"], capsys)

    def test_is_the_reason_where_the_site_does_not_requeue_and_rerun_continues(
        self, matrix: Matrix, capsys: Any
    ) -> None:
        (point,) = status_points(matrix["taken"], capsys)
        assert (point["state"], point["reason"]) == ("failed", "preempted")
        assert "submitted unchanged" in rerun_preview(matrix["taken"], capsys)
