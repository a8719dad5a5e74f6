"""Levers: each one switch of a recipe, that says whether it can run here, does it, and reads back what is so.

Adding one: a class here, its field in `RecipeConfig`, a YAML in conf/recipe. A lever that cannot run is an
error with its reason, never another one in its place.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from inpaint_bench.core import recipe as recipes
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.core.records import LeverReport

from . import attention, caches, compile, data_path, layout, memory, optimizers, precision
from .base import Lever, Machine

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config import BenchConfig
    from inpaint_bench.models.assembly import Assembly

    from .observation import Running

# In the order in which they are applied: weights and layout before what wraps the networks.
REGISTRY: tuple[Lever, ...] = (
    precision.Autocast(),
    precision.Tf32(),
    precision.Weights(),
    layout.ChannelsLast(),
    layout.CudnnBenchmark(),
    attention.Attention(),
    memory.GradCheckpoint(),
    memory.Accumulate(),
    memory.Ema(),
    optimizers.Optimizer(),
    data_path.Format(),
    data_path.Stage(),
    data_path.Decode(),
    data_path.Workers(),
    data_path.Prefetch(),
    data_path.PinMemory(),
    data_path.NonBlocking(),
    caches.Image(),
    caches.Masked(),
    caches.Text(),
    caches.Place(),
    caches.Pool(),
    compile.Compile(),
    compile.CudaGraph(),
)


def asked(bench: BenchConfig) -> dict[Lever, str]:
    """The levers of a recipe that are not as in the baseline, with their names."""
    names = recipes.levers(bench.recipe)
    return {lever: names[lever.field] for lever in REGISTRY if lever.field in names}


def require(bench: BenchConfig, device: torch.device) -> None:
    """Raises UnavailableError naming the first lever that cannot run here, and why."""
    machine = Machine(bench=bench, device=device)
    for lever, name in asked(bench).items():
        if reason := lever.available(machine):
            raise UnavailableError(f"lever {name}: {reason}")


def apply(assembly: Assembly) -> None:
    """Change the baseline's assembly into the recipe's."""
    for lever in asked(assembly.bench):
        lever.apply(assembly)


def requested(bench: BenchConfig) -> list[LeverReport]:
    """Return the levers of the recipe, before anything is read back."""
    return [
        LeverReport(
            name=name, field=lever.field, requested=getattr(bench.recipe, lever.field), evidence="not read back"
        )
        for lever, name in asked(bench).items()
    ]


def verify(workload: Running) -> list[LeverReport]:
    """Return the levers with what is really in effect. Runs further steps: only after the last one that counts."""
    from .observe import observe

    rows = requested(workload.bench)
    if not rows:
        return []
    seen = observe(workload)
    return [
        msgspec.structs.replace(row, **asdict(lever.verify(workload, seen)))
        for row, lever in zip(rows, asked(workload.bench), strict=True)
    ]
