"""Sweep directories written by hand, for tests that need a record and no jobs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs

from inpaint_bench.core.config.site import ConnectConfig, SiteConfig
from inpaint_bench.core.schema import LEDGER, MANIFEST
from launchers.slurm.local_executor import machine
from launchers.sweep.attempt import Attempt
from launchers.sweep.events import Deferred, Planned, Submitted
from launchers.sweep.ledger import Ledger, job_name
from launchers.sweep.sweep_record import SweepRecord


def a_point(num: int, **changes: Any) -> Attempt:
    """A point of delta's H200."""
    values = {"overrides": ["gpu=h200"], "gpu": "h200", "batch": 16, "site": "delta"}
    return Attempt(point=num, **{**values, **changes})


def a_sweep(folder: Path, points: Iterable[Attempt], sites: dict[str, Any], **record: Any) -> Ledger:
    """A sweep with these points, none of them submitted. `sites`: contents of site files by name."""
    values = {"sweep_id": "s1", "command": [], "points": list(points), "sites": sites, **record}
    SweepRecord(**values).write(folder)
    return Ledger(folder)


def plan(
    ledger: Ledger,
    points: Iterable[Attempt],
    *,
    attempt: int = 1,
    run_id: str = "r-{point}",
    group: str = "00",
    job_name: str | None = "j",
    carried: bool = False,
) -> None:
    """Record an array with a task per point as planned."""
    points = list(points)
    attempts = [
        structs.replace(point, attempt=attempt, run_id=run_id.format(point=point.point, attempt=attempt))
        for point in points
    ]
    site = points[0].site
    ledger.append(Planned(group=group, job_name=job_name, site=site, carried=carried, attempts=attempts))
    age(ledger)


def submit(ledger: Ledger, nums: Iterable[int], *, job_id: str = "7_%a", attempt: int = 1, group: str = "00") -> None:
    """Record that sbatch accepted an array."""
    ledger.append(Submitted(group=group, job_id=job_id, attempts=[(num, attempt) for num in nums]))
    age(ledger)


def age(ledger: Ledger, seconds: float = 86400.0) -> None:
    """Make the ledger look as if its last event was written so long ago."""
    written_unix = time.time() - seconds
    os.utime(ledger.folder / LEDGER, (written_unix, written_unix))


def add_point(ledger: Ledger, point: Attempt) -> None:
    """Add a point to the record of a sweep."""
    sweep = ledger.sweep
    sweep.points.append(point)
    sweep.write(ledger.folder)


def defer(ledger: Ledger, nums: Iterable[int], site: str = "delta") -> None:
    """Record that points wait in a plan file."""
    ledger.append(Deferred(points=list(nums), plan=f"plan.{site}.yaml"))


def sweep_of_jobs(folder: Path, job_ids: list[str], site: SiteConfig | None = None) -> Path:
    """Write a sweep of one array whose tasks have these job ids, on this machine unless a site is given."""
    site = site or SiteConfig(name="local", connect=ConnectConfig(method="local"))
    points = [
        a_point(num, overrides=[f"batch={num + 1}"], batch=num + 1, site=site.name) for num in range(len(job_ids))
    ]
    ledger = a_sweep(folder, points, {site.name: asdict(site)})
    if points:
        plan(ledger, points, group="g", job_name=job_name("g", "s1"))
    for num, job_id in enumerate(job_ids):
        submit(ledger, [num], job_id=job_id, group="g")
    return folder


def write_manifest(folder: Path, num: int, status: str = "completed", **content: Any) -> Path:
    """Write a manifest into the run directory of a point's first attempt."""
    run_dir = folder / str(num) / "attempt-1"
    run_dir.mkdir(parents=True)
    manifest = {"status": status, "batch": 16, "started_unix_ns": 10**18, "telemetry": {"source": "none"}, **content}
    (run_dir / MANIFEST).write_text(json.dumps(manifest))
    return run_dir


def exited_process() -> str:
    """Return the job id of a process of this machine that has exited."""
    process = subprocess.Popen(["true"])
    process.wait()
    return f"pid:{process.pid}@{machine()}"


def launched(folder: Path) -> list[tuple[int, str, str]]:
    """Number, batch and seed of every point of a sweep over the batch, in order of numbers."""
    points = sorted(Ledger.open(folder).points().items())
    values = [(num, dict(override.split("=", 1) for override in record.overrides)) for num, record in points]
    return [(num, value["batch"], value["seed"]) for num, value in values]


def planned_rows(text: str) -> list[list[str]]:
    """Words of each point's row in a dry run: number, GPU, batch, overrides ..."""
    rows = [line.split() for line in text.splitlines()]
    return [row for row in rows if len(row) > 2 and row[0].isdigit() and row[1] in ("a40", "a100", "h200")]
