"""Measure `collect` over ssh for a sweep of N runs of M MB each, through the sshd of a test bed on loopback.

    python -m tests.testbed up
    python -m benchmarks.collect_scale 300 10

The runs have 20 parts, a log and JSON files each; their content is random. Collects three times: everything, nothing
new, and one new part. Prints for each the seconds in all and until the first part was in place, MB/s, and the peak
memory of the processes here and of the agent at the site.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from inpaint_bench.cli import app, sweeps  # noqa: F401  sweeps is imported before the time is taken
from launchers.sweep import snapshot
from launchers.sweep.events import Staged
from launchers.sweep.ledger import Ledger
from tests.launchers.sweeps import a_point, a_sweep, plan, submit
from tests.testbed.bed import Bed
from tests.testbed.ssh import LoginNodes

REPOSITORY = Path(__file__).parents[1]
SITE = "delta"
PARTS = 20
TABLES = ("samples_fast", "samples_slow", "samples_gpm", "steps", "events")
MEASURED_PYTHON = """#!{python}
import os, sys
pid = os.fork()
if not pid:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
_, status, used = os.wait4(pid, 0)
open({out!r}, "w").write(str(used.ru_maxrss))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def main() -> None:
    """Measure with a test bed that is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int)
    parser.add_argument("mb", type=float, help="size of a run")
    parser.add_argument("--bed", type=Path, default=os.environ.get("INPAINT_BENCH_TESTBED") or REPOSITORY / ".testbed")
    options = parser.parse_args()
    nodes = LoginNodes(Bed.at(options.bed.absolute()))
    nodes.up(SITE)
    try:
        with tempfile.TemporaryDirectory(prefix="collect-scale-") as folder:
            _measure(options.runs, options.mb, Path(folder), nodes)
    finally:
        nodes.down()


def _measure(runs: int, mb: float, folder: Path, nodes: LoginNodes) -> None:
    remote, local, rss = folder / "remote", folder / "local", folder / "rss"
    conf = nodes.bed.conf(SITE)
    _sweep(remote, runs, {"method": "slurm", "slurm_conf": str(conf)}, {})
    python = folder / "python"
    python.write_text(MEASURED_PYTHON.format(python=sys.executable, out=str(rss)))
    python.chmod(0o755)
    connect = {"method": "ssh", "host": f"{SITE}-login", "ssh_config": str(nodes.config), "folder": str(folder)}
    _sweep(local, runs, connect | {"persist_min": 1}, {"python": str(python)})
    code = snapshot.take(remote / "code")
    Ledger(local).append(Staged(site=SITE, root=str(remote), code=code.name))
    for num in range(runs):
        _run_directory(remote / str(num) / "attempt-1", num, round(mb * 1e6 / PARTS))
    print(f"{runs} runs of {mb:g} MB in {PARTS} parts")
    print("collect        s  first part s    MB/s  peak here MB  peak of agent MB")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for case in ("first", "again", "one more"):
        if case == "one more":
            (remote / "0" / "attempt-1" / "steps" / f"part-{PARTS:06d}.parquet").write_bytes(os.urandom(1_000_000))
        rss.unlink(missing_ok=True)
        size, begin, first_s = _size(local), time.monotonic(), None
        command = [sys.executable, "-c", "from benchmarks.collect_scale import child; child()", str(local)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                if first_s is None and case == "first" and any(local.glob("*/attempt-1/*/part-*.parquet")):
                    first_s = time.monotonic() - begin
                time.sleep(0.02)
            assert process.stdout is not None
            output = process.stdout.read().splitlines()
        if process.returncode:
            sys.exit("\n".join(output))
        seconds, peak_mb = map(float, output[-1].split())
        rate, agent_mb = (_size(local) - size) / 1e6 / seconds, int(rss.read_text()) / 1024
        first = "-" if first_s is None else f"{first_s:.2f}"
        print(f"{case:8}  {seconds:6.1f}  {first:>12}  {rate:6.1f}  {peak_mb:12.0f}  {agent_mb:16.0f}")
        _check(remote, local)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def child() -> None:
    """Run `collect` and print its seconds, and the peak memory in MB of the larger of this process and its children."""
    begin = time.monotonic()
    code = app.main(["collect", sys.argv[1]])
    seconds = time.monotonic() - begin
    kib = max(resource.getrusage(processes).ru_maxrss for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(seconds, kib / 1024)
    sys.exit(code)


def _check(remote: Path, local: Path) -> None:
    for file in remote.glob("*/attempt-1/**/*.parquet"):
        if (local / file.relative_to(remote)).stat().st_size != file.stat().st_size:
            sys.exit(f"{file} did not arrive")


def _sweep(folder: Path, runs: int, connect: dict[str, Any], more: dict[str, Any]) -> None:
    site: Any = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "site" / f"{SITE}.yaml"))
    site["connect"] |= connect
    points = [a_point(n, overrides=["gpu=h200", f"batch={n + 1}"], batch=n + 1, site=SITE) for n in range(runs)]
    ledger = a_sweep(folder, points, {SITE: site | more}, sweep_id="scale")
    plan(ledger, points, group="g", job_name="g")
    submit(ledger, range(runs), job_id="1_%a", group="g")


def _run_directory(folder: Path, num: int, part_bytes: int) -> None:
    for part in range(PARTS):
        table = folder / TABLES[part % len(TABLES)]
        table.mkdir(parents=True, exist_ok=True)
        (table / f"part-{part:06d}.parquet").write_bytes(os.urandom(part_bytes))
    logs = folder.parents[1] / "jobs" / "g"
    logs.mkdir(parents=True, exist_ok=True)
    for stream in ("out", "err"):
        (logs / f"1_{num}_0_log.{stream}").write_bytes(b"a line that a job said\n" * 5000)
    environment = {str(n): "x" * 60 for n in range(80)}  # the size of a real one
    manifest = {"status": "completed", "telemetry": {"source": "nvml"}, "environment": environment}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "telemetry.json").write_text(json.dumps({"status": "complete", "tables": {}}))
    (folder / "windows.json").write_text(json.dumps([{"n": n, "name": "measure"} for n in range(100)]))


if __name__ == "__main__":
    main()
