"""Levers that exclude each other, or that the workload excludes: what the configuration tells before submission.

What depends on the machine is in `available` of the lever (inpaint_bench/levers).
"""

from __future__ import annotations

from collections.abc import Callable

from .bench import BenchConfig
from .recipe import levers


def _precision(bench: BenchConfig) -> str | None:
    trains = "backward" in bench.workload.capabilities
    if bench.recipe.precision == "fp16" and bench.recipe.cuda_graph and trains:
        return "fp16's loss scaling reads a value from the device in every step, which a CUDA graph cannot"
    return None


def _weights(bench: BenchConfig) -> str | None:
    recipe = bench.recipe
    if "optimizer" not in bench.workload.capabilities:
        return None if recipe.weights == "half" else "nothing is trained here: set recipe.weights=half"
    if recipe.weights == "half":
        if not recipe.lora_rank:
            return (
                "without fp32 masters small updates are lost: it is for making images (workload=sd_inference), and "
                "for weights that LoRA freezes (recipe.lora_rank=4)"
            )
        return "precision=fp32 has no half" if recipe.precision == "fp32" else None
    if recipe.precision == "fp16":
        return "bf16 weights and fp16 autocast exclude each other"
    if recipe.optimizer != "adamw":
        return (
            f"bf16 weights have an AdamW of their own, which excludes optimizer={recipe.optimizer}: set "
            "recipe.optimizer=adamw"
        )
    return None


def _optimizer(bench: BenchConfig) -> str | None:
    if bench.recipe.optimizer == "adamw_8bit" and bench.recipe.cuda_graph:
        return "bitsandbytes counts its steps on the host, which a CUDA graph cannot replay"
    if bench.recipe.optimizer == "adamw_8bit" and bench.recipe.channels_last:
        return "bitsandbytes makes every weight contiguous when it updates it, which undoes channels_last"
    return None


def _attention(bench: BenchConfig) -> str | None:
    recipe = bench.recipe
    if recipe.attention == "flash4" and recipe.unet != "nhwc" and not bench.model.transformer:
        return f"diffusers' UNet of {bench.model.name} cannot call it: set recipe.unet=nhwc too"
    wide = recipe.precision == "fp32" and recipe.weights == "fp32" and recipe.device == "cuda"
    if wide and recipe.attention in ("flash", "flash4", "cudnn"):
        return f"{recipe.attention} attention needs 16-bit inputs"
    return None


def _linears(bench: BenchConfig) -> str | None:
    if bench.recipe.unet == "nhwc":
        return "the channels-last UNet multiplies in 16 bits: set recipe.unet=diffusers"
    if bench.recipe.frozen_storage != "default":
        return "it stores frozen weights itself: leave recipe.frozen_storage out"
    if bench.recipe.precision == "fp32":
        return "FP8 products return 16-bit numbers: set recipe.precision=bf16"
    return None


def _grad_checkpoint(bench: BenchConfig) -> str | None:
    return "the channels-last UNet keeps its activations" if bench.recipe.unet == "nhwc" else None


def _accumulate(bench: BenchConfig) -> str | None:
    if not bench.searches_batch and bench.batch_size % bench.recipe.accumulate:
        return f"batch {bench.batch} cannot be divided into {bench.recipe.accumulate} equal micro-batches"
    return None


def _compile(bench: BenchConfig) -> str | None:
    recipe = bench.recipe
    if recipe.compile == "tensorrt":
        return None  # its own reasons come with what is installed
    if recipe.compile == "blocks" and "unet" not in bench.workload.capabilities:
        return "this network has no repeated transformer blocks: set recipe.compile=default"
    if recipe.cuda_graph and recipe.compile in ("reduce-overhead", "max-autotune"):
        return f"compile={recipe.compile} makes CUDA graphs of its own, cuda_graph cannot enclose them"
    if recipe.unet == "nhwc":
        return "the channels-last UNet has its own kernels, and torch.compile could only break its graph around them"
    return None


def _lora(bench: BenchConfig) -> str | None:
    recipe = bench.recipe
    if recipe.unet == "nhwc":
        return "the channels-last UNet keeps its weights packed for its kernels: set recipe.unet=diffusers"
    if recipe.weights not in ("fp32", "half"):
        return f"weights={recipe.weights} is a way to train them, and LoRA freezes them: set fp32 or half"
    if recipe.sharding not in ("none", "pipeline"):
        others = f"set sharding=none, or pipeline for frozen weights, not {recipe.sharding}"
        return f"adapters are too small to be divided among GPUs: {others}"
    return None


def _unet(bench: BenchConfig) -> str | None:
    if bench.recipe.device == "cuda" and bench.recipe.weights == "fp32":
        return "its kernels do not know autocast: set 16-bit weights too (recipe.weights=bf16_split)"
    return None


CONFLICTS: dict[str, Callable[[BenchConfig], str | None]] = {
    "precision": _precision,
    "weights": _weights,
    "optimizer": _optimizer,
    "attention": _attention,
    "linears": _linears,
    "grad_checkpoint": _grad_checkpoint,
    "accumulate": _accumulate,
    "compile": _compile,
    "lora_rank": _lora,
    "unet": _unet,
}


def conflict(field: str, bench: BenchConfig) -> str | None:
    """Return why the lever of a field cannot be in this recipe, None if it can."""
    return CONFLICTS[field](bench) if field in CONFLICTS else None


def lever_problem(bench: BenchConfig) -> str | None:
    """Return the first lever that cannot be in this recipe, and why. In a study it is unavailable, else refused."""
    reasons = ((name, conflict(field, bench)) for field, name in levers(bench.recipe).items())
    return next((f"lever {name}: {reason}" for name, reason in reasons if reason), None)
