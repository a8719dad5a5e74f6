"""What a lever is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from ..config import BenchConfig, RecipeConfig
    from ..data.loader import Batches
    from ..data.samples import Batch
    from ..workloads.assembly import Assembly
    from ..workloads.average import Average
    from ..workloads.graph import GraphedStep
    from .observe import Seen


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What is really in effect. `active` None: it could not be told."""

    effective: Any
    active: bool | None
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a recipe is to run, before anything is built."""

    bench: BenchConfig
    device: torch.device

    @property
    def recipe(self) -> RecipeConfig:
        return self.bench.recipe

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


class Running(Protocol):
    """What levers read back from: a workload that trains an assembly."""

    @property
    def assembly(self) -> Assembly: ...
    @property
    def bench(self) -> BenchConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parameters(self) -> list[torch.nn.Parameter]: ...
    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...
    @property
    def average(self) -> Average | None: ...
    @property
    def graphed(self) -> GraphedStep | None: ...
    @property
    def batches(self) -> Batches: ...
    def next_batch(self) -> Batch: ...
    def step(self, batch: Batch) -> torch.Tensor: ...


class Lever:
    """One field of `RecipeConfig`. Asked only where the field is not as in the baseline."""

    field: ClassVar[str]

    def available(self, machine: Machine) -> str | None:
        """Why it cannot run there, in a sentence, or None. Builds nothing."""
        return None

    def apply(self, assembly: Assembly) -> None:
        """Change the assembly. Nothing to do for what the loader reads from the recipe itself."""

    def verify(self, workload: Running, seen: Seen) -> Effective:
        """Read back from the running thing, not from what was asked."""
        raise NotImplementedError
