"""What ends jobs on a cluster: what `status` then says, and what `rerun` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from inpaint_bench.cli import app

from .matrix import CAUSES, STEPS, Matrix
from .support import LOST_S, decided, line, losses, lost_s, manifest, nothing_to_send, reasons, starts, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


class TestWhatTheApplicationDoes:
    def test_every_point_says_what_became_of_it(self, matrix: Matrix, capsys: Any) -> None:
        failed = [("failed", reason) for reason in ("app_error", "oom_gpu", "oom_host", "telemetry_incomplete", "lost")]
        assert reasons(matrix["causes"], capsys) == failed

    def test_rerun_sends_what_may_go_better_and_leaves_what_would_not(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys)
        for cause in ("app_error", "oom_gpu", "oom_host"):
            assert f"left alone: --only {cause} submits it" in line(text, f" {cause} ", "left alone")
        assert "submitted unchanged" in line(text, "telemetry_incomplete", "submitted")
        assert "submitted unchanged" in line(text, " lost ", "submitted")

    def test_out_of_gpu_memory_is_sent_under_another_label_only(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys, "--only", "oom_gpu")
        assert "cpu+grad_checkpoint" in line(text, "reported under that label")

    def test_out_of_host_memory_is_sent_with_more_of_it(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys, "--only", "oom_host")
        assert "mem_gb=464" in line(text, "host memory of 464 G instead of 232")
        assert "--mem=464G" in next((matrix["causes"] / "sbatch").glob("*.sh")).read_text()

    @pytest.mark.parametrize("cause", ["sidecar_killed", "killed"])
    def test_a_kill_in_mid_part_costs_at_most_five_seconds(self, matrix: Matrix, cause: str) -> None:
        point = CAUSES.index(cause)
        (mark,) = (matrix["causes"] / "jobs").glob(f"*/{cause}.{point}")
        assert lost_s(matrix["causes"] / str(point) / "attempt-1", int(mark.read_text()) * 1e-9) < LOST_S

    def test_a_clock_that_jumps_ends_nothing_and_what_it_spoilt_is_left_out_with_the_reason(
        self, matrix: Matrix, tmp_path: Path, capsys: Any
    ) -> None:
        assert reasons(matrix["jump"], capsys) == [("completed", None)]
        assert nothing_to_send(matrix["jump"], capsys)
        assert app.main(["merge", str(matrix["jump"]), "-o", str(tmp_path)]) == 0
        run = pl.read_parquet(tmp_path / "runs.parquet").row(0, named=True)
        assert not run["valid"]
        assert "clock jump" in run["invalid_reason"]


class TestWhatSlurmDoes:
    def test_scancel_of_one_and_cancel_of_all_are_cancelled(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["stopped"], capsys) == [("failed", "cancelled")] * 3
        assert decided(matrix["stopped"], capsys).count("submitted unchanged") == 3

    def test_a_dead_node_is_named_and_avoided(self, matrix: Matrix, capsys: Any) -> None:
        node = matrix.seen["node"]
        assert reasons(matrix["node"], capsys) == [("failed", "node_fail")]
        assert f"sites.grace.exclude_nodes=[{node}]" in line(decided(matrix["node"], capsys), f"node {node} excluded")
        assert f"#SBATCH --exclude={node}\n" in next((matrix["node"] / "sbatch").glob("*.sh")).read_text()

    def test_a_dead_node_takes_at_most_five_seconds_of_telemetry_along(self, matrix: Matrix) -> None:
        assert lost_s(matrix["node"] / "0" / "attempt-1", matrix.seen["node_died"]) < LOST_S

    def test_where_slurm_requeues_what_ran_on_a_dead_node_completes_without_anyone(
        self, matrix: Matrix, capsys: Any
    ) -> None:
        (point,) = told(matrix["moved"], capsys)
        assert (point["state"], point["attempt"]) == ("completed", 1)
        (before,) = starts(matrix["moved"])
        assert (before["slurm"]["node"], before["status"]) == (matrix.seen["node"], "running")
        assert nothing_to_send(matrix["moved"], capsys)

    def test_a_job_that_slurm_requeued_completes_in_its_directory(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["requeued"], capsys) == [("completed", None)] * 2
        assert {point["attempt"] for point in told(matrix["requeued"], capsys)} == {1}
        for point in range(2):
            assert manifest(matrix["requeued"], point)["slurm"]["restart_count"] == 1
            (before,) = starts(matrix["requeued"], point)
            assert before["slurm"]["requeued"]  # else, while Slurm is silent, it would be sent a second time
        assert nothing_to_send(matrix["requeued"], capsys)

    def test_of_a_requeued_job_nothing_is_lost_or_counted_twice(self, matrix: Matrix, tmp_path: Path) -> None:
        assert [number for number, _ in losses(matrix["requeued"], 1)] == list(range(STEPS))
        assert app.main(["merge", str(matrix["requeued"]), "-o", str(tmp_path)]) == 0
        windows = pl.read_parquet(tmp_path / "windows.parquet").filter(pl.col("kind") == "measure")
        runs = pl.read_parquet(tmp_path / "runs.parquet").sort("point")
        assert runs["valid"].to_list() == [True, True], runs["invalid_reason"].to_list()
        benchmark = windows.filter(pl.col("run_id") == runs["run_id"][0])
        assert benchmark["status"].to_list().count("completed") == 1
        assert set(benchmark["status"]) == {"completed", "interrupted"}

    def test_a_module_that_is_not_there_is_a_point_that_never_started(self, matrix: Matrix, capsys: Any) -> None:
        """In a folder whose name a shell would read, so that the job that heals it shows the quoting, too."""
        assert reasons(matrix["module"], capsys) == [("failed", "never_started")]
        assert "submitted unchanged" in decided(matrix["module"], capsys)

    def test_whoever_is_told_to_end_closes_its_telemetry(self, matrix: Matrix) -> None:
        """A scancel, a requeue, a pre-emption and a time limit cost none of it."""
        for name in ("stopped", "requeued", "preempted", "taken", "late", "twice_late", "limited"):
            for file in matrix[name].glob("*/attempt-1/manifest*.json"):
                assert json.loads(file.read_text())["telemetry"]["status"] == "complete", file


class TestAFullDisk:
    def test_is_the_reason_that_is_told_and_is_not_tried_again_by_itself(self, matrix: Matrix, capsys: Any) -> None:
        (point,) = told(matrix["disk"].resolve(), capsys)
        assert (point["state"], point["reason"]) == ("failed", "app_error")
        assert "No space left on device" in point["message"]
        assert "left alone: --only app_error submits it" in decided(matrix["disk"].resolve(), capsys)

    def test_leaves_the_parts_that_were_closed_readable(self, matrix: Matrix) -> None:
        run_dir = matrix["disk"].resolve() / "0" / "attempt-1"
        (ballast,) = (matrix["disk"].resolve() / "jobs").glob("*/ballast.*")
        (mark,) = (matrix["disk"].resolve() / "jobs").glob("*/disk_full.*")
        ballast.unlink()
        assert lost_s(run_dir, int(mark.read_text()) * 1e-9) < LOST_S
