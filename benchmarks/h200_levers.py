"""The batch sweeps, the poster's recipes, the ladder and the single levers on one H200, one repeat per seed.

Every point is a process of its own, as with `launch`, but forked from one that has imported PyTorch and never touched
the GPU: GPU time is short, and the imports of a point take as long as its measurement. Each repeat has its own random
order, so that neither drift nor a time limit always affects the same points.

usage: python benchmarks/h200_levers.py DATA SWEEPS --seed K... [--until SECONDS] [--sweep NAMES] [--only RECIPES]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir

from inpaint_bench.core.config.recipe import STUDIES
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.records import Manifest, read_record

BATCHES = (4, 8, 16, 32)
CACHED = ["baseline", "adamw_fused", "cache_image", "cache_masked", "cache_text", "on_gpu"]
RANGES = [(["baseline"], (4, 8, 16, 32, 64, 128)), (CACHED, (8, 16, 32, 64, 128))]
STEPS = ["adamw_fused", "cache_image+cache_masked+cache_text", "on_gpu", "compile", "cuda_graph"]
LEVERS = [
    *("channels_last", "cudnn_benchmark", "tf32", "fp32", "amp_fp16", "bf16_master", "bf16_stochastic"),
    *("attn_math", "attn_efficient", "attn_flash", "attn_cudnn"),
    *("adamw_fused", "adamw_loop", "adamw_8bit"),
    *("compile", "compile_reduce-overhead", "cuda_graph"),
    *("compile+channels_last", "compile+channels_last+force_layout", "compile+pdl"),
    *("cudnn_benchmark+cudnn_all_plans", "vae_encoder_nhwc"),
    *("grad_checkpoint", "accumulate=2", "ema"),
    *("num_workers=0", "num_workers=8", "pin_memory", "pin_memory+non_blocking", "prefetch_factor=4"),
    *("memmap", "hdf5", "webdataset", "stage_shm"),
    *("cache_image+cache_masked", "cache_text"),
]
WINDOW = ["workload.warmup_steps=5", "workload.measure_steps=15", "workload.min_measure_s=8"]

PRELOADED = [
    *("torch", "pyarrow.parquet", "torch._dynamo", "diffusers", "diffusers.models.attention_processor"),
    *("transformers", "transformers.models.clip.modeling_clip", "diffusers.models.unets.unet_2d_condition"),
    *("diffusers.models.autoencoders.autoencoder_kl", "torch.profiler", "inpaint_bench.levers"),
    "inpaint_bench.workloads.finetune_inpaint",
]

T = TypeVar("T")
Point = tuple[str, list[str]]  # its sweep; its overrides, recipe= first


def points() -> list[Point]:
    """Return the points of a repeat, in the order of the studies."""
    result: list[Point] = []
    for recipe, batches in RANGES:
        result += [("batches", [f"recipe=[{','.join(recipe)}]", f"batch={batch}"]) for batch in batches]
    for batch in BATCHES:
        result += [("poster", [f"recipe={name}", f"batch={batch}"]) for name in ("poster_baseline", "poster_optimized")]
        result.append(("poster", ["recipe=poster_optimized", f"batch={batch}", "recipe.channels_last=false"]))
    for study, steps in (("ladder", STEPS), ("one_at_a_time", LEVERS)):
        levers = ",".join(steps).replace("=", r"\=")
        for recipe in STUDIES[study]("baseline", steps):
            choices = split_choices([f"recipe=[{','.join(recipe)}]"])
            result.append((study, [*choices, "batch=16", f"study={study}", f"study.levers=[{levers}]"]))
    return result


def attempt(folder: Path, overrides: list[str]) -> int:
    """Run one point in this process. Return 1 if it raised."""
    from inpaint_bench.run.worker import run

    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            config = compose("config", overrides=overrides)
        run(config, folder, overrides)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def forks(after: str) -> bool:
    """Tell whether a child of a process that imported `after` can use CUDA: not if the import initialised it."""
    child = os.fork()
    if child == 0:
        import_module(after)
        import torch

        grandchild = os.fork()
        if grandchild == 0:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        os._exit(int(os.waitpid(grandchild, 0)[1] != 0))
    return os.waitpid(child, 0)[1] == 0


def in_child(folder: Path, overrides: list[str]) -> str:
    """Run one point in a child. Return its status, its message and its setup time."""
    folder.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder / "run.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(attempt(folder, overrides))
    os.waitpid(child, 0)
    manifest = read_record(folder / "manifest.json", Manifest)
    if manifest is None:
        return "no manifest"
    return f"{manifest.status} {manifest.message or ''} setup {(manifest.workload_facts or {}).get('setup_s')} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("sweeps", type=Path)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one repeat for each")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no point after SECONDS")
    parser.add_argument("--sweep", nargs="*", default=["batches", "poster", "ladder", "one_at_a_time"])
    parser.add_argument("--only", nargs="*", default=[], help="only points with these values of recipe=")
    parser.add_argument("--batch", nargs="*", default=[], help="only points with these batches")
    parser.add_argument("--with", nargs="*", default=[], dest="more", help="overrides for all points")
    options = parser.parse_args()
    began = time.monotonic()
    register()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # PyTorch then counts GPUs without touching them

    for name in PRELOADED:
        if forks(after=name):
            import_module(name)
        else:
            print(f"importing {name} initialises CUDA: every point imports it itself", flush=True)
    print(f"{time.monotonic() - began:6.1f} s imported", flush=True)
    common = ["site=local", "gpu=h200", "data=prepared", f"data.root={options.data}", *WINDOW, *options.more]
    chosen = [point for point in points() if point[0] in options.sweep]
    if options.only:
        chosen = [point for point in chosen if point[1][0].removeprefix("recipe=") in options.only]
    if options.batch:
        chosen = [point for point in chosen if point[1][1].removeprefix("batch=") in options.batch]
    repeats = [(seed, number, point) for seed in options.seed for number, point in shuffled(chosen, seed)]
    for index, (seed, number, (sweep, overrides)) in enumerate(repeats):
        started = time.monotonic()
        if started - began > options.until:
            print(f"time limit reached: {len(repeats) - index} points not started", flush=True)
            break
        name = f"{sweep}-{seed}"
        identity = [f"seed={seed}", f"identity.sweep_id={name}", f"identity.point={number}"]
        result = in_child(options.sweeps / name / str(number), [*common, *identity, *overrides])
        ended = time.monotonic()
        print(f"{ended - began:6.1f} s {ended - started:5.1f} s seed {seed} {' '.join(overrides)} {result}", flush=True)


def shuffled(points: list[T], seed: int) -> list[tuple[int, T]]:
    """Return the points with their numbers, in the order of that repeat."""
    order = list(enumerate(points))
    random.Random(seed).shuffle(order)
    return order


if __name__ == "__main__":
    main()
