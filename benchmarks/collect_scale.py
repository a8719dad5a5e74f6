"""What `collect` over ssh takes for a sweep of N runs of M MB each, through the sshd of a test bed on loopback.

    python -m tests.testbed up
    python -m benchmarks.collect_scale 300 10

Runs lie at the site as real ones do (20 parts, a log, JSON); their content is random. Three collects: the first, one
with nothing new, one after a single run got a part more. Of each: seconds in all and until the site's first word and
its first file, the longest silence, MB/s, and the peak memory of our process here and of the one there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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

from inpaint_bench.cli import app
from launchers.remote import ssh
from launchers.remote.client import MARK
from launchers.sweep import snapshot
from launchers.sweep.ledger import Ledger
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
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("runs", type=int)
    asked.add_argument("mb", type=float, help="of one run")
    asked.add_argument("--bed", type=Path, default=os.environ.get("INPAINT_BENCH_TESTBED") or REPOSITORY / ".testbed")
    options = asked.parse_args()
    nodes = LoginNodes(Bed.at(options.bed.absolute()))
    nodes.up(SITE)
    try:
        with tempfile.TemporaryDirectory(prefix="collect-scale-") as folder:
            _measure(options.runs, options.mb, Path(folder), nodes)
    finally:
        nodes.down()


def _measure(runs: int, mb: float, folder: Path, nodes: LoginNodes) -> None:
    there, here, rss = folder / "there", folder / "here", folder / "rss"
    conf = nodes.bed.conf(SITE)
    _sweep(there, runs, {"method": "slurm", "slurm_conf": str(conf)}, {})
    python = folder / "python"
    python.write_text(MEASURED_PYTHON.format(python=sys.executable, out=str(rss)))
    python.chmod(0o755)
    connect = {"method": "ssh", "host": f"{SITE}-login", "ssh_config": str(nodes.config), "folder": str(folder)}
    _sweep(here, runs, connect | {"persist_min": 1}, {"python": str(python)})
    code = snapshot.take(there / "code")
    Ledger(here).append("staged", site=SITE, root=str(there), code=code.name)
    for num in range(runs):
        _run_directory(there / str(num) / "attempt-1", num, round(mb * 1e6 / PARTS))
    print(f"{runs} runs of {mb:g} MB in {PARTS} parts")
    print("collect      s  first word s  first file s  longest silence s    MB/s  peak here MB  peak there MB")
    for what in ("first", "again", "one more"):
        if what == "one more":
            (there / "0" / "attempt-1" / "steps" / f"part-{PARTS:06d}.parquet").write_bytes(os.urandom(1_000_000))
        rss.unlink(missing_ok=True)
        found = json.loads(_own_process(here))
        arrived, peak_there = found["bytes"] / 1e6 / found["s"], int(rss.read_text()) / 1024
        times = f"{found['first_word_s']:12.2f}  {found['first_file_s']:12.2f}  {found['silence_s']:17.2f}"
        print(f"{what:8} {found['s']:6.1f}  {times}  {arrived:6.1f}  {found['peak_mb']:12.0f}  {peak_there:13.0f}")
        _check(there, here)


def _own_process(here: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", "from benchmarks.collect_scale import child; child()", str(here)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"collect: {done.stdout}")
    return done.stdout


def child() -> None:
    """A collect with its stream of bytes watched."""
    came: list[tuple[float, int]] = []
    words: list[float] = []
    read, read_line = ssh.Stream.read, ssh.Stream.read_line

    def watched(stream: ssh.Stream, size: int) -> bytes:
        part = read(stream, size)
        came.append((time.monotonic(), len(part)))
        return part

    def watched_line(stream: ssh.Stream) -> bytes:
        line = read_line(stream)
        words.extend([time.monotonic()] * line.startswith(MARK))
        return line

    ssh.Stream.read = watched  # type: ignore[method-assign]
    ssh.Stream.read_line = watched_line  # type: ignore[method-assign,assignment]
    begin = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = app.main(["collect", sys.argv[1]])
    if code:
        sys.exit(said.getvalue())
    end = time.monotonic()
    times = [at for at, _ in came]
    large = next((at for at, size in came if size > 4096), end)
    found: dict[str, Any] = {
        "s": end - begin,
        "first_word_s": words[0] - begin,
        "first_file_s": large - begin,
        "silence_s": max(b - a for a, b in itertools.pairwise(times)),
        "bytes": sum(size for _, size in came),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(found))


def _check(there: Path, here: Path) -> None:
    for file in there.glob("*/attempt-1/**/*.parquet"):
        if (here / file.relative_to(there)).stat().st_size != file.stat().st_size:
            sys.exit(f"{file} did not arrive")


def _sweep(folder: Path, runs: int, connect: dict[str, Any], more: dict[str, Any]) -> None:
    site: Any = OmegaConf.to_container(OmegaConf.load(REPOSITORY / "conf" / "site" / f"{SITE}.yaml"))
    site["connect"] |= connect
    folder.mkdir()
    ledger, points = Ledger(folder), range(runs)
    ledger.create(sweep_id="scale", created_unix=time.time(), command=[], overrides=[], order=None)
    asked = [
        {"point": n, "overrides": ["gpu=h200", f"batch={n + 1}"], "gpu": "h200", "batch": n + 1, "site": SITE}
        for n in points
    ]
    ledger.know(asked, {SITE: site | more})
    ledger.append("planned", group="g", job_name="g", site=SITE, asked=asked, points=[[n, 1, f"r-{n}"] for n in points])
    ledger.append("submitted", group="g", job_id="1_%a", points=[[n, 1] for n in points])


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
