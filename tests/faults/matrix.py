"""Sweeps to which everything happens that can befall a job, all of it at once, and what was seen meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.cli import app
from launchers.sweep.ledger import Ledger
from tests.testbed.bed import Bed

from .support import LONG, manifest, reached, send, slurm_state, started_again

CAUSES = ("app_error", "oom_gpu", "oom_host", "sidecar_killed", "killed")
STEPS = 160  # of a training that is pre-empted
LIMITED_STEPS = 440  # of one that its time limit cuts: 110 s and more, where it is warned after 78 to 108 s
HOSTILE = "it's $HOME; `id` *"  # a folder that sbatch and two shells have to take as it is


@dataclass
class Matrix:
    """Every sweep by name, and what was said of it while the faults happened."""

    folder: Path
    bed: Bed
    seen: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        return self.folder / (HOSTILE if name == "module" else name)

    def ended(self) -> None:
        """Wait until no job is queued or running, and sacct has heard of it."""
        self.bed.wait(lambda: not self._held(), timeout_s=300, what="all jobs to end")
        time.sleep(3)

    def _held(self) -> bool:
        for site in self.bed.sites:
            self.bed.nudge(site)
        return any(self.bed.run(site, "squeue", "-h").stdout.strip() for site in self.bed.sites)


def happen(matrix: Matrix, disk: Path) -> Matrix:
    """All sweeps are sent, and while they run, what can befall them does. `disk` is a small one."""
    bed = matrix.bed
    _send(matrix, disk)
    jobs = {name: _jobs(matrix[name]) for name in ("stopped", "preempted", "requeued")}

    for point in range(3):
        reached(bed, matrix["stopped"], 1, point)
    bed.run("delta", "scancel", jobs["stopped"][0])
    for name in ("node", "moved"):
        reached(bed, matrix[name], 1)
    bed.run("grace", "scontrol", "update", "nodename=gr02", "state=resume")
    matrix.seen["node"] = manifest(matrix["node"])["slurm"]["node"]
    matrix.seen["node_died"] = time.time()
    bed.kill_node("grace", matrix.seen["node"])
    for point in range(2):
        reached(bed, matrix["requeued"], 12, point)
        bed.run("delta", "scontrol", "requeue", jobs["requeued"][point])
    reached(bed, matrix["taken"], 20)
    for restarts in range(3):
        reached(bed, matrix["preempted"], 20 * (restarts + 1), restarts=restarts)
        _preempt(matrix, jobs["preempted"][0])
    bed.start_node("grace", matrix.seen["node"])
    assert app.main(["cancel", str(matrix["stopped"])]) == 0
    matrix.ended()
    return matrix


def _send(matrix: Matrix, disk: Path) -> None:
    train, limited = f"workload.train_steps={STEPS}", f"workload.train_steps={LIMITED_STEPS}"
    apart = "sites.delta.exclude_nodes=[gpua001]"  # from what is pre-empted
    warned = ("time_min=2", "rerun.timeout.warn_s=12")
    send(matrix["limited"], "gpu=a100", "site=delta", limited, apart, *warned)
    send(matrix["late"], "gpu=a40", "site=delta", "time_min=1", LONG)
    once = ("workload.train_steps=100000", "rerun.timeout.requeues=1")
    send(matrix["twice_late"], "gpu=a40", "site=delta", "time_min=1", *once)
    send(matrix["causes"], "gpu=h200", f"workload.name={','.join(CAUSES)}", "workload.min_measure_s=12")
    send(matrix["stopped"], "gpu=h200", "seed=0,1,2", LONG)
    send(matrix["alone"], "gpu=a100", "site=delta", limited, apart)
    send(matrix["requeued"], "gpu=a40", "site=delta", f"workload.train_steps=null,{STEPS}", "workload.min_measure_s=20")
    matrix.bed.run("grace", "scontrol", "update", "nodename=gr02", "state=drain", "reason=one node for both")
    send(matrix["node"], "gpu=a100", "site=grace", LONG, "sites.grace.requeue.request=false")
    send(matrix["moved"], "gpu=a100", "site=grace", "workload.min_measure_s=30")
    send(matrix["module"], "gpu=a40", "site=grace", "sites.grace.environment.modules=[no/such/module]")
    send(matrix["jump"], "gpu=a40", "site=grace", "workload.name=clock_jump", "workload.min_measure_s=12")
    (matrix.folder / "disk").symlink_to(disk / "sweep")
    send(disk / "sweep", "gpu=a40", "site=grace", "workload.name=disk_full", "workload.min_measure_s=15")
    # last: on a busy machine they would be done before somebody wants their node
    preemptible = ("sites.delta.gpus.a100.partition=gpuA100x4-preempt", "sites.delta.exclude_nodes=[gpua002]")
    send(matrix["preempted"], "gpu=a100", "site=delta", train, *preemptible)
    send(matrix["taken"], "gpu=a100", "site=delta", train, *preemptible, "sites.delta.requeue.request=false")


def _preempt(matrix: Matrix, job: str) -> None:
    """Somebody needs the whole node; the job starts again when it is free."""
    wanted = ("-p", "gpuA100x4", "-w", "gpua001", "-c", "64", "--mem=1G", "--time=1", "-o", "/dev/null")
    matrix.bed.run("delta", "sbatch", *wanted, "--wrap", "sleep 1")
    matrix.bed.wait(lambda: slurm_state(matrix.bed, "delta", job) == "PENDING", what="a pre-emption")
    matrix.seen.setdefault("preempted", []).append(manifest(matrix["preempted"]))
    started_again(matrix.bed, "delta", job)


def _jobs(folder: Path) -> list[str]:
    return [str(record.last.job_id) for record in Ledger.open(folder).points().values() if record.last]
