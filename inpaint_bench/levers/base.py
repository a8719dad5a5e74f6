"""What a lever is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config import BenchConfig, RecipeConfig
    from inpaint_bench.models.assembly import Assembly

    from .observation import Running, Seen


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
