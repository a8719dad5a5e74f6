"""Jobs of three points: a point, the job or the node ends early, a time limit, a pre-emption, a cancelled point."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.cli import app
from launchers.sweep.ledger import Ledger
from tests.launchers.over_ssh import launch_sweep, queued_jobs, states_of
from tests.testbed.bed import Bed
from tests.testbed.ssh import LoginNodes

from .support import (
    LONG,
    ROOT,
    SHORT,
    manifest,
    nothing_to_submit,
    reasons,
    rerun_preview,
    slurm_state,
    status_points,
    submit_sweep,
    wait_for_restart,
    wait_for_step,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
BLOCK = ("points_per_job=3", "seed=0,1,2", "time_min=5")
DONE = ("completed", None)


def jobs_of(folder: Path) -> set[str]:
    """Return the ids of the jobs of a sweep."""
    return {str(record.last.job_id) for record in Ledger.open(folder).points().values() if record.last}


def job_of(folder: Path) -> str:
    """Return the id of the only job of a sweep."""
    (job,) = jobs_of(folder)
    return job


def wait_until_ended(bed: Bed, site: str, folder: Path) -> None:
    def ended() -> bool:
        return not {slurm_state(bed, site, job) for job in jobs_of(folder)} & {"PENDING", "RUNNING", "COMPLETING"}

    bed.wait(ended, timeout_s=300, what="an end")


@pytest.fixture(scope="module")
def folder(testbed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Submit all sweeps, cause their faults, and wait until their jobs have ended."""
    root, bed = tmp_path_factory.mktemp("blocks"), testbed
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
        patch.setenv("PYTHONPATH", str(ROOT))
        late = ("points_per_job=3", "seed=0,1,2", "time_min=1", "workload.min_measure_s=100")
        submit_sweep(root / "limited", "gpu=h200", *late)
        submit_sweep(root / "stopped", "gpu=h200", *BLOCK, LONG)
        submit_sweep(root / "killed", "gpu=h200", *BLOCK, "workload.min_measure_s=15")
        submit_sweep(root / "cancelled", "gpu=h200", *BLOCK, "workload.min_measure_s=15")
        submit_sweep(root / "node", "gpu=a40", "site=grace", *BLOCK, "workload.min_measure_s=15")
        preemptible = ("sites.delta.gpus.a100.partition=gpuA100x4-preempt", "sites.delta.exclude_nodes=[gpua002]")
        submit_sweep(root / "preempted", "gpu=a100", "site=delta", *BLOCK, *preemptible, "workload.train_steps=60")

        wait_for_step(bed, root / "killed", 1)
        worker = rf"^\S*python\S* -u -m launchers.entry {root / 'killed' / 'points'} 0.yaml"  # and not its srun
        subprocess.run(["pkill", "-KILL", "-f", worker], check=True)
        bed.wait(lambda: bool(manifest(root / "killed", 1)), timeout_s=120, what="the point after the killed one")
        assert app.main(["rerun", str(root / "killed")]) == 0  # while its job goes on
        wait_for_step(bed, root / "cancelled", 1)
        assert app.main(["cancel", str(root / "cancelled"), "--point", "0", "--point", "2"]) == 0
        wait_for_step(bed, root / "preempted", 10)
        request = ("-p", "gpuA100x4", "-w", "gpua001", "-c", "64", "--mem=1G", "--time=1", "-o", "/dev/null")
        bed.run("delta", "sbatch", *request, "--wrap", "sleep 1")
        bed.wait(lambda: slurm_state(bed, "delta", job_of(root / "preempted")) == "PENDING", what="a pre-emption")
        wait_for_restart(bed, "delta", job_of(root / "preempted"))
        wait_for_step(bed, root / "node", 1, point=1)
        node = manifest(root / "node", 1)["slurm"]["node"]
        bed.kill_node("grace", node)
        bed.start_node("grace", node)
        wait_for_restart(bed, "grace", job_of(root / "node"))
        wait_for_step(bed, root / "stopped", 1)
        bed.run("delta", "scancel", job_of(root / "stopped"))
        for name in ("limited", "stopped", "killed", "cancelled", "preempted"):
            wait_until_ended(bed, "delta", root / name)
        wait_until_ended(bed, "grace", root / "node")
        yield root


