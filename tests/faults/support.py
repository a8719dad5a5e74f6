"""Submit sweeps of the faulty workload to the test bed, and read what they left."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.telemetry.storage.parts import recover_run
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
LOST_S = 5.0  # of telemetry, at most


def submit_sweep(folder: Path, *overrides: str) -> Path:
    """Submit a sweep and return at once."""
    assert launch.main(["-m", *WORKLOAD, *overrides, f'hydra.sweep.dir="{folder}"']) == 0
    return folder


def status_points(folder: Path, capsys: Any) -> list[dict[str, Any]]:
    """Return the points of `status --json`."""
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) != 2
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


def reasons(folder: Path, capsys: Any) -> list[tuple[str, str | None]]:
    """Return state and reason of each point, from `status`."""
    return [(point["state"], point["reason"]) for point in status_points(folder, capsys)]


def rerun_preview(folder: Path, capsys: Any, *arguments: str) -> str:
    """Return the output of a dry run of `rerun`."""
    capsys.readouterr()
    assert app.main(["rerun", str(folder), "--dry-run", *arguments]) == 0
    return str(capsys.readouterr().out)


def nothing_to_submit(folder: Path, capsys: Any) -> bool:
    """Run `rerun`, and return whether it submits nothing."""
    capsys.readouterr()
    assert app.main(["rerun", str(folder)]) == 0
    return "Nothing to submit" in capsys.readouterr().out


def line(text: str, *parts: str) -> str:
    """Return the only line of a table that contains all parts."""
    (match,) = [row for row in text.splitlines() if all(part in row for part in parts)]
    return match


def lost_s(run_dir: Path, since_unix_s: float) -> float:
    """Return the seconds from the last sample that merge can read to this moment."""
    recover_run(run_dir)  # as merge reads it
    parts = pl.scan_parquet(run_dir / "samples_fast" / "part-*.parquet")
    return since_unix_s - int(parts.select(pl.col("t_unix_ns").max()).collect().item()) * 1e-9


def manifest(folder: Path, point: int = 0, attempt: int = 1) -> dict[str, Any]:
    """Return the manifest of an attempt; empty before it started."""
    try:
        content: dict[str, Any] = json.loads((folder / str(point) / f"attempt-{attempt}" / "manifest.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def starts(folder: Path, point: int = 0) -> list[dict[str, Any]]:
    """Return the manifests of the earlier starts of a requeued first attempt, oldest first."""
    files = (folder / str(point) / "attempt-1").glob("manifest.*.json")
    return [json.loads(file.read_text()) for file in sorted(files)]


def step(folder: Path, point: int = 0, attempt: int = 1) -> int:
    """Return the last step that the manifest has."""
    return int((manifest(folder, point, attempt).get("progress") or {}).get("step") or 0)


def wait_for_step(bed: Bed, folder: Path, steps: int, point: int = 0, *, restarts: int = 0) -> None:
    """Wait until the point's first attempt is at this step, restarted so often by Slurm."""

    def is_at_step() -> bool:
        slurm = manifest(folder, point).get("slurm") or {}
        return (slurm.get("restart_count") or 0) == restarts and step(folder, point) >= steps

    bed.wait(is_at_step, timeout_s=180, what=f"step {steps} of point {point} in {folder}")


def slurm_state(bed: Bed, site: str, job_id: str) -> str:
    """Return the job's state, from slurmctld."""
    return bed.run(site, "squeue", "-h", "-r", "-t", "all", "-j", job_id, "-o", "%T").stdout.strip()


def wait_for_restart(bed: Bed, site: str, job_id: str) -> None:
    """Start a requeued job now and not after Slurm's two minutes."""

    def running() -> bool:
        bed.nudge(site)
        return slurm_state(bed, site, job_id) == "RUNNING"

    bed.wait(running, timeout_s=120, what=f"{job_id} to start again")
    time.sleep(0.2)


def losses(folder: Path, point: int = 0, attempt: int = 1) -> list[tuple[int, float]]:
    """Return step and loss of every row that was written, in order of steps."""
    rows = pq.read_table(folder / str(point) / f"attempt-{attempt}" / "steps", columns=["step", "loss"]).to_pylist()
    return sorted((row["step"], row["loss"]) for row in rows)
