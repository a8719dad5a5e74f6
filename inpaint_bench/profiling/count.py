"""Count the heaviest kernels of a call with Nsight Compute (profile=ncu): tables `kernel_counters`, `kernel_rules`.

Which kernels are the heaviest is known from a profile of the same call with torch.profiler, in the same job: their
names depend on card, libraries and recipe. Counting replays every kernel, so that it takes a process of its own, which
does nothing else: `python -m inpaint_bench.profiling.count FILE`, under ncu. Nothing is timed.
"""

import gc
import importlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import torch
from omegaconf import OmegaConf

from inpaint_bench.core.composed_file import plain_config, read_yaml, typed_config, write_yaml
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UnavailableError, UserError
from inpaint_bench.core.kernels import IDLE, classify
from inpaint_bench.core.schema import KERNEL_COUNTERS, KERNEL_RULES, KERNEL_TIMES, file_metadata
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.storage.parts import PartWriter

from . import ncu
from .profile import MAX_KERNEL_NAME, ProfiledCall, synchronize

WARM_CALLS = 5  # a CUDA graph is captured within the first four; compilation and autotuning happen there too
MOST_FUNCTIONS = 16
RAW = "ncu.csv"  # in the run directory: what ncu printed

log = logging.getLogger(__name__)


Build = Callable[[BenchConfig], tuple[Any, torch.device]]  # a function of a module that makes a workload
DONE, CUT = "done", "cut"  # files beside the task: its call has ended, or the limit has ended it


def write_task(file: Path, bench: BenchConfig, build: Build, **values: Any) -> None:
    """Write a task for a process of its own: the function that builds the workload, its configuration, and `values`."""
    content = plain_config(OmegaConf.structured(bench))
    write_yaml(file, {"module": build.__module__, "function": build.__name__, "bench": content, **values})


def read_task(file: Path) -> tuple[Any, torch.device, dict[str, Any]]:
    """Return the workload of a task, built, its device, and the other values."""
    task = read_yaml(file)
    build: Build = getattr(importlib.import_module(task["module"]), task["function"])
    return *build(parse_config(typed_config(task["bench"]))), task


def warm_up(calls: Iterable[ProfiledCall], device: torch.device) -> None:
    """Run every measured call as often as it takes until it runs as in a measurement."""
    for call in calls:
        for _ in range(WARM_CALLS if call.measured else 0):
            call.work()
    synchronize(device)


def count_kernels(bench: BenchConfig, run_dir: Path, run_id: str, build: Build) -> list[str]:
    """Count the kernels of the heaviest call that was profiled, and return a sentence for each that is missing.

    If the workload says so, count those of every call: a process each, so that no launch is taken for another's.
    `build` makes the workload anew, in the process under ncu.
    Raises UnavailableError if this machine lets nobody read its counters, UserError if nothing was counted.
    """
    release_memory()
    calls = _profiled_kernels(run_dir)
    if not bench.workload.counts_each_call:
        heaviest = max(calls, key=lambda call: sum(ms for _, ms, _ in calls[call]))
        calls = {heaviest: calls[heaviest]}
    counters, rules = (
        PartWriter(run_dir / table, SCHEMAS[table], file_metadata(run_id), bench.telemetry.part_s)
        for table in (KERNEL_COUNTERS, KERNEL_RULES)
    )
    problems, failures = [], []
    try:
        for index, (call, kernels) in enumerate(calls.items()):
            output = (run_dir / (RAW.replace(".", f"-{index}.") if index else RAW)).absolute()
            try:
                launches, call_rules, missing = _count_call(bench, build, call, kernels, output)
                _write(counters, call, launches)
                for rule in call_rules:
                    rules.append(call=call, **msgspec.structs.asdict(rule))
            except UnavailableError:
                raise
            except UserError as error:  # the next call may have fewer launches
                failures.append(error)
                missing = [str(error)]
            problems += [f"{call}: {text}" for text in missing]
    finally:
        counters.close()
        rules.close()
    if len(failures) == len(calls):
        raise failures[0]
    return problems


