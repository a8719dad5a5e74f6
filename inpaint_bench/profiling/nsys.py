"""Keep a timeline of some steps by Nsight Systems (profile=nsys), and its sums: gaps, copies, waits for the loader.

The steps run after the measured windows in a process of their own, `python -m inpaint_bench.profiling.nsys FILE`,
under nsys. The sums are of nsys's export to SQLite, in which a table exists only if it has rows; times are in ns.
"""

from __future__ import annotations

import pickle
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.records import CopyTotal, Timeline
from inpaint_bench.core.schema import TRACES

from . import ncu
from .count import WARM_CALLS, Build, release_memory
from .profile import synchronize

FILE = f"{TRACES}/timeline.nsys-rep"  # in the run directory
STEPS = 10
STEP, WAIT = "step", "wait for data"  # NVTX ranges
DIRECTIONS = {1: "host to device", 2: "device to host", 8: "device to device"}  # by CUpti_ActivityMemcpyKind
_RANGES = """SELECT COALESCE(e.text, s.value), e.start, e."end" FROM NVTX_EVENTS e
LEFT JOIN StringIds s ON s.id = e.textId WHERE e."end" IS NOT NULL"""
Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the process under nsys does."""

    build: Build
    limit_s: float


def find() -> str:
    """Return the path of nsys. Raises UnavailableError where there is none."""
    if path := shutil.which("nsys"):
        return path
    raise UnavailableError(
        "profile=nsys needs Nsight Systems, and no `nsys` is on PATH: it comes with the CUDA toolkit "
        "(a module of the site: sites.<name>.environment.modules)"
    )


def record_timeline(bench: BenchConfig, run_dir: Path, build: Build) -> Timeline:
    """Record steps of the workload that `build` makes into FILE, and return their sums. Raises UserError."""
    release_memory()
    report, limit_s = (run_dir / FILE).absolute(), bench.profiler_limit_s
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="inpaint_bench-nsys-") as folder:
        task, database = Path(folder) / "task", Path(folder) / "timeline.sqlite"
        task.write_bytes(pickle.dumps(Task(build=build, limit_s=limit_s)))
        application = [sys.executable, "-P", "-m", "inpaint_bench.profiling.nsys", str(task)]
        _run(command(find(), report, application), report, limit_s)
        _run([find(), "export", "--type=sqlite", f"--output={database}", str(report)], database, limit_s)
        return summarise(database)


def command(nsys: str, report: Path, application: Sequence[str]) -> list[str]:
    """Return the command that records the application between cudaProfilerStart and cudaProfilerStop."""
    return [
        *(nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        "--cuda-graph-trace=node",  # kernels in a CUDA graph one by one
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),  # by default the process is ended there
        *("--force-overwrite=true", f"--output={report.with_suffix('')}"),
        *application,
    ]


def _run(arguments: Sequence[str], output: Path, limit_s: float) -> None:
    printed, returncode = ncu.run(arguments, limit_s)
    if returncode != 0:
        raise UserError(f"nsys {arguments[1]} ended with {returncode}: {ncu.last_error(printed)}")
    if not output.exists():
        raise UserError(f"nsys {arguments[1]} wrote no {output.name}: does the recipe run on the GPU?")


# --- sums ----------------------------------------------------------------------------------------


def summarise(database: Path) -> Timeline:
    """Return the sums of a timeline that nsys exported. Raises UserError where it holds no kernel."""
    try:
        with closing(sqlite3.connect(database)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}

            def rows(table: str, query: str) -> list[Any]:
                return connection.execute(query).fetchall() if table in tables else []

            kinds = ("KERNEL", "MEMCPY", "MEMSET")
            kernels, copies, fills = (
                rows(table, f'SELECT start, "end"{", copyKind, bytes" * (kind == "MEMCPY")} FROM {table}')
                for kind, table in ((kind, f"CUPTI_ACTIVITY_KIND_{kind}") for kind in kinds)
            )
            ranges = rows("NVTX_EVENTS", _RANGES)
    except sqlite3.Error as error:
        raise UserError(f"the export of nsys cannot be read: {error}") from None
    if not kernels:
        raise UserError("nsys recorded no kernel: does the recipe run on the GPU?")
    busy = _union([*kernels, *(copy[:2] for copy in copies), *fills])
    gaps = [(end, start) for (_, end), (start, _) in pairwise(busy)]
    waits = _union((start, end) for name, start, end in ranges if name == WAIT)
    idle_in_waits = sum(max(0, min(gap[1], wait[1]) - max(gap[0], wait[0])) for gap in gaps for wait in waits)
    totals: dict[str, CopyTotal] = {}
    for start, end, kind, size in copies:
        total = totals.setdefault(DIRECTIONS.get(kind, "other"), CopyTotal(count=0, ms=0.0, bytes=0))
        total.count, total.ms, total.bytes = total.count + 1, total.ms + (end - start) / 1e6, total.bytes + size
    return Timeline(
        steps=sum(name == STEP for name, *_ in ranges),
        length_ms=(busy[-1][1] - busy[0][0]) / 1e6,
        kernels=len(kernels),
        busy_ms=_ms(busy),
        gaps=len(gaps),
        idle_ms=_ms(gaps),
        longest_gap_ms=max((_ms([gap]) for gap in gaps), default=0.0),
        wait_ms=_ms(waits) if waits else None,
        idle_in_waits_ms=idle_in_waits / 1e6 if waits else None,
        copies=totals,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order; what overlaps or touches is one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _ms(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals) / 1e6


# --- the process under nsys ----------------------------------------------------------------------


def main(file: Path) -> None:
    """Run STEPS steps between cudaProfilerStart and cudaProfilerStop; none begins after the limit of the task."""
    task: Task = pickle.loads(file.read_bytes())  # of a temporary folder of this user, which the worker has just made
    workload, device = task.build()
    cuda = device.type == "cuda"

    def mark(name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name) if cuda else nullcontext()

    def train() -> None:
        with mark(WAIT):
            batch = workload.next_batch()
        workload.step(batch)

    if hasattr(workload, "next_batch"):
        step: Callable[[], object] = train
        warm = WARM_CALLS + workload.prefetched_batches  # what the loader has prepared meanwhile shows no wait
    else:
        calls = workload.profiled_calls()  # kept: its calls may need a context that it holds
        step, warm = next(calls).work, WARM_CALLS
    for _ in range(warm):
        step()
    synchronize(device)
    end_s = time.monotonic() + task.limit_s
    with torch.cuda.profiler.profile() if cuda else nullcontext():
        for _ in range(STEPS):
            with mark(STEP):
                step()
            if time.monotonic() > end_s:
                break
        synchronize(device)
    workload.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
