"""Keep a timeline of some steps by Nsight Systems (profile=nsys), and its sums: gaps, copies, waits for the loader.

The steps run after the measured windows in a process of their own, `python -m inpaint_bench.profiling.nsys FILE`,
under nsys. The sums are of nsys's export to SQLite, in which a table exists only if it has rows; times are in ns.
"""

import logging
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import ProfileFacts, Timeline
from inpaint_bench.core.schema import TRACES

from . import ncu
from .count import WARM_CALLS, Build, read_task, release_memory, write_task
from .profile import synchronize

FILE = f"{TRACES}/timeline.nsys-rep"  # in the run directory
STEPS = 10
STEP, WAIT = "step", "wait for data"  # NVTX ranges
DIRECTIONS = {1: "host to device", 2: "device to host", 8: "device to device"}  # others are arrays and managed memory
OPTIONS = (
    *("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"),
    "--cuda-graph-trace=node",  # kernels in a CUDA graph one by one
    *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),  # by default the process is ended there
)
_RANGES = """SELECT COALESCE(e.text, s.value), e.start, e."end" FROM NVTX_EVENTS e
LEFT JOIN StringIds s ON s.id = e.textId WHERE e."end" IS NOT NULL"""
_COPIES = 'SELECT copyKind, SUM("end" - start) / 1e6, SUM(bytes) / 1048576.0 FROM {} GROUP BY 1'

log = logging.getLogger(__name__)


def record_timeline(bench: BenchConfig, run_dir: Path, build: Build) -> ProfileFacts:
    """Record steps of the workload that `build` makes into FILE. Where that fails, the facts say why."""
    release_memory()
    facts, limit_s = ProfileFacts(profiler="nsys"), bench.profiler_limit_s
    report = (run_dir / FILE).absolute()
    try:
        report.parent.mkdir(exist_ok=True)
        report.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="inpaint_bench-nsys-") as folder:
            task, database = Path(folder) / "task.yaml", Path(folder) / "timeline.sqlite"
            write_task(task, bench, build, limit_s=limit_s)
            application = (sys.executable, "-P", "-m", "inpaint_bench.profiling.nsys", str(task))
            output = str(report.with_suffix("")).replace("%", "%%")  # nsys replaces %p, %h and the like
            _run("profile", *OPTIONS, f"--output={output}", *application, wrote=report, limit_s=limit_s)
            _run("export", "--type=sqlite", f"--output={database}", str(report), wrote=database, limit_s=limit_s)
            facts.timeline, facts.traces = summarise(database), [FILE]
    except (UserError, OSError) as error:
        facts.problems = [f"no timeline: {error}"]
        log.warning("profile: %s", facts.problems[0])
    return facts


def _run(*arguments: str, wrote: Path, limit_s: float) -> None:
    printed, returncode = ncu.run([ncu.find("nsys"), *arguments], limit_s)
    if returncode != 0:
        raise UserError(f"nsys {arguments[0]} ended with {returncode}: {ncu.main_error(printed)}")
    if not wrote.exists():
        raise UserError(f"nsys {arguments[0]} wrote no {wrote.name}: does the recipe run on the GPU?")


def summarise(database: Path) -> Timeline:
    """Return the sums of a timeline that nsys exported. Raises UserError if it holds no kernel."""
    try:
        with closing(sqlite3.connect(database)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}

            def rows(table: str, query: str = 'SELECT start, "end" FROM {}') -> list[Any]:
                return connection.execute(query.format(table)).fetchall() if table in tables else []

            kernels = rows("CUPTI_ACTIVITY_KIND_KERNEL")
            busy = sorted([*kernels, *rows("CUPTI_ACTIVITY_KIND_MEMCPY"), *rows("CUPTI_ACTIVITY_KIND_MEMSET")])
            copies, ranges = rows("CUPTI_ACTIVITY_KIND_MEMCPY", _COPIES), rows("NVTX_EVENTS", _RANGES)
    except sqlite3.Error as error:
        raise UserError(f"the export of nsys cannot be read: {error}") from None
    if not kernels:
        raise UserError("nsys recorded no kernel: does the recipe run on the GPU?")
    ends = list(accumulate((end for _, end in busy), max))  # latest end of all that has begun: kernels may overlap
    gaps = [(end, start) for end, (start, _) in zip(ends, busy[1:], strict=False) if start > end]
    waits = [(start, end) for name, start, end in ranges if name == WAIT]
    in_waits = sum(max(0, min(end, to) - max(start, at)) for start, end in gaps for at, to in waits)
    return Timeline(
        steps=sum(name == STEP for name, *_ in ranges),
        length_ms=(ends[-1] - busy[0][0]) / 1e6,
        kernels=len(kernels),
        gaps=len(gaps),
        idle_ms=sum(end - start for start, end in gaps) / 1e6,
        longest_gap_ms=max((end - start for start, end in gaps), default=0) / 1e6,
        wait_ms=sum(to - at for at, to in waits) / 1e6 if waits else None,
        idle_in_waits_ms=in_waits / 1e6 if waits else None,
        copied_ms={DIRECTIONS.get(kind, f"kind {kind}"): ms for kind, ms, _ in copies},
        copied_mib={DIRECTIONS.get(kind, f"kind {kind}"): mib for kind, _, mib in copies},
    )


def main(file: Path) -> None:
    """Run STEPS steps between cudaProfilerStart and cudaProfilerStop; none begins after the limit of the task."""
    workload, device, task = read_task(file)
    cuda = device.type == "cuda"
    mark: Callable[[str], AbstractContextManager[Any]] = torch.cuda.nvtx.range if cuda else nullcontext

    def train() -> None:
        with mark(WAIT):
            batch = workload.next_batch()
        workload.step(batch)

    calls = workload.profiled_calls()  # kept: a call lives, without gradients perhaps, until the next is asked for
    step: Callable[[], object] = train if hasattr(workload, "next_batch") else next(calls).work
    # What a loader has prepared meanwhile shows no wait.
    for _ in range(WARM_CALLS + getattr(workload, "prefetched_batches", 0)):
        step()
    synchronize(device)
    end_s = time.monotonic() + task["limit_s"]
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
