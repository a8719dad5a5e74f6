"""Batches, the poster's two studies and the ladder, one after the other on one GPU, a repeat per seed.

Every point is a process of its own, as from `launch`, but forked from one that has imported PyTorch and never
touched the GPU: time on a GPU is short, and the imports of a point take as long as its measurement. The order of
a repeat is shuffled by its seed, so that neither drift nor a time limit always meets the same points.

usage: python benchmarks/h200_levers.py DATA SWEEPS --seed K... [--until SECONDS] [--sweep NAMES] [--only RECIPES]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from hydra import compose, initialize_config_dir

from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe import ladder, one_at_a_time

BATCHES = (4, 8, 16, 32)
CACHED = ["baseline", "adamw_fused", "cache_image", "cache_masked", "cache_text", "on_gpu"]
RANGES = [(["baseline"], (4, 8, 16, 32, 64, 128)), (CACHED, (8, 16, 32, 64, 128))]
STEPS = ["adamw_fused", "cache_image+cache_masked+cache_text", "on_gpu", "compile", "cuda_graph"]
LEVERS = [
    *("channels_last", "cudnn_benchmark", "tf32", "fp32", "amp_fp16", "bf16_master", "bf16_stochastic"),
    *("attn_math", "attn_efficient", "attn_flash", "attn_cudnn"),
    *("adamw_fused", "adamw_loop", "adamw_8bit"),
    *("compile", "compile_reduce-overhead", "cuda_graph"),
    *("grad_checkpoint", "accumulate_2", "ema"),
    *("workers_0", "workers_8", "pin_memory", "pin_memory+non_blocking", "prefetch_4"),
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

Point = tuple[str, list[str]]  # sweep it belongs to, overrides


def points() -> list[Point]:
    """Every point of a repeat, in the order of the studies."""
    found: list[Point] = [
        ("batches", [f"batch={b}", f"recipe=[{','.join(r)}]"]) for r, batches in RANGES for b in batches
    ]
    wide = [("poster", [f"batch={b}", f"recipe={r}"]) for b in BATCHES for r in ("poster_baseline", "poster_optimized")]
    found += wide
    for study, make, steps in (("ladder", ladder, STEPS), ("one_at_a_time", one_at_a_time, LEVERS)):
        asked = ["batch=16", f"study={study}", f"study.levers=[{','.join(steps)}]"]
        found += [(study, [*asked, f"recipe=[{','.join(recipe)}]"]) for recipe in make("baseline", steps)]
    return found


def attempt(folder: Path, overrides: list[str]) -> int:
    """One point, here. Returns 1 where it raised."""
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
    """Whether a child of a process that imported `after` can use CUDA: not where that asked for the devices."""
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
    """One point in a child. Returns its status, and what it says where it did not complete."""
    folder.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder / "run.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(attempt(folder, overrides))
    os.waitpid(child, 0)
    found = json.loads((folder / "manifest.json").read_text()) if (folder / "manifest.json").exists() else {}
    facts = found.get("workload_facts") or {}
    return f"{found.get('status')} {found.get('message') or ''} setup {facts.get('setup_s')} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("sweeps", type=Path)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="a repeat for each")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no point after SECONDS")
    parser.add_argument("--sweep", nargs="*", default=["batches", "poster", "ladder", "one_at_a_time"])
    parser.add_argument("--only", nargs="*", default=[], help="points with one of these recipes")
    parser.add_argument("--with", nargs="*", default=[], dest="more", help="overrides for every point")
    options = parser.parse_args()
    begun = time.monotonic()
    register()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # PyTorch then counts GPUs without touching them

    for name in PRELOADED:
        if forks(after=name):
            import_module(name)
        else:
            print(f"{name} touches the GPU when it is imported: every point does it itself", flush=True)
    print(f"{time.monotonic() - begun:6.1f} s imported", flush=True)
    common = ["site=local", "gpu=h200", "data=prepared", f"data.root={options.data}", *WINDOW, *options.more]
    chosen = [point for point in points() if point[0] in options.sweep]
    if options.only:
        chosen = [point for point in chosen if point[1][-1].removeprefix("recipe=") in options.only]
    repeats = [(seed, number, point) for seed in options.seed for number, point in shuffled(chosen, seed)]
    for place, (seed, number, (sweep, overrides)) in enumerate(repeats):
        started = time.monotonic()
        if started - begun > options.until:
            print(f"time is up: {len(repeats) - place} points left", flush=True)
            break
        name = f"{sweep}-{seed}"
        identity = [f"seed={seed}", f"identity.sweep_id={name}", f"identity.point={number}"]
        said = in_child(options.sweeps / name / str(number), [*common, *identity, *overrides])
        ended = time.monotonic()
        print(f"{ended - begun:6.1f} s {ended - started:5.1f} s seed {seed} {' '.join(overrides)} {said}", flush=True)


def shuffled(points: list[Point], seed: int) -> list[tuple[int, Point]]:
    """The points with their numbers, in the order of that repeat."""
    order = list(enumerate(points))
    random.Random(seed).shuffle(order)
    return order


if __name__ == "__main__":
    main()
