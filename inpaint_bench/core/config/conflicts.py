"""Levers that exclude each other, or that workload or data exclude: what the configuration tells before submission.

What depends on the machine is in `available` of the lever (inpaint_bench/levers).
"""

from collections.abc import Callable
from typing import Any

from .bench import BenchConfig
from .levers import DIVIDED_WEIGHTS, INDUCTOR_GRAPHS
from .recipe import levers

_NO_GPU = "needs a GPU, and this recipe runs on the CPU"
# Levers that no recipe of a CPU can have.
_NEED_A_GPU = {
    *("tf32", "tf32_convolutions", "cudnn_benchmark", "cudnn_benchmark_limit", "force_layout", "pdl", "cuda_graph"),
    *("compress", "pin_memory", "non_blocking"),
}
# Levers, the field without which they have no effect, and the reason.
_NEEDS = {
    "volume_unet": ("channels_last", "its kernels read channels-last volumes: set recipe.channels_last too"),
    "cudnn_benchmark_limit": ("cudnn_benchmark", "without recipe.cudnn_benchmark=true cuDNN measures nothing"),
    "checkpoint_keeps": ("grad_checkpoint", "nothing is computed again: set recipe.grad_checkpoint=true too"),
    **dict.fromkeys(("force_layout", "pdl"), ("compile", "it is a switch of torch.compile: set recipe.compile too")),
    **dict.fromkeys(
        ("lora_alpha", "lora_targets", "frozen_storage", "lora_text_encoder"),
        ("lora_rank", "there are no adapters: set recipe.lora_rank too"),
    ),
    "prefetch_factor": ("num_workers", "without loader processes nothing is prefetched"),
    "mask_pool": ("cache_masked", "masks come from a pool only with cache_masked"),
}


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


def _attention(bench: BenchConfig) -> str | None:
    recipe = bench.recipe
    if recipe.attention == "flash4" and recipe.unet != "nhwc" and not bench.model.transformer:
        return f"diffusers' UNet of {bench.model.name} cannot call it: set recipe.unet=nhwc too"
    wide = recipe.precision == "fp32" and recipe.weights == "fp32" and recipe.device == "cuda"
    if wide and recipe.attention in ("flash", "flash4", "cudnn"):
        return f"{recipe.attention} attention needs 16-bit inputs"
    if recipe.attention != "flash4" and recipe.grad_checkpoint and not bench.model.transformer:
        return "grad_checkpoint recomputes activations outside the choice of a kernel: use one of the two"
    if recipe.device == "cpu" and recipe.attention not in ("math", "flash"):
        return _NO_GPU
    return None


def _compile(bench: BenchConfig) -> str | None:
    recipe, has = bench.recipe, bench.workload.capabilities
    if recipe.compile == "tensorrt":
        if "backward" in has or "unet" not in has:
            return "TensorRT has no backward pass: it is for making images (workload=sd_inference)"
        if recipe.unet == "nhwc" or recipe.cuda_graph:
            return "it compiles diffusers' UNet, and not within a CUDA graph: set neither unet=nhwc nor cuda_graph"
        return _NO_GPU if recipe.device == "cpu" else None
    if recipe.compile == "blocks" and "unet" not in has:
        return "this network has no repeated transformer blocks: set recipe.compile=default"
    if recipe.compile in INDUCTOR_GRAPHS and recipe.cuda_graph:
        return f"compile={recipe.compile} makes CUDA graphs of its own, cuda_graph cannot enclose them"
    if recipe.compile in INDUCTOR_GRAPHS and recipe.accumulate > 1:
        return f"the CUDA graphs of compile={recipe.compile} overwrite gradients that accumulate (pytorch#169545)"
    if recipe.unet == "nhwc":
        return "the channels-last UNet has its own kernels, and torch.compile could only break its graph around them"
    return None


def _several(bench: BenchConfig) -> str | None:
    return None if bench.ranks > 1 else "gpus=1 exchanges nothing: set gpus too, or launch that point without it"


