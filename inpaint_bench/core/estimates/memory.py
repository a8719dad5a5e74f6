"""Peak memory of a training step, from tables of traced and fitted peaks. Loads neither torch nor polars.

`memory.csv` has the trace of a model with a recipe at one resolution, by `benchmarks/trace_memory.py`: the forward and
backward pass take `fixed_mib + per_image_mib * batch`, the optimizer's step `optimizer_mib`; the peak is the larger.
`memory_factors.csv` has recipes that cannot be traced (compilers, CUDA graphs, fused kernels): factors on both parts of
the trace without them, fitted to measured runs.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from inpaint_bench.core.config.bench import BenchConfig, GpuConfig
from inpaint_bench.core.config.levers import DIVIDED_WEIGHTS, STORED_BITS, RecipeConfig, declaring
from inpaint_bench.core.records import to_record
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys

FOLDER = Path(__file__).parent  # scripts of benchmarks/ write the tables here
WORKLOADS = ("finetune_inpaint", "finetune_text2image")  # whose step was traced
CONTEXT_MIB = 1024  # allowance: CUDA context and libraries took 660 to 860 MiB in the measured runs, NCCL more
SIGNATURE = declaring("memory", True)  # fields of a recipe that change the peak
# Values that need as much as the default, or less: adamw_loop and adamw_fused from a batch of 4 on.
_ALIKE = {"fp16", "adamw_loop", "adamw_fused", "efficient", "flash", "cudnn", "flash4"}
# Models whose traces were compared with measured cells.
COMPARED = ("sd15", "sd15_inpaint", "sd2", "sd2_inpaint", "sdxl_inpaint", "flux_fill")
TRACE_ERROR_PCT = 6.0  # the largest of a traced cell, with grad_checkpoint: `benchmarks/trace_memory.py --check`
UNTRACED = ("unet", "vae_encoder", "compile", "cuda_graph", "optimizer")  # fields whose effect a factor describes
_DEFAULTS = vars(RecipeConfig())


def rows(name: str) -> list[dict[str, str]]:
    """Return a table of the folder of estimates."""
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Peaks of a model's step, MiB of the allocator."""

    fixed_mib: float
    per_image_mib: float
    optimizer_mib: float
    trained_mib: float  # the trained parameters in fp32
    texts_mib: float = 0.0  # a transformer's frozen text encoders; 0 for a UNet's, which stay in memory

    def family(self, model: str) -> str:
        """Return what has common factors: a transformer alone, or all UNets, which are called ""."""
        return model if self.texts_mib else ""

    def of(self, recipe: Mapping[str, Any]) -> Trace:
        """Return the peaks with a recipe: without the text encoders if texts are cached."""
        unused = self.texts_mib if recipe.get("cache_text") else 0.0
        return replace(self, fixed_mib=self.fixed_mib - unused, optimizer_mib=self.optimizer_mib - unused)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What a fitted recipe takes of the trace without it."""

    fixed: float
    per_image: float
    n: int  # measured cells
    error_pct: float | None  # largest, of cells that were left out; None: all have one batch


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Predicted memory of one GPU of a run."""

    allocator_mib: float  # allocated at most; with a CUDA graph reserved, as its pool is not counted as allocated
    error_pct: float | None  # the largest seen of comparable cells; None: not known
    basis: str  # traced, or fitted to n measured cells
    loading_mib: float = 0.0  # before the steps: a transformer beside its text encoders

    @property
    def needed_mib(self) -> float:
        """Return what the card must have."""
        return max(self.allocator_mib, self.loading_mib) + CONTEXT_MIB

    def exceeds(self, card_mib: float) -> bool:
        """Return whether a card has too little memory, even if the peak is as small as the known error allows."""
        if self.error_pct is None:
            return False
        return max(self.allocator_mib, self.loading_mib) / (1 + self.error_pct / 100) + CONTEXT_MIB > card_mib


def usable_mib(gpu: GpuConfig) -> float:
    """Return what a card offers: its GB are 2^30 bytes, ECC takes 1/16 of GDDR, the driver less than 1 %.

    NVML gave 81,079 MiB of an H100 and 143,156 of an H200; 1 % is 81,101 and 142,940.
    """
    ecc = 15 / 16 if gpu.memory_type.startswith("GDDR") else 1.0
    return gpu.memory_gb * 1024 * ecc * 0.99


