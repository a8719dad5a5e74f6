"""Sweeps whose jobs meet every fault, all of them concurrently, and what was observed meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.cli import app
from launchers.sweep.ledger import Ledger
from tests.testbed.bed import Bed

from .support import LONG, manifest, slurm_state, submit_sweep, wait_for_restart, wait_for_step

CAUSES = ("app_error", "oom_gpu", "oom_host", "sidecar_killed", "killed")
STEPS = 160  # of a training that is pre-empted
LIMITED_STEPS = 440  # of one that hits its time limit: 110 s and more, where it is warned after 78 to 108 s
HOSTILE = "it's $HOME; `id` *"  # a folder name that sbatch and two shells must not interpret


@dataclass
class Matrix:
    """Every sweep by name, and what was observed while the faults happened."""

    folder: Path
    bed: Bed
    observed: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        return self.folder / (HOSTILE if name == "module" else name)

    def wait_until_ended(self) -> None:
        """Wait until no job is queued or running, and sacct has recorded it."""
        self.bed.wait(lambda: not self._has_jobs(), timeout_s=300, what="all jobs to end")
        time.sleep(3)

    def _has_jobs(self) -> bool:
        for site in self.bed.sites:
            self.bed.nudge(site)
        return any(self.bed.run(site, "squeue", "-h").stdout.strip() for site in self.bed.sites)


def cause_faults(matrix: Matrix, disk: Path) -> Matrix:
    """Submit all sweeps and cause the faults while they run. `disk` is a small file system."""
    bed = matrix.bed
    _submit_all(matrix, disk)
    jobs = {name: _jobs(matrix[name]) for name in ("stopped", "preempted", "requeued")}

    # First what ends by itself soon: on a busy machine it would be done before its fault.
    for point in range(2):
        wait_for_step(bed, matrix["requeued"], 12, point)
        bed.run("delta", "scontrol", "requeue", jobs["requeued"][point])
    for point in range(3):
        wait_for_step(bed, matrix["stopped"], 1, point)
    bed.run("delta", "scancel", jobs["stopped"][0])
    for name in ("node", "moved"):
        wait_for_step(bed, matrix[name], 1)
    bed.run("grace", "scontrol", "update", "nodename=gr02", "state=resume")
    matrix.observed["node"] = manifest(matrix["node"])["slurm"]["node"]
    matrix.observed["node_died"] = time.time()
    bed.kill_node("grace", matrix.observed["node"])
    wait_for_step(bed, matrix["taken"], 20)
    for restarts in range(3):
        wait_for_step(bed, matrix["preempted"], 20 * (restarts + 1), restarts=restarts)
        _preempt(matrix, jobs["preempted"][0])
    bed.start_node("grace", matrix.observed["node"])
    assert app.main(["cancel", str(matrix["stopped"])]) == 0
    matrix.wait_until_ended()
    return matrix


def _submit_all(matrix: Matrix, disk: Path) -> None:
    train, limited = f"workload.train_steps={STEPS}", f"workload.train_steps={LIMITED_STEPS}"
    other_node = "sites.delta.exclude_nodes=[gpua001]"  # not that of the pre-empted jobs
    warned = ("time_min=2", "rerun.timeout.warn_s=12")
    submit_sweep(matrix["limited"], "gpu=a100", "site=delta", limited, other_node, *warned)
    submit_sweep(matrix["late"], "gpu=a40", "site=delta", "time_min=1", LONG)
    one_requeue = ("workload.train_steps=100000", "rerun.timeout.requeues=1")
    submit_sweep(matrix["twice_late"], "gpu=a40", "site=delta", "time_min=1", *one_requeue)
    submit_sweep(matrix["causes"], "gpu=h200", f"workload.name={','.join(CAUSES)}", "workload.min_measure_s=12")
    submit_sweep(matrix["stopped"], "gpu=h200", "seed=0,1,2", LONG)
    submit_sweep(matrix["undisturbed"], "gpu=a100", "site=delta", limited, other_node)
    # Longer than the other submissions take on a busy machine: it is requeued after them.
    submit_sweep(
        matrix["requeued"], "gpu=a40", "site=delta", f"workload.train_steps=null,{STEPS}", "workload.min_measure_s=60"
    )
    matrix.bed.run("grace", "scontrol", "update", "nodename=gr02", "state=drain", "reason=one node for both")
    submit_sweep(matrix["node"], "gpu=a100", "site=grace", LONG, "sites.grace.requeue.request=false")
    submit_sweep(matrix["moved"], "gpu=a100", "site=grace", "workload.min_measure_s=60")
    submit_sweep(matrix["module"], "gpu=a40", "site=grace", "sites.grace.environment.modules=[no/such/module]")
    submit_sweep(matrix["jump"], "gpu=a40", "site=grace", "workload.name=clock_jump", "workload.min_measure_s=12")
    (matrix.folder / "disk").symlink_to(disk / "sweep")
    submit_sweep(disk / "sweep", "gpu=a40", "site=grace", "workload.name=disk_full", "workload.min_measure_s=15")
    # last: on a busy machine they would have ended before their node is requested
    preemptible = ("sites.delta.gpus.a100.partition=gpuA100x4-preempt", "sites.delta.exclude_nodes=[gpua002]")
    submit_sweep(matrix["preempted"], "gpu=a100", "site=delta", train, *preemptible)
    submit_sweep(matrix["taken"], "gpu=a100", "site=delta", train, *preemptible, "sites.delta.requeue.request=false")


def _preempt(matrix: Matrix, job: str) -> None:
    """Request the whole node in a partition of higher priority; the job restarts when the node is free."""
    request = ("-p", "gpuA100x4", "-w", "gpua001", "-c", "64", "--mem=1G", "--time=1", "-o", "/dev/null")
    matrix.bed.run("delta", "sbatch", *request, "--wrap", "sleep 1")
    matrix.bed.wait(lambda: slurm_state(matrix.bed, "delta", job) == "PENDING", what="a pre-emption")
    matrix.observed.setdefault("preempted", []).append(manifest(matrix["preempted"]))
    wait_for_restart(matrix.bed, "delta", job)


def _jobs(folder: Path) -> list[str]:
    return [str(record.last.job_id) for record in Ledger.open(folder).points().values() if record.last]
