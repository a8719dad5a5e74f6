"""What ends jobs on a cluster: what `status` then says, and what `rerun` makes of it. All of it happens at once."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from inpaint_bench import cancel, merge, rerun
from inpaint_bench.telemetry.recover import recover
from tests.testbed.bed import Bed

from .support import LONG, ROOT, SHORT, losses, manifest, reached, send, slurm_state, started_again, step, told

pytestmark = [pytest.mark.faults, pytest.mark.testbed, pytest.mark.timeout(900)]

CAUSES = ("app_error", "oom_gpu", "oom_host", "sidecar_killed", "killed")
STEPS = 160
LOST_S = 5.0  # of telemetry, at most
HOSTILE = "it's $HOME; `id` *"  # a folder that sbatch and two shells have to take as it is


@dataclass
class Matrix:
    """Every sweep by name, and what was said of it while the faults happened."""

    folder: Path
    bed: Bed
    seen: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        return self.folder / (HOSTILE if name == "module" else name)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 24 MiB: room for the code and some parts."""
    mount = tmp_path_factory.mktemp("disk")
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)]).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="module")
def matrix(testbed: Bed, tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield _happen(Matrix(folder, testbed), disk)


def _happen(matrix: Matrix, disk: Path) -> Matrix:
    """All sweeps are sent, and while they run, what can befall them does."""
    bed, train = matrix.bed, f"workload.train_steps={STEPS}"
    send(matrix["late"], "gpu=a40", "site=delta", "time_min=1", "workload.train_steps=null,100000", LONG)
    send(matrix["causes"], "gpu=h200", f"workload.name={','.join(CAUSES)}", "workload.min_measure_s=12")
    send(matrix["stopped"], "gpu=h200", "seed=0,1,2", LONG)
    send(matrix["alone"], "gpu=a100", "site=delta", train, "sites.delta.exclude_nodes=[gpua001]")
    preemptible = ("sites.delta.gpus.a100.partition=gpuA100x4-preempt", "sites.delta.exclude_nodes=[gpua002]")
    send(matrix["preempted"], "gpu=a100", "site=delta", train, *preemptible)
    send(matrix["requeued"], "gpu=a40", "site=delta", f"workload.train_steps=null,{STEPS}", "workload.min_measure_s=20")
    send(matrix["node"], "gpu=a100", "site=grace", LONG)
    send(matrix["module"], "gpu=a40", "site=grace", "sites.grace.environment.modules=[no/such/module]")
    disk_sweep = disk / "sweep"
    (matrix.folder / "disk").symlink_to(disk_sweep)
    send(disk_sweep, "gpu=a40", "site=grace", "workload.name=disk_full", "workload.min_measure_s=15")
    jobs = {name: _jobs(matrix[name]) for name in ("stopped", "preempted", "requeued", "node")}

    for point in range(3):
        reached(bed, matrix["stopped"], 1, point)
    bed.run("delta", "scancel", jobs["stopped"][0])
    reached(bed, matrix["node"], 1)
    matrix.seen["node"] = manifest(matrix["node"])["slurm"]["node"]
    matrix.seen["node_died"] = time.time()
    bed.kill_node("grace", matrix.seen["node"])
    for point in range(2):
        reached(bed, matrix["requeued"], 12, point)
        bed.run("delta", "scontrol", "requeue", jobs["requeued"][point])
    for restarts in range(3):
        reached(bed, matrix["preempted"], 20 * (restarts + 1), restarts=restarts)
        wanted = ("-p", "gpuA100x4", "-w", "gpua001", "-c", "64", "--mem=1G", "--time=1", "-o", "/dev/null")
        bed.run("delta", "sbatch", *wanted, "--wrap", "sleep 1")
        (job,) = jobs["preempted"]
        bed.wait(lambda job=job: slurm_state(bed, "delta", job) == "PENDING", what="a pre-emption")  # type: ignore[misc]
        matrix.seen.setdefault("preempted", []).append(manifest(matrix["preempted"]))
        started_again(bed, "delta", job)
    bed.start_node("grace", matrix.seen["node"])
    assert cancel.main([str(matrix["stopped"])]) == 0
    bed.wait(lambda: not _held(bed), timeout_s=300, what="all jobs to end")
    time.sleep(3)  # sacct hears of it later
    return matrix


def _held(bed: Bed) -> bool:
    """Whether any job is queued or running."""
    for site in bed.sites:
        bed.nudge(site)
    return any(bed.run(site, "squeue", "-h").stdout.strip() for site in bed.sites)


def _jobs(folder: Path) -> list[str]:
    from launchers.record.ledger import Ledger

    return [str(record.last.job_id) for record in Ledger.open(folder).points().values() if record.last]


def reasons(folder: Path, capsys: Any) -> list[tuple[str, str | None]]:
    return [(point["state"], point["reason"]) for point in told(folder, capsys)]


def decided(folder: Path, capsys: Any, *arguments: str) -> str:
    """What a dry run of `rerun` says."""
    capsys.readouterr()
    assert rerun.main([str(folder), "--dry-run", *arguments]) == 0
    return str(capsys.readouterr().out)


def line(text: str, *words: str) -> str:
    """The one line of a table that holds all of the words."""
    (found,) = [one for one in text.splitlines() if all(word in one for word in words)]
    return found


def last_sample_unix_ns(run_dir: Path) -> int:
    return int(
        pl.scan_parquet(run_dir / "samples_fast" / "part-*.parquet").select(pl.col("t_unix_ns").max()).collect().item()
    )


class TestWhatTheApplicationDoes:
    def test_every_point_says_what_became_of_it(self, matrix: Matrix, capsys: Any) -> None:
        failed = [("failed", reason) for reason in ("app_error", "oom_gpu", "oom_host", "telemetry_incomplete", "lost")]
        assert reasons(matrix["causes"], capsys) == failed

    def test_rerun_sends_what_may_go_better_and_leaves_what_would_not(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys)
        for cause in ("app_error", "oom_gpu", "oom_host"):
            assert f"left alone: --only {cause} sends it" in line(text, f" {cause} ", "left alone")
        assert "sent as it was" in line(text, "telemetry_incomplete", "sent")
        assert "sent as it was" in line(text, " lost ", "sent")

    def test_out_of_gpu_memory_is_sent_under_another_label_only(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys, "--only", "oom_gpu")
        assert "cpu+grad_checkpoint" in line(text, "another point by its label")

    def test_out_of_host_memory_is_sent_with_more_of_it(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["causes"], capsys, "--only", "oom_host")
        assert "mem_gb=464" in line(text, "host memory of 464 G instead of 232")
        assert "--mem=464G" in next((matrix["causes"] / "sbatch").glob("*.sh")).read_text()

    @pytest.mark.parametrize("cause", ["sidecar_killed", "killed"])
    def test_a_kill_in_mid_part_costs_at_most_five_seconds(self, matrix: Matrix, cause: str) -> None:
        point = CAUSES.index(cause)
        (mark,) = (matrix["causes"] / "jobs").glob(f"*/{cause}.{point}")
        run_dir = matrix["causes"] / str(point) / "attempt-1"
        recover(run_dir)  # as merge reads it
        assert (int(mark.read_text()) - last_sample_unix_ns(run_dir)) * 1e-9 < LOST_S


class TestWhatSlurmDoes:
    def test_scancel_of_one_and_cancel_of_all_are_cancelled(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["stopped"], capsys) == [("failed", "cancelled")] * 3

    def test_a_time_limit_is_one_and_is_made_longer(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["late"], capsys) == [("failed", "timeout")] * 2
        text = decided(matrix["late"], capsys)
        assert "goes on from step-" in line(text, "time limit of 2 min instead of 1", "goes on")
        assert text.count("time limit of 2 min instead of 1") == 2

    def test_at_the_partitions_limit_only_what_can_go_on_is_sent(self, matrix: Matrix, capsys: Any) -> None:
        text = decided(matrix["late"], capsys, "sites.delta.gpus.a40.max_minutes=1")
        assert "it has the 1 min that gpuA40x4 allows, goes on from step-" in text
        asked = decided(matrix["late"], capsys, "--only", "timeout", "time_min=1")
        assert asked.count("time limit of 1 min, as said here") == 2

    def test_a_dead_node_is_named_and_avoided(self, matrix: Matrix, capsys: Any) -> None:
        node = matrix.seen["node"]
        assert reasons(matrix["node"], capsys) == [("failed", "node_fail")]
        assert f"sites.grace.exclude_nodes=[{node}]" in line(decided(matrix["node"], capsys), f"sent past {node}")
        assert f"#SBATCH --exclude={node}\n" in next((matrix["node"] / "sbatch").glob("*.sh")).read_text()

    def test_a_dead_node_takes_at_most_five_seconds_of_telemetry_along(self, matrix: Matrix) -> None:
        run_dir = matrix["node"] / "0" / "attempt-1"
        recover(run_dir)
        assert matrix.seen["node_died"] - last_sample_unix_ns(run_dir) * 1e-9 < LOST_S

    def test_a_job_that_slurm_requeued_completes_in_its_directory(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["requeued"], capsys) == [("completed", None)] * 2
        assert {point["attempt"] for point in told(matrix["requeued"], capsys)} == {1}
        for point in range(2):
            assert manifest(matrix["requeued"], point)["slurm"]["restart_count"] == 1
            assert (matrix["requeued"] / str(point) / "attempt-1" / "manifest.1.json").is_file()

    def test_of_a_requeued_job_nothing_is_lost_or_counted_twice(self, matrix: Matrix, tmp_path: Path) -> None:
        assert [number for number, _ in losses(matrix["requeued"], 1)] == list(range(STEPS))
        assert merge.main([str(matrix["requeued"]), "-o", str(tmp_path)]) == 0
        windows = pl.read_parquet(tmp_path / "windows.parquet").filter(pl.col("kind") == "measure")
        runs = pl.read_parquet(tmp_path / "runs.parquet").sort("point")
        assert runs["valid"].to_list() == [True, True], runs["invalid_reasons"].to_list()
        benchmark = windows.filter(pl.col("run_id") == runs["run_id"][0])
        assert benchmark["status"].to_list().count("completed") == 1
        assert set(benchmark["status"]) == {"completed", "interrupted"}

    def test_a_module_that_is_not_there_is_a_point_that_never_started(self, matrix: Matrix, capsys: Any) -> None:
        """In a folder whose name a shell would read, so that the job that heals it shows the quoting, too."""
        assert reasons(matrix["module"], capsys) == [("failed", "never_started")]
        assert "sent as it was" in decided(matrix["module"], capsys)


class TestPreemption:
    def test_each_time_it_was_told_apart_from_a_cancellation_and_requeued(self, matrix: Matrix) -> None:
        assert [left["reason"] for left in matrix.seen["preempted"]] == ["preempted"] * 3
        assert all("it goes on from step-" in left["message"] for left in matrix.seen["preempted"])
        assert all(left["slurm"]["requeued"] for left in matrix.seen["preempted"])

    def test_three_times_cut_the_losses_are_those_of_a_training_left_alone(self, matrix: Matrix, capsys: Any) -> None:
        assert reasons(matrix["preempted"], capsys) == [("completed", None)]
        assert [one["step"] > 0 for one in manifest(matrix["preempted"])["resumed"]] == [True] * 3
        assert losses(matrix["preempted"]) == losses(matrix["alone"])
        assert len(losses(matrix["alone"])) == STEPS


class TestAFullDisk:
    def test_is_the_reason_that_is_told(self, matrix: Matrix, capsys: Any) -> None:
        (point,) = told(matrix["disk"].resolve(), capsys)
        assert point["state"] == "failed"
        assert "No space left on device" in point["message"]

    def test_leaves_the_parts_that_were_closed_readable(self, matrix: Matrix) -> None:
        run_dir = matrix["disk"].resolve() / "0" / "attempt-1"
        (ballast,) = (matrix["disk"].resolve() / "jobs").glob("*/ballast.*")
        (mark,) = (matrix["disk"].resolve() / "jobs").glob("*/disk_full.*")
        ballast.unlink()
        recover(run_dir)
        assert (int(mark.read_text()) - last_sample_unix_ns(run_dir)) * 1e-9 < LOST_S


class TestTheNextCommand:
    """After all that, one `rerun` per sweep, and everything is done."""

    @pytest.fixture(scope="class")
    def healed(self, matrix: Matrix) -> Matrix:
        every = "app_error,oom,lost,telemetry_incomplete"
        assert rerun.main([str(matrix["causes"]), "--only", every, SHORT]) == 0
        assert rerun.main([str(matrix["stopped"]), SHORT]) == 0
        assert rerun.main([str(matrix["node"]), SHORT]) == 0
        assert rerun.main([str(matrix["module"]), SHORT, "sites.grace.environment.modules=[]"]) == 0
        fewer = f"workload.train_steps={max(step(matrix['late'], 1) + 4, 8)}"
        assert rerun.main([str(matrix["late"]), SHORT, fewer]) == 0
        matrix.bed.wait(lambda: not _held(matrix.bed), timeout_s=240, what="all jobs to end")
        time.sleep(3)
        return matrix

    def test_completes_every_point_as_a_second_attempt(self, healed: Matrix, capsys: Any) -> None:
        for name in ("causes", "stopped", "node", "module", "late"):
            assert {(p["state"], p["attempt"]) for p in told(healed[name], capsys)} == {("completed", 2)}, name
            assert rerun.main([str(healed[name])]) == 0
            assert "Nothing to send again" in capsys.readouterr().out

    def test_the_node_that_died_was_not_used(self, healed: Matrix) -> None:
        assert manifest(healed["node"], attempt=2)["slurm"]["node"] != healed.seen["node"]

    def test_what_ran_out_of_gpu_memory_has_another_label(self, healed: Matrix) -> None:
        point = CAUSES.index("oom_gpu")
        labels = [manifest(healed["causes"], point, attempt)["recipe"] for attempt in (1, 2)]
        assert labels == ["cpu", "cpu+grad_checkpoint"]
