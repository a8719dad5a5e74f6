"""A time limit and a pre-emption: what is saved, who starts it again, and that no loss is another for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from inpaint_bench.cli import app

from .matrix import LIMITED_STEPS, STEPS, Matrix
from .support import decided, line, losses, manifest, nothing_to_send, reasons, starts, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


class TestATimeLimit:
    @pytest.mark.parametrize("name", ["late", "twice_late"])
    def test_is_one_and_is_made_longer(self, matrix: Matrix, name: str, capsys: Any) -> None:
        assert reasons(matrix[name], capsys) == [("failed", "timeout")]
        told = line(decided(matrix[name], capsys), "time limit of 2 min instead of 1")
        assert ("goes on from step-" in told) == (name == "twice_late")

    def test_at_the_partitions_limit_only_what_can_go_on_is_sent(self, matrix: Matrix, capsys: Any) -> None:
        most = "sites.delta.gpus.a40.max_minutes=1"
        full = "it has the 1 min that gpuA40x4 allows"
        assert f"{full}, goes on from step-" in decided(matrix["twice_late"], capsys, most)
        assert f"{full}; there is no checkpoint to go on from" in decided(matrix["late"], capsys, most)
        asked = decided(matrix["late"], capsys, "--only", "timeout", "time_min=1")
        assert "time limit of 1 min, as said here" in asked

    def test_ends_a_benchmark(self, matrix: Matrix) -> None:
        assert starts(matrix["late"]) == []
        assert not manifest(matrix["late"])["slurm"].get("requeued")

    def test_requeues_a_training_no_more_often_than_it_may(self, matrix: Matrix) -> None:
        first, last = *starts(matrix["twice_late"]), manifest(matrix["twice_late"])
        assert first["message"].startswith("received SIGTERM; resumes from step-")
        assert [one["reason"] for one in (first, last)] == ["timeout"] * 2
        assert [one["slurm"].get("requeued") for one in (first, last)] == [True, None]
        assert last["progress"]["step"] > first["progress"]["step"] == last["resumed"][0]["step"]

    def test_that_is_much_too_short_leaves_the_losses_of_a_training_left_alone(
        self, matrix: Matrix, capsys: Any
    ) -> None:
        assert reasons(matrix["limited"], capsys) == [("completed", None)]
        cut = starts(matrix["limited"])
        assert cut, "it was to be cut at least once"
        assert all(one["message"].startswith("received SIGUSR2; resumes from step-") for one in cut)
        assert {(one["reason"], one["slurm"]["requeued"]) for one in cut} == {("timeout", True)}
        assert losses(matrix["limited"]) == losses(matrix["alone"])
        assert len(losses(matrix["alone"])) == LIMITED_STEPS
        assert nothing_to_send(matrix["limited"], capsys)

    def test_leaves_marks_on_what_was_measured_before_it(self, matrix: Matrix, tmp_path: Path) -> None:
        assert app.main(["merge", str(matrix["limited"]), "-o", str(tmp_path)]) == 0
        run = pl.read_parquet(tmp_path / "runs.parquet").row(0, named=True)
        assert run["valid"], run["invalid_reason"]
        measured = pl.read_parquet(tmp_path / "windows.parquet").filter(pl.col("kind") == "measure").to_dicts()
        cut = [window for window in measured if window["status"] == "interrupted"]
        assert len(cut) == len(starts(matrix["limited"]))
        assert all(window["flags"] == "requeued,interrupted" for window in cut)
        assert run["n_steps"] == sum(window["steps"] for window in measured) - sum(window["steps"] for window in cut)


class TestPreemption:
    def test_each_time_it_was_told_apart_from_a_cancellation_and_requeued(self, matrix: Matrix) -> None:
        assert [left["reason"] for left in matrix.seen["preempted"]] == ["preempted"] * 3
        assert all("resumes from step-" in left["message"] for left in matrix.seen["preempted"])
        assert all(left["slurm"]["requeued"] for left in matrix.seen["preempted"])

    def test_three_times_cut_the_losses_are_those_of_a_training_left_alone(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["preempted"], capsys) == [("completed", None)]
        assert [one["step"] > 0 for one in manifest(matrix["preempted"])["resumed"]] == [True] * 3
        assert losses(matrix["preempted"]) == losses(matrix["alone"])[:STEPS]
        assert nothing_to_send(matrix["preempted"], capsys)

    def test_where_the_site_does_not_requeue_it_is_a_reason_and_rerun_goes_on(
        self, matrix: Matrix, capsys: Any
    ) -> None:
        (point,) = told(matrix["taken"], capsys)
        assert (point["state"], point["reason"]) == ("failed", "preempted")
        assert "submitted unchanged" in decided(matrix["taken"], capsys)