def test_killed_point_takes_none_with_it(folder: Path, capsys: Any) -> None:
    """And is submitted again while its job goes on."""
    assert reasons(folder / "killed", capsys) == [DONE] * 3
    attempts = [len(record.attempts) for record in Ledger.open(folder / "killed").points().values()]
    assert attempts == [2, 1, 1]
    assert manifest(folder / "killed")["status"] == "running"  # its process died


def test_cancelled_points_are_a_step_that_runs_and_one_that_never_starts(folder: Path, capsys: Any) -> None:
    assert reasons(folder / "cancelled", capsys) == [("failed", "cancelled"), DONE, ("failed", "cancelled")]
    assert manifest(folder / "cancelled")["status"] == "interrupted"  # it could end in order
    assert not (folder / "cancelled" / "2").exists()


def test_points_that_had_no_time_are_timeouts(folder: Path, capsys: Any) -> None:
    assert reasons(folder / "limited", capsys) == [DONE, ("failed", "timeout"), ("failed", "timeout")]
    assert rerun_preview(folder / "limited", capsys).count("time limit of 2 min instead of 1") == 2


def test_job_on_a_lost_node_is_requeued_and_goes_on(folder: Path, capsys: Any) -> None:
    assert reasons(folder / "node", capsys) == [DONE] * 3
    assert [bool(manifest(folder / "node", point)["slurm"].get("restart_count")) for point in range(3)] == [
        False,
        True,
        True,
    ]
    assert nothing_to_submit(folder / "node", capsys)


def test_pre_empted_job_goes_on_with_the_point_that_it_trained(folder: Path, capsys: Any) -> None:
    assert reasons(folder / "preempted", capsys) == [DONE] * 3
    assert manifest(folder / "preempted")["resumed"]
    assert not manifest(folder / "preempted", 1).get("resumed")


def test_all_points_of_a_cancelled_job_are_cancelled(folder: Path, capsys: Any) -> None:
    assert reasons(folder / "stopped", capsys) == [("failed", "cancelled")] * 3
    assert {point["job_id"] for point in status_points(folder / "stopped", capsys)} == {job_of(folder / "stopped")}


def test_runs_of_a_block_are_merged(testbed: Bed, tmp_path: Path, folder: Path, capsys: Any) -> None:
    sweep = submit_sweep(tmp_path / "sweep", "gpu=h200", *BLOCK, SHORT)
    wait_until_ended(testbed, "delta", sweep)
    capsys.readouterr()
    assert app.main(["merge", str(sweep), "-o", str(tmp_path / "dataset")]) == 0
    assert "runs merged: 3, valid: 3" in capsys.readouterr().out


def test_job_of_several_points_over_ssh(login_nodes: LoginNodes, tmp_path: Path, capsys: Any) -> None:
    sweep = tmp_path / "sweep"
    block = ("gpu=h200", "batch=2,3,4", "points_per_job=3", "workload.min_measure_s=8")
    assert launch_sweep(login_nodes, sweep, *block) == 0
    assert len(queued_jobs(login_nodes, sweep)) == 1
    login_nodes.bed.wait(lambda: states_of(sweep, capsys)[0] == "running", timeout_s=120, what="the first point")
    assert app.main(["cancel", str(sweep), "--point", "1"]) == 0
    ends = [DONE, ("failed", "cancelled"), DONE]
    login_nodes.bed.wait(lambda: reasons(sweep, capsys) == ends, timeout_s=200, what="the three ends")
    assert app.main(["collect", str(sweep)]) == 0
    assert reasons(sweep, capsys) == ends