# What divided weights do not go with: fields of the recipe, their values that they take, and the reason.
_ALONE = "rank 0 reads it back by a pass of the UNet alone, and has a part of the weights only"
_NOT_WITH_PARTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("unet", ("diffusers",), "the channels-last UNet keeps its weights packed for its kernels"),
    ("compile", ("none",), "the exchange in every block would break the one graph that is compiled"),
    ("precision", ("bf16", "fp32"), "fp16's loss scaling would look for overflow in a part of the gradients only"),
    ("ema", (False,), "the average is of whole weights, which no GPU has"),
    ("channels_last", (False,), _ALONE),
    ("attention", ("default",), _ALONE),
)
_NOT_WITH_TENSOR = (("linears", ("default",), "its products take whole weights"), *_NOT_WITH_PARTS)
# In a pipeline blocks are whole, and rank 0 can pass through its own alone.
_NOT_WITH_A_PIPELINE = (
    ("compile", ("none", "blocks"), "other ranks have a part of that graph: set recipe.compile=blocks"),
    *(row for row in _NOT_WITH_PARTS if row[0] in ("precision", "ema")),
)


def _sharding(bench: BenchConfig) -> str | None:
    recipe, workload = bench.recipe, bench.workload
    if reason := _several(bench):
        return reason
    if recipe.weights != "fp32" and not (recipe.sharding == "pipeline" and recipe.lora_rank):
        return f"weights={recipe.weights} have an AdamW of their own with one state for all, which is not divided"
    if recipe.optimizer == "adamw_8bit":
        return "bitsandbytes nests its state, which is not brought together again for a checkpoint"
    if recipe.cuda_graph:
        return "what the ranks send each other for it is not captured in a CUDA graph"
    if recipe.sharding not in DIVIDED_WEIGHTS:
        return None
    rows = {"pipeline": _NOT_WITH_A_PIPELINE, "tensor": _NOT_WITH_TENSOR}.get(recipe.sharding, _NOT_WITH_PARTS)
    for name, taken, reason in rows:
        if (value := getattr(recipe, name)) not in taken:
            return f"not with recipe.{name}={str(value).lower()}: {reason}"
    if workload.validates or getattr(workload, "save_weights", False):
        return (
            "validation, samples and saved weights need whole weights on rank 0, which has a part only: set "
            "workload.validate_every=0, sample_images=0 and save_weights=false, or continue with sharding=none"
        )
    return None


# Fields with several values that exclude different things.
CONFLICTS: dict[str, Callable[[BenchConfig], str | None]] = {
    "weights": _weights,
    "attention": _attention,
    "compile": _compile,
    "sharding": _sharding,
}


