"""Jobs of several ranks: srun starts them, on one node and on two; they end together, whatever ends one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from analysis.dataset import open_dataset
from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.files import read_json
from launchers.sweep.ledger import Ledger
from tests.testbed.bed import Bed

from .support import ROOT, losses, manifest, reasons, slurm_state, starts, wait_for_restart, wait_for_step

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SWEEP = ("-m", "profile=testbed", "gpus=2", "batch=2", "data.num_images=32")


@pytest.fixture(autouse=True)
def _environment(testbed: Bed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INPAINT_BENCH_TESTBED", str(testbed.state))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    for site in ("delta", "grace"):
        testbed.run(site, "scancel", "--me")


def submit(folder: Path, *overrides: str) -> Path:
    assert launch.main([*SWEEP, *overrides, f'hydra.sweep.dir="{folder}"']) == 0
    return folder


def test_ranks_of_both_sites_complete(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    one_node = submit(tmp_path / "one", "gpu=a40,a100", "wait=true")
    assert reasons(one_node, capsys) == [("completed", None)] * 2
    for point in (0, 1):
        found = manifest(one_node, point)
        assert [rank["local_rank"] for rank in found["ranks"]] == [0, 1]
        assert len({rank["pid"] for rank in found["ranks"]}) == 2
        assert len(found["devices"]) == 2
    assert app.main(["merge", str(one_node), "-o", str(tmp_path / "merged")]) == 0
    runs = pl.read_parquet(tmp_path / "merged" / "runs.parquet")
    assert runs["valid"].to_list() == [True, True], runs["invalid_reason"].to_list()
    assert runs["gpus"].to_list() == [2, 2]


def test_each_node_of_a_run_has_its_own_telemetry(testbed: Bed, tmp_path: Path, capsys: Any) -> None:
    folder = submit(tmp_path / "sweep", "gpu=a100", "site=delta", "nodes=2", "wait=true")
    assert reasons(folder, capsys) == [("completed", None)]
    found = manifest(folder)
    assert (found["gpus"], found["nodes"]) == (4, 2)
    assert [rank["local_rank"] for rank in found["ranks"]] == [0, 1, 0, 1]
    reports = [read_json(path) for path in sorted((folder / "0" / "attempt-1").rglob("telemetry.json"))]
    assert [report["status"] for report in reports] == ["complete"] * 2
    sampled = [device["uuid"] for report in reports for device in report["devices"]]
    assert sorted(sampled) == sorted(device["uuid"] for device in found["devices"])
    assert len(set(sampled)) == 4
    assert app.main(["merge", str(folder), "-o", str(tmp_path / "merged")]) == 0
    run = pl.read_parquet(tmp_path / "merged" / "runs.parquet").row(0, named=True)
    assert run["valid"], run["invalid_reason"]
    assert (run["gpus"], run["nodes"]) == (4, 2)
    one = submit(tmp_path / "one", "gpu=a100", "site=delta", "wait=true", "gpus=1")
    assert app.main(["merge", str(folder), str(one), "-o", str(tmp_path / "both")]) == 0
    assert app.main(["report", str(tmp_path / "both"), "-o", str(tmp_path / "report")]) == 0
    assert "Scaling over GPUs" in (tmp_path / "report" / "report.md").read_text()
    dataset = open_dataset(tmp_path / "both")
    window = dataset.windows.filter(run_id=run["run_id"], kind="measure").row(0, named=True)
    inside = pl.col("t_mono_ns").is_between(window["t_start_mono_ns"], window["t_end_mono_ns"])
    samples = dataset.scan("samples_fast", run["run_id"]).filter(inside).collect()
    cards = samples.group_by("gpu_uuid").agg(pl.col("power_instant_w").mean())
    assert cards.height == 4
    assert run["power_w"] == pytest.approx(cards["power_instant_w"].sum(), rel=0.3)


@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_killed_rank_fails_its_job_with_the_reason(
    testbed: Bed, tmp_path: Path, capsys: Any, nodes: int, rank: int
) -> None:
    place = ("gpu=a100", "site=delta", f"gpus={3 - nodes}", f"nodes={nodes}")
    folder = submit(tmp_path / "sweep", *place, "workload.min_measure_s=900")
    wait_for_step(testbed, folder, 3)
    pids = [one["pid"] for one in manifest(folder)["ranks"]]
    os.kill(pids[rank], signal.SIGKILL)
    testbed.wait(
        lambda: reasons(folder, capsys) == [("failed", "app_error")], timeout_s=180, what="Slurm to record the failure"
    )
    message = manifest(folder)["message"]
    assert message.startswith(f"rank {rank} (process {pids[rank]} on "), message
    assert message.endswith("ended without a message, by SIGKILL"), message
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("nodes", [1, 2])
def test_preempted_training_resumes_with_all_its_ranks(testbed: Bed, tmp_path: Path, capsys: Any, nodes: int) -> None:
    training = ("gpu=a100", "site=delta", "workload.train_steps=200", f"gpus={3 - nodes}", f"nodes={nodes}")
    partition = ("sites.delta.gpus.a100.partition=gpuA100x4-preempt",)
    partition += ("sites.delta.exclude_nodes=[gpua002]",) if nodes == 1 else ()
    folder = submit(tmp_path / "cut", *training, *partition)
    wait_for_step(testbed, folder, 20)
    (record,) = Ledger.open(folder).points().values()
    assert record.last
    assert record.last.job_id
    job = record.last.job_id
    request = ("-p", "gpuA100x4", "-w", "gpua001", "-c", "64", "--mem=1G", "--time=1", "-o", "/dev/null")
    testbed.run("delta", "sbatch", *request, "--wrap", "sleep 1")
    testbed.wait(lambda: slurm_state(testbed, "delta", job) == "PENDING", what="a pre-emption")
    wait_for_restart(testbed, "delta", job)
    testbed.wait(lambda: reasons(folder, capsys) == [("completed", None)], timeout_s=300, what="the training to end")
    (first,) = starts(folder)
    assert (first["reason"], manifest(folder)["resumed"][0]["step"]) == ("preempted", first["progress"]["step"])
    undisturbed = submit(tmp_path / "whole", *training, "wait=true")
    assert losses(folder) == losses(undisturbed)
    assert len(losses(folder)) == 200
    assert app.main(["merge", str(folder), "-o", str(tmp_path / "merged")]) == 0
    run = pl.read_parquet(tmp_path / "merged" / "runs.parquet").row(0, named=True)
    assert run["valid"], run["invalid_reason"]
    assert (run["gpus"], run["nodes"], run["resumed_from_step"] is not None) == (2, nodes, True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_divided_states_compute_what_undivided_ones_do(testbed: Bed, tmp_path: Path, capsys: Any, nodes: int) -> None:
    place = ("gpu=a100", "site=delta", f"gpus={3 - nodes}", f"nodes={nodes}")
    folder = submit(tmp_path / "sweep", *place, "recipe.sharding=none,zero1,fsdp2,tensor", "wait=true")
    assert reasons(folder, capsys) == [("completed", None)] * 4
    runs = [manifest(folder, point) for point in range(4)]
    for run in runs:
        # Nodes of the test bed have one host name.
        assert [rank["local_rank"] for rank in run["ranks"]] == ([0, 1] if nodes == 1 else [0, 0])
    levers = [{lever["name"]: lever["active"] for lever in run["levers"]} for run in runs[1:]]
    assert levers == [{"zero1": True}, {"fsdp2": True}, {"tensor": True}]
    undivided, *divided = ([loss for _, loss in losses(folder, point)] for point in range(4))
    for sharded in divided:
        steps = min(len(sharded), len(undivided))  # as many as fit in the time of a window
        assert steps > 5
        assert sharded[:steps] == pytest.approx(undivided[:steps], rel=1e-5)
