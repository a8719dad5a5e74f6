"""Sweeps of the faulty workload on the bed, and what is asked of them afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from inpaint_bench import launch, status
from tests.testbed.bed import Bed

ROOT = Path(__file__).parents[2]
WORKLOAD = (
    "profile=testbed",
    "workload.module=tests.faults.workload",
    "workload.learning_rate=0.01",
    "workload.warmup_steps=1",
    "workload.measure_steps=2",
    "batch=2",
)
LONG = "workload.min_measure_s=900"
SHORT = "workload.min_measure_s=1"


def send(folder: Path, *overrides: str) -> Path:
    """Submit a sweep and return at once."""
    assert launch.main(["-m", *WORKLOAD, *overrides, f'hydra.sweep.dir="{folder}"']) == 0
    return folder


def told(folder: Path, capsys: Any) -> list[dict[str, Any]]:
    """What `status` says, point by point."""
    capsys.readouterr()
    assert status.main([str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    points: list[dict[str, Any]] = answer["points"] if isinstance(answer, dict) else answer
    return points


def manifest(folder: Path, point: int = 0, attempt: int = 1) -> dict[str, Any]:
    """Of an attempt; empty before it began."""
    try:
        content: dict[str, Any] = json.loads((folder / str(point) / f"attempt-{attempt}" / "manifest.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def step(folder: Path, point: int = 0, attempt: int = 1) -> int:
    return int((manifest(folder, point, attempt).get("progress") or {}).get("step") or 0)


def reached(bed: Bed, folder: Path, steps: int, point: int = 0, *, restarts: int = 0) -> None:
    """The point's first attempt is at this step, after so many starts by Slurm."""

    def there() -> bool:
        slurm = manifest(folder, point).get("slurm") or {}
        return (slurm.get("restart_count") or 0) == restarts and step(folder, point) >= steps

    bed.wait(there, timeout_s=180, what=f"step {steps} of point {point} in {folder}")


def slurm_state(bed: Bed, site: str, job_id: str) -> str:
    """As slurmctld has it now."""
    return bed.run(site, "squeue", "-h", "-r", "-t", "all", "-j", job_id, "-o", "%T").stdout.strip()


def started_again(bed: Bed, site: str, job_id: str) -> None:
    """A requeued job starts now and not after Slurm's two minutes."""

    def running() -> bool:
        bed.nudge(site)
        return slurm_state(bed, site, job_id) == "RUNNING"

    bed.wait(running, timeout_s=120, what=f"{job_id} to start again")
    time.sleep(0.2)


def losses(folder: Path, point: int = 0, attempt: int = 1) -> list[tuple[int, float]]:
    """Every row that was written, in order of steps."""
    rows = pq.read_table(folder / str(point) / f"attempt-{attempt}" / "steps", columns=["step", "loss"]).to_pylist()
    return sorted((row["step"], row["loss"]) for row in rows)
