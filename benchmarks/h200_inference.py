"""Latency and rate of making images on one GPU: eager and tuned in turns, one repeat per seed.

Every point is a process of its own, forked from one that has imported PyTorch, as in h200_levers.py. A line is printed
after each point: medians of the stages, images/s, and the PSNR against the eager baseline. With --kernels nothing is
measured: the kernels of one batch of images are listed instead.

usage: python -m benchmarks.h200_inference SWEEP [--seed K ...] [--points RECIPE:BATCH ...] [--until SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from benchmarks.h200_levers import PRELOADED, forks, in_child, shuffled
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.hydra_support import register

POINTS = ("baseline:1", "generate_tuned:1", "generate_tuned:16")
STAGES = ("text_ms", "image_ms", "sampling_ms", "decode_ms", "total_ms")
WINDOW = ("workload.warmup_steps=1", "workload.measure_steps=4", "workload.min_measure_s=4")
KERNELS = 40  # listed


def describe(folder: Path) -> str:
    """Return medians of the measured calls of a run directory, and what its manifest says of agreement and memory."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        rows: list[dict[str, Any]] = pq.read_table(folder / "results_sd_inference").to_pylist()
    except FileNotFoundError as error:
        return f"no results: {error}"
    measured = [row for row in rows if row["window_id"].startswith("measure")]
    if not measured:
        return "nothing measured"
    known = {name: [row[name] for row in measured if row[name] is not None] for name in STAGES}
    stages = ", ".join(f"{name} {median(values):.1f}" for name, values in known.items() if values)
    facts, memory = manifest["workload_facts"], manifest["memory"] or {}
    rate = manifest["batch"] / (median(known["total_ms"]) / 1e3)
    return (
        f"{stages}; {rate:.2f} images/s, PSNR {facts['psnr_db']} dB, reserved {memory.get('reserved_peak_mib')} MiB, "
        f"{len(measured)} calls, finite {all(row['finite'] for row in measured)}"
    )


def list_kernels(overrides: list[str]) -> None:
    """Print the kernels of one batch of images, by total time. The profiler makes every kernel a little slower."""
    from hydra import compose, initialize_config_dir

    from inpaint_bench.core.config.parse import parse_config
    from inpaint_bench.core.paths import conf_dir
    from inpaint_bench.profiling.profile import keep_profiler_attached, kernel_totals, record
    from inpaint_bench.ranks.group import choose_device
    from inpaint_bench.workloads import sd_inference

    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        bench = parse_config(compose("config", overrides=overrides))
    device, _ = choose_device(bench)
    keep_profiler_attached()
    workload = sd_inference.build(bench, device)
    workload.images(1)
    totals = kernel_totals(record(lambda: workload.images(2), device))
    for kernel in totals[:KERNELS]:
        us = 1e3 * kernel.ms / kernel.launches
        print(f"{kernel.ms:9.3f} ms {kernel.launches:7d} {us:8.1f} us  {kernel.kind:22} {kernel.name[:90]}")
    ms, launches = sum(kernel.ms for kernel in totals), sum(kernel.launches for kernel in totals)
    print(f"{ms:9.3f} ms {launches:7d} in all", flush=True)
    workload.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="folder of the runs, for merge")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="one repeat for each")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="RECIPE:BATCH")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no point after SECONDS")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of the first point instead")
    parser.add_argument("--with", nargs="*", default=[], dest="more", help="overrides for all points")
    options = parser.parse_args()
    began = time.monotonic()
    register()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # PyTorch then counts GPUs without touching them
    for name in [*PRELOADED, "inpaint_bench.workloads.sd_inference"]:
        if forks(after=name):
            import_module(name)
    print(f"{time.monotonic() - began:6.1f} s imported", flush=True)
    model = [] if any(key.startswith("model=") for key in options.more) else ["model=sd15"]
    common = ["site=local", f"gpu={options.gpu}", "workload=sd_inference", "data.num_images=16", *model, *options.more]
    window = [key for key in WINDOW if not any(more.startswith(key.partition("=")[0]) for more in options.more)]
    points = [(recipe, int(batch)) for recipe, _, batch in (point.rpartition(":") for point in options.points)]
    if options.kernels:
        recipe, batch = points[0]
        list_kernels([*common, *window, f"recipe={recipe}", f"batch={batch}"])
        return
    for seed in options.seed:
        for number, (recipe, batch) in shuffled(points, seed):
            started = time.monotonic()
            if started - began > options.until:
                print(f"time limit reached: not started: seed {seed} {recipe} batch {batch}", flush=True)
                continue
            folder = options.sweep / f"repeat-{seed}" / str(number)
            identity = [f"seed={seed}", f"identity.sweep_id={options.sweep.name}-{seed}", f"identity.point={number}"]
            status = in_child(folder, [*common, *window, *identity, f"recipe={recipe}", f"batch={batch}"])
            ended = time.monotonic()
            print(f"{ended - began:6.1f} s {ended - started:5.1f} s seed {seed} {recipe} batch {batch}: {status}")
            print(f"         {describe(folder)}", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
