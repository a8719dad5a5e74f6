"""`batch=auto`: the largest batch that fits on the GPU.

Tried with eager steps on made-up pictures, whatever the recipe compiles or caches: compiled code needs no more
memory, and each size would be compiled for minutes. So the answer is a lower bound for such recipes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from .. import levers
from ..config import BenchConfig
from ..data.loader import Batch
from ..data.source import Source
from ..errors import UserError
from . import models, objective
from .assembly import Assembly

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
    recipe = replace(bench.recipe, compile="none", cuda_graph=False, cache_image=False, cache_masked=False)
    plain = replace(bench, recipe=replace(recipe, cache_text=False, cache_place="disk", mask_pool=8))
    parts = recipe.accumulate

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
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return True


def _try(bench: BenchConfig, device: torch.device, source: Source) -> None:
    nets = models.build(bench.model, device)
    assembly = Assembly.base(bench, device, nets, source)
    levers.apply(assembly)
    optimizers = assembly.optimizers(nets.trained(), 0.0)
    generator = torch.Generator(device).manual_seed(0)
    batch = _made_up(assembly)
    for _ in range(2):
        loss = objective.loss(assembly, batch, objective.draw(assembly, assembly.micro_batch, generator))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize(device)


def _made_up(assembly: Assembly) -> Batch:
    count, side, device = assembly.micro_batch, assembly.bench.data.resolution_px, assembly.device
    image = torch.zeros(count, 3, side, side, device=device)
    place = torch.zeros(count, dtype=torch.float64, device=device)
    tokens = torch.zeros(count, assembly.nets.context_length, dtype=torch.int64, device=device)
    mask = torch.ones(count, 1, side, side, device=device)
    return {
        "image": image,
        "masked_image": image.clone(),
        "mask": mask,
        "tokens": tokens,
        "latitude": place,
        "longitude": place.clone(),
    }