def least_weights_mib(parameters: float, recipe: Mapping[str, Any], ranks: int) -> float:
    """Return what the weights of a network take at least of each GPU: 16 bits, unless a recipe stores fewer."""
    bits = min(STORED_BITS.get(str(recipe.get(name)), 16) for name in ("linears", "frozen_storage"))
    return parameters * bits / 2**23 / (ranks if recipe.get("sharding") in DIVIDED_WEIGHTS else 1)


def signature(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a recipe that change the peak and differ from the baseline."""
    changed = {name: recipe[name] for name in SIGNATURE if recipe.get(name, _DEFAULTS[name]) != _DEFAULTS[name]}
    return {name: str(value) for name, value in changed.items() if value not in _ALIKE}


def text(fields: Mapping[str, str]) -> str:
    """Return a signature as the tables have it."""
    return " ".join(f"{name}={value}" for name, value in sorted(fields.items()))


@cache
def traces() -> dict[tuple[str, str, int], Trace]:
    """Return the traced peaks by model, signature and resolution."""
    table = rows("memory.csv")
    return {
        (row["model"], row["recipe"], int(row["resolution_px"])): to_record(row, Trace, strict=False) for row in table
    }


@cache
def factors() -> dict[tuple[str, str], Factor]:
    """Return the fitted factors by model and signature. Those of UNets are of the model ""."""
    return {
        (row["model"], row["recipe"]): to_record({**row, "error_pct": row["error_pct"] or None}, Factor, strict=False)
        for row in rows("memory_factors.csv")
    }


def traced(fields: Mapping[str, str]) -> str:
    """Return the signature of the trace that a factor is of."""
    kept = {name: value for name, value in fields.items() if name not in (*UNTRACED, "weights")}
    return text({**kept, "weights": "half"} if fields.get("weights") == "half" else kept)


def predict(model: str, recipe: Mapping[str, Any], px: int, batch: int, ranks: int = 1) -> Peak | None:
    """Return the peak of a step of `batch` images on each of `ranks` GPUs; None if no table has it.

    `recipe` are the fields of a RecipeConfig. Micro-batches, an average of the weights and buckets of gradients of
    several ranks are added to the trace.
    """
    fields = signature(recipe)
    trace, factor = traces().get((model, text(fields), px)), None
    if trace is None:
        trace = traces().get((model, traced(fields), px))
        factor = factors().get((trace.family(model), text(fields))) if trace else None
        if factor is None:
            return None
    if trace is None or "sharding" in fields:
        return None
    loading = trace.fixed_mib if trace.texts_mib else 0.0
    trace, parts = trace.of(recipe), int(recipe.get("accumulate") or 1)
    weights = str(recipe.get("weights", "fp32"))
    gradients = trace.trained_mib * (0.5 if weights.startswith("bf16") else 1.0)
    # What is as large as all gradients: buckets of DDP, or what arrives from every rank.
    copies = {"in_place": 0, "peer_copies": ranks}.get(str(recipe.get("exchange")), 1) if ranks > 1 else 0
    extra = gradients * ((parts > 1) + copies) + trace.trained_mib * bool(recipe.get("ema"))
    fixed, images = trace.fixed_mib, trace.per_image_mib * batch / parts
    if factor:
        mib = fixed * factor.fixed + images * factor.per_image
        basis, error = f"fitted, n = {factor.n}", factor.error_pct
        return Peak(allocator_mib=mib + extra, error_pct=error, basis=basis, loading_mib=loading)
    mib = max(fixed + images, trace.optimizer_mib)
    error = TRACE_ERROR_PCT if model in COMPARED else None
    return Peak(allocator_mib=mib + extra, error_pct=error, basis="traced", loading_mib=loading)


def predict_point(bench: BenchConfig, batch: int | None = None) -> Peak | None:
    """Return the peak of a point's step, at another batch if given."""
    if bench.workload.name not in WORKLOADS or bench.recipe.device != "cuda":
        return None
    size, recipe = bench.batch_size if batch is None else batch, dict(vars(bench.recipe))
    recipe["cache_text"] &= finetune_keys(bench).encodes_texts_once(bench.recipe)
    return predict(bench.model.name, recipe, bench.data.resolution_px, size, bench.ranks)


def largest_batch(bench: BenchConfig) -> int:
    """Return the largest batch that fits the card of a point whose peak is predicted; 0: none does."""
    parts = bench.recipe.accumulate

    def exceeds(size: int) -> bool:
        peak = predict_point(bench, size * parts)
        return peak is not None and peak.needed_mib > usable_mib(bench.gpu)

    return parts * bisect_left(range(1, 10**6), True, key=exceeds)
