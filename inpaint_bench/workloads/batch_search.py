"""`batch=auto`: the largest batch that fits on the GPU.

Tried with eager steps on one sample many times over, whatever the recipe compiles: compiled code needs no more
memory, and each size would be compiled for minutes. So the answer is a lower bound for such recipes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from inpaint_bench import levers
from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.source import Source
from inpaint_bench.models import builders
from inpaint_bench.models import loss as objective
from inpaint_bench.models.assembly import Assembly
from inpaint_bench.models.ema import Average

LIMIT = 4096
FINENESS = 8  # the answer is within 1/8 of the largest power of two that fits

log = logging.getLogger(__name__)


def largest(fits: Callable[[int], bool], limit: int = LIMIT) -> int:
    """The largest batch for which `fits` holds, to within an eighth; 0 where not even 1 does.

    Doubles until one does not fit, then halves the gap. `fits` must be monotonic.
    """
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    if high > limit:
        return low
    step = max(1, low // FINENESS)
    while high - low > step:
        middle = low + (high - low) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search(bench: BenchConfig, device: torch.device, source: Source) -> int:
    """The largest batch of this recipe. Raises UserError on a processor, and where not one image fits."""
    if device.type != "cuda":
        raise UserError("batch=auto searches a GPU's memory; on a processor name a batch")
    plain = replace(bench, recipe=replace(bench.recipe, compile="none", cuda_graph=False))
    parts = bench.recipe.accumulate

    def fits(count: int) -> bool:
        return _fits(replace(plain, batch=count * parts), device, source)

    found = largest(fits) * parts
    if not found:
        raise UserError(f"batch=auto: not even {parts} image(s) fit on {torch.cuda.get_device_name(device)}")
    log.info("batch=auto: %d", found)
    return found


def _fits(bench: BenchConfig, device: torch.device, source: Source) -> bool:
    """Two steps, the second with the optimiser's moments in place."""
    try:
        _try(bench, device, source)
    except RuntimeError as error:
        if not is_cuda_oom(error):
            raise
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def _try(bench: BenchConfig, device: torch.device, source: Source) -> None:
    nets = builders.build(bench.model, device)
    assembly = Assembly.base(bench, device, nets, source)
    levers.apply(assembly)
    optimizers = assembly.optimizers(nets.trained(), 0.0)
    average = Average(nets.trained(), assembly.ema_decay) if assembly.ema_decay else None
    generator = torch.Generator(device).manual_seed(0)
    count = assembly.micro_batch
    batch = {name: torch.stack([value] * count).to(device) for name, value in assembly.samples()[0, 0].items()}
    for _ in range(2):
        loss = objective.loss(assembly, batch, objective.draw(assembly, count, generator))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if average:
            average.update()
    torch.cuda.synchronize(device)


def is_cuda_oom(error: BaseException) -> bool:
    """Tell whether a CUDA allocation failed: by PyTorch's exception, or by the words of a library below it."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    words = ("CUDA out of memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
