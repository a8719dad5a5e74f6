"""Levers: each one switch of a recipe, with `available`, `apply` and `verify`.

To add one: a class in a module of this package, with `field` set to its field in `RecipeConfig`; an instance in
REGISTRY; and conf/recipe/<name>.yaml, named as `core.recipe.lever_name` returns. A lever that cannot run is an error
with its reason; nothing is substituted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.core.records import LeverReport
from inpaint_bench.models.networks import set_switches

from . import data_path, execution, lora, nhwc, numerics, parallel
from .base import Lever

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config.bench import BenchConfig
    from inpaint_bench.data.loader import Batches
    from inpaint_bench.models.components import StepComponents
    from inpaint_bench.models.training_step import TrainingStep

# In the order in which they are applied: networks, weights and layout before what wraps the networks.
REGISTRY: tuple[Lever, ...] = (
    nhwc.Unet(),
    nhwc.VaeEncoder(),
    numerics.Autocast(),
    numerics.Tf32(),
    numerics.Weights(),
    lora.Rank(),
    lora.Alpha(),
    lora.Targets(),
    lora.TextEncoder(),
    execution.ChannelsLast(),
    execution.CudnnBenchmark(),
    execution.CudnnBenchmarkLimit(),
    execution.Attention(),
    execution.GradCheckpoint(),
    execution.Accumulate(),
    parallel.BucketSize(),
    parallel.BucketView(),
    parallel.StaticGraph(),
    parallel.Compress(),
    parallel.Sharding(),
    numerics.Ema(),
    numerics.Optimizer(),
    *data_path.LEVERS,
    execution.ForceLayout(),
    execution.DependentLaunch(),
    execution.Compile(),
    execution.CudaGraph(),
)


def of_recipe(bench: BenchConfig) -> dict[Lever, str]:
    """Return the levers of a recipe that differ from the baseline, with their names."""
    names = recipes.levers(bench.recipe)
    return {lever: names[lever.field] for lever in REGISTRY if lever.field in names}


def require(bench: BenchConfig, device: torch.device) -> None:
    """Raise UnavailableError for the first lever that cannot run here, with the reason."""
    for lever, name in of_recipe(bench).items():
        if reason := lever.available(bench, device):
            raise UnavailableError(f"lever {name}: {reason}")


def apply(components: StepComponents) -> None:
    """Change the baseline's switches and components into the recipe's."""
    components.fp32_precision = set_switches(components.recipe)
    for lever in of_recipe(components.bench):
        lever.apply(components)


def requested(bench: BenchConfig) -> list[LeverReport]:
    """Return the levers of the recipe, before anything is read back."""
    return [
        LeverReport(
            name=name, field=lever.field, requested=getattr(bench.recipe, lever.field), evidence="not read back"
        )
        for lever, name in of_recipe(bench).items()
    ]


def verify(step: TrainingStep, batches: Batches) -> list[LeverReport]:
    """Return the levers with what is really in effect. Runs two more steps: only after the last one that counts."""
    from .observe import observe

    bench = step.components.bench
    reports = requested(bench)
    # The baseline has nothing to read back, and takes no further steps.
    if not reports:
        return []
    observed = observe(step, batches)
    return [
        msgspec.structs.replace(report, **lever.verify(observed)._asdict())
        for report, lever in zip(reports, of_recipe(bench), strict=True)
    ]
