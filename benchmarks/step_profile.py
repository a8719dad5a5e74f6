"""Profile one training step of each recipe: kernel time by class, achieved rates, floors, heaviest kernels, idle gaps.

The arguments are those of `launch`, sweeps included; every point is built by its workload as in a run. With a CUDA
graph two steps are profiled, the last eager one before the capture and a replay. A table per step is printed and
written as JSON to `--out`, with `--trace` also the trace, for Perfetto. On a CPU the table shows operators.

usage: python -m benchmarks.step_profile [--out FOLDER] [--load-s SECONDS] [--trace] OVERRIDE ...
    python -m benchmarks.step_profile --out profiles gpu=h200 data=prepared data.root=DATA batch=16 \\
        recipe=baseline,compiled,tuned,tuned_hopper
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import msgspec
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from inpaint_bench import workloads
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.config import recipe
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.records import write_record
from inpaint_bench.models.training_step import WARMUP_STEPS
from inpaint_bench.profiling.profile import idle_gaps, keep_profiler_attached, kernel_totals, record, synchronize
from inpaint_bench.ranks.group import choose_device

from . import step_record, step_work
from .step_record import GAPS, StepProfile

TIMED_STEPS = 10  # without the profiler


def points(overrides: list[str]) -> Iterator[list[str]]:
    """Return the overrides of every point of a sweep. Raises UserError for what Hydra does not read."""
    parser, choices = OverridesParser.create(), []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(f"{text}: {str(error).splitlines()[0]}; give overrides as `launch` takes them") from None
        key = override.get_key_element()
        sweep = override.is_sweep_override()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if sweep else [text])
    for point in product(*choices):
        yield split_choices(point)


def profile_point(bench: BenchConfig, overrides: list[str], load_s: float, trace: Path | None) -> Iterator[StepProfile]:
    """Build the point's workload and profile a step of each phase. Raises UserError if it cannot run here."""
    if bench.workload.name != "finetune_inpaint":
        raise UserError(f"workload={bench.workload.name} has no training step; profile finetune_inpaint")
    device, _ = choose_device(bench)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    workload = workloads.load(bench, device)
    try:
        size = workload.images_per_step
        bench.batch = size  # as found, for batch=auto
        work = step_work.count(bench, msgspec.to_builtins(workload.facts))

        def run_step() -> None:
            workload.step(workload.next_batch())

        def profiled(phase: str, step_ms: float | None) -> StepProfile:
            batch = workload.next_batch()
            file = None if trace is None else trace.with_name(f"{trace.name}-{phase}.trace.json.gz")
            events = record(lambda: workload.step(batch), device, file)
            kernels = kernel_totals(events)
            idle = idle_gaps(events) if device.type == "cuda" else []
            ends = [event.end_us for event in events]
            return StepProfile(
                recipe=recipe.name(bench),
                overrides=overrides,
                phase=phase,
                gpu=bench.gpu.name,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                torch=str(torch.__version__),
                model=bench.model.name,
                batch=size,
                resolution_px=bench.data.resolution_px,
                images=size,
                step_ms=step_ms,
                span_ms=(max(ends) - min(event.start_us for event in events)) / 1e3,
                kernel_ms=sum(kernel.ms for kernel in kernels),
                idle_ms=sum(gap.us for gap in idle) / 1e3,
                idle_gaps=len(idle),
                norm_pointwise_floor_ms=work.norm_pointwise_floor_ms,
                classes=step_record.class_totals(kernels, work.flop, work.floors_ms),
                kernels=kernels,
                gaps=idle[:GAPS],
            )

        if bench.recipe.cuda_graph:
            # The capture follows WARMUP_STEPS eager steps; the last of them is profiled.
            for _ in range(WARMUP_STEPS - 1):
                run_step()
            yield profiled("eager", None)
            run_step()  # captures
            yield profiled("replay", _time_steps(run_step, device, load_s))
        else:
            for _ in range(WARMUP_STEPS):
                run_step()
            phase = "eager" if device.type == "cuda" else "operators"
            yield profiled(phase, _time_steps(run_step, device, load_s))
    finally:
        workload.close()


def _time_steps(run_step: Callable[[], None], device: torch.device, load_s: float) -> float:
    """Return the mean time of a few steps, in ms, after so many seconds of load: clocks fall at the power limit."""
    began_s = time.perf_counter()
    while True:
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(TIMED_STEPS):
            run_step()
        synchronize(device)
        end_s = time.perf_counter()
        if end_s - began_s >= load_s:
            return (end_s - start_s) * 1e3 / TIMED_STEPS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiles"))
    parser.add_argument("--trace", action="store_true", help="keep the traces, tens of megabytes each")
    parser.add_argument("--load-s", type=float, default=5.0, help="load before the timed and profiled step (5)")
    options, overrides = parser.parse_known_args(argv)
    register()
    keep_profiler_attached()
    options.out.mkdir(parents=True, exist_ok=True)
    failed, began_s = 0, time.monotonic()
    for number, point in enumerate(points(overrides)):
        try:
            with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
                bench = parse_config(compose("config", overrides=point))
            name = f"{number}-{recipe.name(bench)}-batch-{bench.batch}"
            trace = options.out / name if options.trace else None
            for result in profile_point(bench, point, options.load_s, trace):
                write_record(options.out / f"{name}-{result.phase}.json", result)
                print(f"[{time.monotonic() - began_s:.1f} s]\n{step_record.describe(result)}\n", flush=True)
        # The other points are profiled all the same: time on a GPU is scarce.
        except (UserError, HydraException, RuntimeError) as error:
            failed += 1
            print(f"{' '.join(point)}: {error}", file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
