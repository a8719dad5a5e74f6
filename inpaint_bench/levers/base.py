"""What a lever is: one field of a recipe that says whether it can run, changes an execution, and is read back."""

from __future__ import annotations

from bisect import insort
from typing import Any, ClassVar, Generic, NamedTuple

import torch

from inpaint_bench.core.config.bench import BenchConfig

from .observe import E, Observation

REGISTRY: list[Lever[Any]] = []  # in the order in which they are applied


class Verification(NamedTuple):
    """What is really in effect. `active` None: it was not observed."""

    effective: Any
    active: bool | None
    evidence: str


class Lever(Generic[E]):
    """One field of `RecipeConfig`. Its methods are called only where the field differs from the baseline.

    A class with a `field` is registered by its definition. What it needs of a workload stands with that field in
    `RecipeConfig`, and is checked before anything is submitted.
    """

    field: ClassVar[str]
    # Networks, weights and layout (0) are changed before what is made of them (1) and what wraps them (2).
    phase: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        if "field" in cls.__dict__:
            insort(REGISTRY, cls(), key=lambda lever: lever.phase)

    gpu: ClassVar[str] = ""  # why it needs one
    needs: ClassVar[tuple[str, str] | None] = None  # the field without which it has no effect, and the reason

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        """Return why the lever cannot run on the device, in a sentence, or None. Builds nothing."""
        if self.needs and getattr(bench.recipe, self.needs[0]) in (False, 0, "none"):
            return self.needs[1]
        return None if device.type == "cuda" else self.gpu or None

    def apply(self, execution: E) -> None:
        """Change the execution. Nothing to do for PyTorch's switches, nor for what the loader reads."""

    def verify(self, observed: Observation[E]) -> Verification:
        """Read back what is in effect from what ran, not from the configuration."""
        raise NotImplementedError
