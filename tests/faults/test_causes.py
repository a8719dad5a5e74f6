"""Every cause that ends a job: the state and reason in `status`, and the decision of `rerun`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from inpaint_bench.cli import app

from .matrix import CAUSES, STEPS, Matrix
from .support import (
    LOST_S,
    line,
    losses,
    lost_s,
    manifest,
    nothing_to_submit,
    reasons,
    rerun_preview,
    starts,
    status_points,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


class TestApplicationFaults:
    def test_every_point_has_the_reason_of_its_fault(self, matrix: Matrix, capsys: Any) -> None:
        failed = [("failed", reason) for reason in ("app_error", "oom_gpu", "oom_host", "telemetry_incomplete", "lost")]
        assert reasons(matrix["causes"], capsys) == failed

    def test_rerun_submits_only_what_may_succeed_unchanged(self, matrix: Matrix, capsys: Any) -> None:
        text = rerun_preview(matrix["causes"], capsys)
        for cause in ("app_error", "oom_gpu", "oom_host"):
            assert f"left alone: --only {cause} submits it" in line(text, f" {cause} ", "left alone")
        assert "submitted unchanged" in line(text, "telemetry_incomplete", "submitted")
        assert "submitted unchanged" in line(text, " lost ", "submitted")

    def test_gpu_oom_is_submitted_under_another_label_only(self, matrix: Matrix, capsys: Any) -> None:
        text = rerun_preview(matrix["causes"], capsys, "--only", "oom_gpu")
        assert "cpu+grad_checkpoint" in line(text, "reported under that label")

    def test_host_oom_is_submitted_with_more_memory(self, matrix: Matrix, capsys: Any) -> None:
        text = rerun_preview(matrix["causes"], capsys, "--only", "oom_host")
        assert "mem_gb=464" in line(text, "host memory of 464 G instead of 232")
        assert "--mem=464G" in next((matrix["causes"] / "sbatch").glob("*.sh")).read_text()

    @pytest.mark.parametrize("cause", ["sidecar_killed", "killed"])
    def test_kill_within_a_part_loses_at_most_five_seconds(self, matrix: Matrix, cause: str) -> None:
        point = CAUSES.index(cause)
        (mark,) = (matrix["causes"] / "marks").glob(f"{cause}.{point}")
        assert lost_s(matrix["causes"] / str(point) / "attempt-1", int(mark.read_text()) * 1e-9) < LOST_S

    def test_clock_jump_does_not_end_the_run_but_invalidates_it_with_a_reason(
        self, matrix: Matrix, tmp_path: Path, capsys: Any
    ) -> None:
        assert reasons(matrix["jump"], capsys) == [("completed", None)]
        assert nothing_to_submit(matrix["jump"], capsys)
        assert app.main(["merge", str(matrix["jump"]), "-o", str(tmp_path)]) == 0
        run = pl.read_parquet(tmp_path / "runs.parquet").row(0, named=True)
        assert not run["valid"]
        assert "clock jump" in run["invalid_reason"]


class TestSlurmFaults:
    def test_scancel_and_cancel_both_give_the_reason_cancelled(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["stopped"], capsys) == [("failed", "cancelled")] * 3
        assert rerun_preview(matrix["stopped"], capsys).count("submitted unchanged") == 3

    def test_failed_node_is_excluded(self, matrix: Matrix, capsys: Any) -> None:
        node = matrix.observed["node"]
        assert reasons(matrix["node"], capsys) == [("failed", "node_fail")]
        assert f"sites.grace.exclude_nodes=[{node}]" in line(
            rerun_preview(matrix["node"], capsys), f"node {node} excluded"
        )
        assert f"#SBATCH --exclude={node}\n" in next((matrix["node"] / "sbatch").glob("*.sh")).read_text()

    def test_node_failure_loses_at_most_five_seconds_of_telemetry(self, matrix: Matrix) -> None:
        assert lost_s(matrix["node"] / "0" / "attempt-1", matrix.observed["node_died"]) < LOST_S

    def test_job_that_slurm_requeues_after_a_node_failure_completes(self, matrix: Matrix, capsys: Any) -> None:
        (point,) = status_points(matrix["moved"], capsys)
        assert (point["state"], point["attempt"]) == ("completed", 1)
        (before,) = starts(matrix["moved"])
        assert (before["slurm"]["node"], before["status"]) == (matrix.observed["node"], "running")
        assert nothing_to_submit(matrix["moved"], capsys)

    def test_requeued_job_completes_in_its_run_directory(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["requeued"], capsys) == [("completed", None)] * 2
        assert {point["attempt"] for point in status_points(matrix["requeued"], capsys)} == {1}
        for point in range(2):
            assert manifest(matrix["requeued"], point)["slurm"]["restart_count"] == 1
            (before,) = starts(matrix["requeued"], point)
            assert before["slurm"]["requeued"]  # else it would be submitted again while Slurm does not answer
        assert nothing_to_submit(matrix["requeued"], capsys)

    def test_requeued_job_loses_no_step_and_counts_none_twice(self, matrix: Matrix, tmp_path: Path) -> None:
        assert [number for number, _ in losses(matrix["requeued"], 1)] == list(range(STEPS))
        assert app.main(["merge", str(matrix["requeued"]), "-o", str(tmp_path)]) == 0
        windows = pl.read_parquet(tmp_path / "windows.parquet").filter(pl.col("kind") == "measure")
        runs = pl.read_parquet(tmp_path / "runs.parquet").sort("point")
        assert runs["valid"].to_list() == [True, True], runs["invalid_reason"].to_list()
        benchmark = windows.filter(pl.col("run_id") == runs["run_id"][0])
        assert benchmark["status"].to_list().count("completed") == 1
        assert set(benchmark["status"]) == {"completed", "interrupted"}

    def test_missing_module_gives_the_reason_never_started(self, matrix: Matrix, capsys: Any) -> None:
        """Its folder name has shell characters, so its rerun also tests the quoting."""
        assert reasons(matrix["module"], capsys) == [("failed", "never_started")]
        assert "submitted unchanged" in rerun_preview(matrix["module"], capsys)

    def test_telemetry_is_complete_after_every_kind_of_termination(self, matrix: Matrix) -> None:
        """Namely scancel, requeue, pre-emption and time limit."""
        for name in ("stopped", "requeued", "preempted", "taken", "late", "twice_late", "limited"):
            for file in matrix[name].glob("*/attempt-1/manifest*.json"):
                assert json.loads(file.read_text())["telemetry"]["status"] == "complete", file


class TestFullDisk:
    def test_is_the_message_and_is_not_resubmitted_without_only(self, matrix: Matrix, capsys: Any) -> None:
        (point,) = status_points(matrix["disk"].resolve(), capsys)
        assert (point["state"], point["reason"]) == ("failed", "app_error")
        assert "No space left on device" in point["message"]
        assert "left alone: --only app_error submits it" in rerun_preview(matrix["disk"].resolve(), capsys)

    def test_closed_parts_stay_readable(self, matrix: Matrix) -> None:
        run_dir = matrix["disk"].resolve() / "0" / "attempt-1"
        (ballast,) = (matrix["disk"].resolve() / "marks").glob("ballast.*")
        (mark,) = (matrix["disk"].resolve() / "marks").glob("disk_full.*")
        ballast.unlink()
        assert lost_s(run_dir, int(mark.read_text()) * 1e-9) < LOST_S
