"""Measure time and memory of a launch of many points, beside Hydra's stock submitit launcher.

usage: python benchmarks/launch_scale.py STOCK_PYTHON [--sizes 10:3 100:3 1000:1] [--results FILE]

STOCK_PYTHON is an interpreter that has this package and the stock launcher: python -m venv V && V/bin/pip install .
hydra-submitit-launcher==1.2.0. --sizes are points and how often each is measured.

Brings up a cluster of the test bed with its accounting and takes the partition down: jobs are accepted and wait. Both
launchers then submit the same points of this application from the same files, in turns, each in a process of its own,
and all jobs are cancelled after each. Time counts from the start of the process. For the stock launcher it ends when
sbatch has returned, because the launcher then waits for the jobs; for ours when the command has returned, which is
after sbatch and after its last record. The stock launcher submits all points as one array to one partition with one
request, ours submits two arrays. After ours, `status` is timed on the sweep directory. Peak memory is of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.testbed.bed import Bed
from tests.testbed.fixtures import temporary_bed

ROOT = Path(__file__).parents[1]
SITE, PARTITION = "grace", "gpu"
SEEDS = "seed=range(0,{seeds})"
POINTS = ["gpu=a40,a100", "batch=8,16,32,64,128", "profile=testbed", "repeats=1"]  # by the seeds
STOCK_APP = """
import hydra
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.hydra_support import register

def task(config):
    return None

register()
hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)()
"""
STOCK = [
    "hydra/launcher=submitit_slurm",
    "hydra/sweeper=basic",
    f"hydra.launcher.partition={PARTITION}",
    "hydra.launcher.gres=gpu:a100:1",
    "hydra.launcher.timeout_min=10",
    "hydra.launcher.mem_gb=1",
]
# Passes sbatch's exit code on, and appends the time at which it returned to a file.
SBATCH = """#!/bin/sh
"{sbatch}" "$@"
code=$?
date +%s.%N >> "{times}"
exit $code
"""
TIMEOUT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured launch."""

    launcher: str
    points: int
    submitted_s: float
    cpu_s: float  # CPU time of the process and its children, user and system
    peak_rss_mb: float
    load: float  # load of the machine over the minute before
    status_s: float | None = None
    bytes_per_point: float | None = None
    files_per_point: float | None = None


def main() -> int:
    """Measure every size with both launchers, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stock", type=Path, metavar="STOCK_PYTHON")
    parser.add_argument("--sizes", nargs="+", default=["10:3", "100:3", "1000:1"], metavar="POINTS:TIMES")
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write every measurement there, as JSON")
    options = parser.parse_args()
    rows: list[Row] = []
    work = Path(tempfile.mkdtemp(prefix="launch-scale-"))
    try:
        with temporary_bed(sites=(SITE,)) as bed:
            bed.run(SITE, "scontrol", "update", f"partitionname={PARTITION}", "state=down")
            for size in options.sizes:
                points, _, repeats = size.partition(":")
                for _ in range(int(repeats or 1)):
                    for launcher in ("ours", "stock"):
                        row = _measure(bed, work / f"{len(rows)}-{launcher}", launcher, int(points), options.stock)
                        print(json.dumps(asdict(row)), flush=True)
                        rows.append(row)
                        if options.results:
                            options.results.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _print_medians(rows)
    return 0


def _measure(bed: Bed, folder: Path, launcher: str, points: int, stock: Path) -> Row:
    folder.mkdir(parents=True)
    sbatch_times = folder / "sbatch-returned"
    shim = folder / "bin" / "sbatch"
    shim.parent.mkdir()
    shim.write_text(SBATCH.format(sbatch=shutil.which("sbatch"), times=sbatch_times))
    shim.chmod(0o755)
    environment = bed.env(SITE) | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
        "INPAINT_BENCH_TESTBED": str(bed.state),
    }
    sweep = folder / "sweep"
    arguments = ["-m", *POINTS, SEEDS.format(seeds=points // 10), f"max_points={points}", f"hydra.sweep.dir={sweep}"]
    if launcher == "ours":
        command = [sys.executable, "-m", "inpaint_bench.launch", *arguments]
    else:
        app = folder / "app.py"
        app.write_text(STOCK_APP)
        command = [str(stock), str(app), *arguments, *STOCK]
    load = os.getloadavg()[0]
    started = time.time()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    ended = None
    usage = None
    while time.time() - started < TIMEOUT_S:
        pid, code, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            ended = time.time()
            break
        if launcher == "stock" and _last_time(sbatch_times):
            os.killpg(process.pid, signal.SIGTERM)
            _, code, usage = os.wait4(process.pid, 0)
            break
        time.sleep(0.02)
    process.returncode = 0  # it has been waited for
    returned = _last_time(sbatch_times)
    if usage is None or returned is None or (launcher == "ours" and code):
        raise SystemExit(f"{launcher} did not submit {points} points:\n{(folder / 'output').read_text()[-2000:]}")
    queued = bed.run(SITE, "squeue", "-h", "-r", "-o", "%i").stdout.split()
    if len(queued) != points:
        raise SystemExit(f"{launcher} submitted {len(queued)} jobs for {points} points")
    status_s = _status(sweep, environment) if launcher == "ours" else None
    bed.run(SITE, "scancel", "--user=root", "--state=PENDING")
    bed.wait(lambda: not bed.run(SITE, "squeue", "-h").stdout.strip())
    files = [file for file in folder.rglob("*") if file.is_file() and "code" not in file.relative_to(folder).parts]
    return Row(
        launcher=launcher,
        points=points,
        submitted_s=round((ended or returned) - started, 3),
        cpu_s=round(usage.ru_utime + usage.ru_stime, 3),
        peak_rss_mb=round(usage.ru_maxrss / 1024, 1),
        load=round(load, 1),
        status_s=status_s,
        bytes_per_point=round(sum(file.stat().st_size for file in files) / points),
        files_per_point=round(len(files) / points, 2),
    )


def _last_time(file: Path) -> float | None:
    """Return when sbatch returned last; None while it has not."""
    lines = file.read_text().split() if file.exists() else []
    return float(lines[-1]) if lines else None


def _status(sweep: Path, environment: dict[str, str]) -> float:
    started = time.time()
    command = [sys.executable, "-m", "inpaint_bench", "status", str(sweep)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.time() - started, 3)


def _print_medians(rows: list[Row]) -> None:
    """Print medians, and ranges if there are several measurements."""

    def cell(values: list[float]) -> str:
        spread = f" ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else ""
        return f"{statistics.median(values):.4g}{spread}"

    print("| points | launcher | n | submitted after, s | processor, s | peak RSS, MB | bytes per point | status, s |")
    print("|---|---|---|---|---|---|---|---|")
    for points in sorted({row.points for row in rows}):
        both = {name: [r for r in rows if (r.points, r.launcher) == (points, name)] for name in ("ours", "stock")}
        for name, measured in both.items():
            status = [row.status_s for row in measured if row.status_s is not None]
            cells = [
                cell([row.submitted_s for row in measured]),
                cell([row.cpu_s for row in measured]),
                cell([row.peak_rss_mb for row in measured]),
                cell([row.bytes_per_point or 0 for row in measured]),
                cell(status) if status else "",
            ]
            print(f"| {points} | {name} | {len(measured)} | " + " | ".join(cells) + " |")
        our_s, stock_s = (statistics.median(row.submitted_s for row in both[name]) for name in ("ours", "stock"))
        print(f"{points} points: {stock_s / our_s:.1f} times faster than stock")


if __name__ == "__main__":
    sys.exit(main())
