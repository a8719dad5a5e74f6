"""Sweeps of the faulty workload on the bed, and what is asked of them afterwards."""

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


def send(folder: Path, *overrides: str) -> Path:
    """Submit a sweep and return at once."""
    assert launch.main(["-m", *WORKLOAD, *overrides, f'hydra.sweep.dir="{folder}"']) == 0
    return folder


def told(folder: Path, capsys: Any) -> list[dict[str, Any]]:
    """What `status` says, point by point."""
    capsys.readouterr()
    assert app.main(["status", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    points: list[dict[str, Any]] = answer["points"] if isinstance(answer, dict) else answer
    return points


def reasons(folder: Path, capsys: Any) -> list[tuple[str, str | None]]:
    """State and reason of each point, as `status` tells them."""
    return [(point["state"], point["reason"]) for point in told(folder, capsys)]


def decided(folder: Path, capsys: Any, *arguments: str) -> str:
    """What a dry run of `rerun` says."""
    capsys.readouterr()
    assert app.main(["rerun", str(folder), "--dry-run", *arguments]) == 0
    return str(capsys.readouterr().out)


def nothing_to_send(folder: Path, capsys: Any) -> bool:
    """Whether a real `rerun` finds no work."""
    capsys.readouterr()
    assert app.main(["rerun", str(folder)]) == 0
    return "Nothing to submit" in capsys.readouterr().out


def line(text: str, *words: str) -> str:
    """The one line of a table that holds all of the words."""
    (found,) = [one for one in text.splitlines() if all(word in one for word in words)]
    return found


def lost_s(run_dir: Path, since_unix_s: float) -> float:
    """Seconds from the last sample that a reader finds to this moment."""
    recover_run(run_dir)  # as merge reads it
    parts = pl.scan_parquet(run_dir / "samples_fast" / "part-*.parquet")
    return since_unix_s - int(parts.select(pl.col("t_unix_ns").max()).collect().item()) * 1e-9


def manifest(folder: Path, point: int = 0, attempt: int = 1) -> dict[str, Any]:
    """Of an attempt; empty before it began."""
    try:
        content: dict[str, Any] = json.loads((folder / str(point) / f"attempt-{attempt}" / "manifest.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def starts(folder: Path, point: int = 0) -> list[dict[str, Any]]:
    """What the earlier starts of a requeued first attempt left, oldest first."""
    files = (folder / str(point) / "attempt-1").glob("manifest.*.json")
    return [json.loads(file.read_text()) for file in sorted(files)]


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
