"""`batch=auto`: the largest batch that fits on the GPU.

Candidates run eagerly, on copies of one sample, whatever the recipe compiles: compiled code needs no more memory, and
compiling each size would take minutes. So the result is a lower bound for such recipes. A batch fits if PyTorch's
allocator serves its third step without freeing what it has reserved: a step that begins with that is slower than one
of a smaller batch.
"""

import logging
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.source import Source
from inpaint_bench.models.networks import build_networks
from inpaint_bench.models.training_step import StepComponents, TrainingStep
from inpaint_bench.profiling.profile import free_memory

MAX_BATCH = 4096
RESOLUTION = 8  # the result is within 1/8 of the largest power of two that fits

T = TypeVar("T")
log = logging.getLogger(__name__)


def largest_batch(fits: Callable[[int], bool], limit: int = MAX_BATCH) -> int:
    """Return the largest batch for which `fits` is true, to within an eighth; 0 if not even 1 fits.

    Doubles until one does not fit, then bisects. `fits` must be monotonic.
    """
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    if high > limit:
        return low
    step = max(1, low // RESOLUTION)
    # `low` fits and `high` does not: count the steps between them that fit.
    return low + step * bisect(range(low + step, high, step), False, key=lambda batch: not fits(batch))


def search(bench: BenchConfig, device: torch.device, source: Source) -> int:
    """Return the largest batch of this recipe. Raises UserError on a CPU, and if not one image fits."""
    if device.type != "cuda":
        raise UserError("batch=auto searches a GPU's memory; on a CPU set a number")
    # One step of the search is one micro-batch: every candidate can be divided by `accumulate`.
    eager = replace(bench, recipe=replace(bench.recipe, compile="none", cuda_graph=False))
    parts = bench.recipe.accumulate

    results: dict[int, str] = {}

    def fits(micro_batch: int) -> bool:
        candidate = replace(eager, batch=micro_batch * parts)
        retries, _ = attempt(partial(_train_three_steps, candidate, device, source), device)
        # The next candidate needs this memory, also what reference cycles still hold.
        free_memory(device)
        results[micro_batch] = _describe(retries)
        log.info("batch=auto: %d %s", candidate.batch, results[micro_batch])
        return retries == 0

    batch = largest_batch(fits) * parts
    if not batch:
        raise UserError(f"batch=auto: the smallest, {parts}, {results[1]} on {torch.cuda.get_device_name(device)}")
    log.info("batch=auto: %d", batch)
    return batch


def _describe(retries: int | None) -> str:
    if retries is None:
        return "is out of memory"
    return f"reserves memory again, {pluralize(retries, 'time')} a step" if retries else "fits"


def _train_three_steps(bench: BenchConfig, device: torch.device, source: Source) -> int:
    """Train as a candidate would, and return how often the allocator freed memory in the third step to go on.

    The first step allocates the optimizer's moments, and cuDNN tries its algorithms in it.
    """
    networks = build_networks(bench.model, device, inputs=bench.workload.unet_channels)
    components = StepComponents(bench=bench, device=device, networks=networks, source=source)
    levers.apply(components)
    step = TrainingStep(components, lr=0.0, seed=0)
    sample = components.samples()[0, 0]
    batch = {name: torch.stack([value] * bench.batch_size) for name, value in sample.items()}
    for _ in range(2):
        step(batch)
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    step(batch)
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["num_alloc_retries"] - before)


def attempt(work: Callable[[], T], device: torch.device) -> tuple[T | None, str | None]:
    """Return what `work` computes, or else the message if the GPU's memory does not suffice, which is then free."""
    try:
        return work(), None
    except RuntimeError as error:
        if not is_cuda_oom(error):
            raise
        failure = str(error)
    # After the exception is gone, as its frames hold what the work made: else the driver has no memory for a stream.
    free_memory(device)
    return None, failure


def is_cuda_oom(error: BaseException) -> bool:
    """Tell whether a CUDA allocation failed: by PyTorch's exception, or by the message of a library below it."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    messages = ("CUDA out of memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