def _conflict(field: str, bench: BenchConfig) -> str | None:
    """Return why the lever of any other field cannot be in this recipe."""
    recipe, kind = bench.recipe, bench.data.kind
    cuda, nhwc, no_image = recipe.device == "cuda", recipe.unet == "nhwc", recipe.cache_image and recipe.cache_masked
    match field:
        case "precision" if (
            recipe.precision == "fp16" and recipe.cuda_graph and "backward" in bench.workload.capabilities
        ):
            return "fp16's loss scaling reads a value from the device in every step, which a CUDA graph cannot"
        case "tf32_convolutions" if recipe.tf32:
            return "tf32 has convolutions too: set one of the two"
        case "encoders" if recipe.vae_encoder == "nhwc":
            return "vae_encoder=nhwc has types of its own"
        case "vae_encoder" if no_image:
            return "no image is encoded in the step: both come from caches"
        case "volume_unet" if cuda and not recipe.cudnn_benchmark:
            return (
                "cuDNN guesses a very slow kernel for its padded channels: let it measure, recipe.cudnn_benchmark=true"
            )
        case "optimizer" if recipe.optimizer == "adamw_8bit" and recipe.cuda_graph:
            return "bitsandbytes counts its steps on the host, which a CUDA graph cannot replay"
        case "optimizer" if recipe.optimizer == "adamw_8bit" and recipe.channels_last:
            return "bitsandbytes makes every weight contiguous when it updates it, which undoes channels_last"
        case "linears" if nhwc:
            return "the channels-last UNet multiplies in 16 bits: set recipe.unet=diffusers"
        case "linears" if recipe.frozen_storage != "default":
            return "it stores frozen weights itself: leave recipe.frozen_storage out"
        case "linears" if recipe.precision == "fp32":
            return "FP8 products return 16-bit numbers: set recipe.precision=bf16"
        case "grad_checkpoint" if nhwc:
            return "the channels-last UNet keeps its activations"
        case "checkpoint_keeps" if recipe.compile == "none" and recipe.attention != "default":
            return "without compile=blocks it recomputes outside the choice of a kernel: set that, or attention=default"
        case "accumulate" if not bench.searches_batch and bench.batch_size % recipe.accumulate:
            return f"batch {bench.batch} cannot be divided into {recipe.accumulate} equal micro-batches"
        case "lora_rank" if nhwc:
            return "the channels-last UNet keeps its weights packed for its kernels: set recipe.unet=diffusers"
        case "lora_rank" if recipe.weights not in ("fp32", "half"):
            return f"weights={recipe.weights} is a way to train them, and LoRA freezes them: set fp32 or half"
        case "lora_rank" if recipe.sharding not in ("none", "pipeline"):
            others = f"set sharding=none, or pipeline for frozen weights, not {recipe.sharding}"
            return f"adapters are too small to be divided among GPUs: {others}"
        case "lora_text_encoder" if recipe.cache_text:
            return "a cache of text states is of a text encoder that does not change: leave cache_text out"
        case "lora_text_encoder" if bench.model.text_encoder_2:
            return "it adapts one text encoder, and SDXL has two"
        case "unet" if cuda and recipe.weights == "fp32":
            return "its kernels do not know autocast: set 16-bit weights too (recipe.weights=bf16_split)"
        # One GPU takes it and exchanges nothing, so that one sweep can have 1, 2 and 4.
        case "exchange" if recipe.sharding != "none":
            return f"sharding={recipe.sharding} has an exchange of its own"
        case "exchange" if recipe.exchange == "peer_copies" and bench.nodes > 1:
            return "a GPU writes into the memory of GPUs of its own node only: set exchange=in_place"
        case "bucket_mb" | "bucket_view" | "static_graph" | "compress":
            instead = {"fsdp2": "FSDP2", "pipeline": "the pipeline"}.get(recipe.sharding)
            instead = instead if recipe.exchange == "default" else f"exchange={recipe.exchange}"
            return _several(bench) or (f"{instead} takes the place of DDP, which has this switch" if instead else None)
        case "cache_storage" if not (recipe.cache_image or recipe.cache_masked or recipe.cache_text):
            return "nothing is cached: add cache_image, cache_masked or cache_text"
        case "format" | "stage_to" if no_image:
            return "with images and masked images cached no image is read"
        case "format" | "stage_to" | "cache_image" | "cache_masked" | "cache_text" if kind != "prepared":
            return f"needs data=prepared, this is data={kind}"
    return None


def conflict(field: str, bench: BenchConfig) -> str | None:
    """Return why the lever of a field cannot be in this recipe, None if it can."""
    needed, reason = _NEEDS.get(field, ("", ""))
    if needed and getattr(bench.recipe, needed) in (False, 0, "none"):
        return reason
    if field in _NEED_A_GPU and bench.recipe.device == "cpu":
        return _NO_GPU
    return CONFLICTS[field](bench) if field in CONFLICTS else _conflict(field, bench)


def lever_problem(bench: BenchConfig) -> str | None:
    """Return the first lever that cannot be in this recipe, and why. In a study it is unavailable, else refused."""
    reasons = ((name, conflict(field, bench)) for field, name in levers(bench.recipe).items())
    return next((f"lever {name}: {reason}" for name, reason in reasons if reason), None)