def _count_call(
    bench: BenchConfig, build: Build, call: str, kernels: list[tuple[str, float, int]], output: Path
) -> tuple[list[ncu.Launch], list[ncu.Rule], list[str]]:
    """Return the launches of one call, what rules say of them, and a sentence for each that is missing."""
    chosen = ncu.select(kernels, MOST_FUNCTIONS, bench.profiler_launches)
    problems = list(chosen.left_out)
    if not chosen.functions:
        raise UserError(f"no kernel has few enough launches to be counted: {'; '.join(problems)}")
    output.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="inpaint_bench-ncu-") as folder:
        limit_s = bench.profiler_limit_s
        file = Path(folder) / "task.yaml"
        write_task(file, bench, build, limit_s=limit_s, call=call)
        application = [sys.executable, "-P", "-m", "inpaint_bench.profiling.count", str(file)]
        program, report = ncu.find(), file.with_name("report.ncu-rep")
        arguments = ncu.command(program, chosen.functions, chosen.launches, report, output, application)
        log.info("counting %d launches of %d functions: %s", chosen.launches, len(chosen.functions), call)
        printed, returncode = ncu.run(arguments, bench.profiler_limit_s)
        text = output.read_text(errors="replace") if output.exists() else ""
        # If the limit ends the process within a kernel, ncu fails; it has written the launches before.
        cut, complete = file.with_name(CUT).exists(), file.with_name(DONE).exists()
        launches = ncu.parse(text)
        if not launches and report.exists():  # to a version that prints nothing where it writes a report
            launches = ncu.parse(ncu.show(program, report, "raw", limit_s))
        if cut and not launches:
            raise UserError(f"no launch was counted within {bench.profiler_limit_s:g} s: raise profiler_limit_s")
        ncu.check(text + printed, 0 if cut else returncode, bench.site)
        details = ncu.show(program, report, "details", limit_s) if report.exists() else ""
    output.with_name(output.name.replace("ncu", "rules")).write_text(details)
    if not launches:
        raise UserError(f"{output.name}: ncu printed no counters")
    if not complete:
        problems.append(
            f"{len(launches)} of {chosen.launches} launches were counted within {bench.profiler_limit_s:g} s "
            "(profiler_limit_s), the first of the call"
        )
    rules, unread = ncu.parse_rules(details, (launch.number for launch in launches))
    log.info("%d launches; rules said %d things", len(launches), len(rules))
    return launches, rules, problems + unread


def release_memory() -> None:
    """Free the GPU memory of the workload before another process builds it."""
    torch.compiler.reset()  # compiled code holds its modules
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        log.info("%.1f GiB stay reserved while another process profiles", torch.cuda.memory_reserved() / 2**30)


def _profiled_kernels(run_dir: Path) -> dict[str, list[tuple[str, float, int]]]:
    """Return name, milliseconds and launches of the kernels of each measured call."""
    calls: dict[str, list[tuple[str, float, int]]] = {}
    for row in pq.read_table(run_dir / KERNEL_TIMES).to_pylist():
        if row["measured"] and row["kind"] != IDLE:
            calls.setdefault(row["call"], []).append((row["kernel"], row["ms"], row["launches"]))
    if not calls:
        raise UserError("no call was profiled, so that nothing tells which kernels to count")
    return calls


def _write(rows: PartWriter, call: str, launches: list[ncu.Launch]) -> None:
    for launch in launches:
        kind, detail = classify(launch.kernel)
        rows.append(
            call=call,
            launch=launch.number,
            kind=kind.value,
            detail=detail,
            kernel=launch.kernel[:MAX_KERNEL_NAME],
            grid=launch.grid,
            block=launch.block,
            **launch.counters,
        )


# --- the process under ncu -----------------------------------------------------------------------


def main(file: Path) -> None:
    """Run the call once between cudaProfilerStart and cudaProfilerStop, for as long as the task allows."""
    workload, device, task = read_task(file)
    calls = workload.profiled_calls()  # kept: a call lives, without gradients perhaps, until the next is asked for
    call = next((call for call in calls if call.name == task["call"]), None)
    if call is None:
        raise UserError(f"the workload built anew has no call {task['call']!r}")
    warm_up([call], device)

    def cut() -> None:
        """Exit immediately, bypassing cleanup. Kernels are launched without Python's lock."""
        file.with_name(CUT).touch()
        os._exit(0)

    timer = threading.Timer(task["limit_s"], cut)
    timer.daemon = True
    timer.start()
    with torch.cuda.profiler.profile() if device.type == "cuda" else nullcontext():
        call.work()
        synchronize(device)
    file.with_name(DONE).touch()
    timer.cancel()
    workload.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
