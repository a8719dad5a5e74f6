"""Time `status` for sweeps of N points on the test bed's Slurm: half completed, some running, the rest held.

    python -m tests.testbed up
    python benchmarks/status_scale.py 10 100 1000

The jobs are real (arrays of `true`, `sleep` and held ones); the run directories are copies of that of a real run
(--like RUN), or written here. Wall time is that of the whole command, interpreter included, as the median of --times
with a warm disk cache: `first` queries sacct for all jobs that have ended and saves their states, `later` finds them
saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from inpaint_bench.core.files import replace_json
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import MANIFEST, SCHEDULER, TELEMETRY
from inpaint_bench.core.tables import SAMPLES_FAST
from launchers.sweep.attempt import Attempt
from tests.launchers.sweeps import a_point, a_sweep, plan, submit

REPOSITORY = Path(__file__).parents[1]
SITE, PARTITION = "delta", "cpu"
RUNNING = 40  # each task is a process


def main() -> None:
    """Print a row per number of points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=int, nargs="+")
    parser.add_argument("--bed", type=Path, default=os.environ.get("INPAINT_BENCH_TESTBED") or REPOSITORY / ".testbed")
    parser.add_argument("--like", type=Path, help="run directory to copy for every completed point")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    print("points  completed  running  held  first s  later s  --json s")
    for points in options.points:
        with tempfile.TemporaryDirectory(prefix="status-scale-") as folder:
            print(_measure(points, Path(folder) / "sweep", options), flush=True)


def _measure(points: int, folder: Path, options: argparse.Namespace) -> str:
    conf = options.bed.absolute() / SITE / "etc" / "slurm.conf"
    environment = {**os.environ, "SLURM_CONF": str(conf), "PYTHONPATH": str(REPOSITORY)}
    running = min(RUNNING, points // 4)
    shares = {"completed": points // 2, "running": running, "held": points - points // 2 - running}
    commands = {"completed": "true", "running": "sleep 600", "held": "true"}
    arrays = {}
    try:
        for share, number in shares.items():
            more = ["--hold"] if share == "held" else []
            arrays[share] = _sbatch(commands[share], number, [f"--job-name={share}", *more], environment)
        _sweep(folder, conf, shares, arrays, options.like)
        _wait_for(arrays["completed"], shares["completed"], environment)
        status = [sys.executable, "-m", "inpaint_bench", "status", str(folder)]
        first = []
        for _ in range(options.times):
            for path in folder.glob(f"*/attempt-1/{SCHEDULER}"):
                path.unlink()  # so that sacct is queried for all of them
            first.append(_seconds(status, environment))
        later = [_seconds(status, environment) for _ in range(options.times)]
        as_json = statistics.median(_seconds([*status, "--json"], environment) for _ in range(options.times))
        status_json = json.loads(_run([*status, "--json"], environment))
        expected = {"completed": shares["completed"], "running": running, "queued": shares["held"]}
        if status_json["counts"] != {state: n for state, n in sorted(expected.items()) if n}:
            sys.exit(f"status reports {status_json['counts']}, expected {expected}")
        numbers = f"{shares['completed']:9}  {running:7}  {shares['held']:4}"
        times = f"{statistics.median(first):7.2f}  {statistics.median(later):7.2f}  {as_json:8.2f}"
        return f"{points:6}  {numbers}  {times}"
    finally:
        _run(["scancel", *arrays.values()], environment)


def _sbatch(command: str, number: int, more: list[str], environment: dict[str, str]) -> str:
    small = ["--partition", PARTITION, "--cpus-per-task=1", "--mem=1", "--time=20", "--output=/dev/null"]
    script = [*small, *more, f"--array=0-{number - 1}", "--parsable", "--wrap", command]
    return _run(["sbatch", *script], environment).strip()


def _sweep(folder: Path, conf: Path, shares: dict[str, int], arrays: dict[str, str], like: Path | None) -> None:
    site: Any = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "site" / f"{SITE}.yaml"))
    site["connect"]["slurm_conf"] = str(conf)
    entries = [
        a_point(num, overrides=["gpu=h200", f"batch={num + 1}"], batch=num + 1, site=SITE)
        for num in range(sum(shares.values()))
    ]
    ledger = a_sweep(folder, entries, {SITE: site}, sweep_id="scale")
    start = 0
    for share, number in shares.items():
        members = entries[start : start + number]
        plan(ledger, members, group=share, job_name=share)
        submit(ledger, [entry.point for entry in members], job_id=f"{arrays[share]}_%a", group=share)
        for entry in members:
            _run_directory(folder / str(entry.point) / "attempt-1", share, entry, like)
        start += number


def _run_directory(folder: Path, share: str, entry: Attempt, like: Path | None) -> None:
    if share == "held":
        return
    if like and share == "completed":
        shutil.copytree(like, folder)
        return
    now = time.time_ns()
    progress = {"step": 30, "steps_total": 60, "images_per_s": 34.5, "t_unix_ns": now}
    values = dict.fromkeys(Manifest.__struct_fields__) | {
        "status": "completed" if share == "completed" else "running",
        "batch": entry.batch,
        "overrides": entry.overrides,
        "started_unix_ns": now - 60 * 10**9,
        "ended_unix_ns": now if share == "completed" else None,
        "telemetry": {"source": "nvml", "hz": 10.0, "status": "complete"},
        "progress": progress,
        "environment": {str(n): "x" * 60 for n in range(80)},  # the size of a real one
    }
    replace_json(folder / MANIFEST, values)
    parts = folder / "samples_fast"
    parts.mkdir()
    (parts / "part-000000.parquet").touch()
    counts = {"samples_fast": {"rows": 600, "parts": 1}}
    replace_json(folder / TELEMETRY, {"status": "complete", "tables": counts, "columns": SAMPLES_FAST.names})


def _wait_for(array: str, number: int, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        rows = _run(["sacct", "-X", "-n", "-P", "-o", "State", "-j", array], environment).split()
        if rows.count("COMPLETED") == number:
            return
        time.sleep(2)
    sys.exit(f"array {array} did not complete")


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.monotonic()
    _run(command, environment)
    return time.monotonic() - start


def _run(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
