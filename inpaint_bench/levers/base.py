"""What a lever is: one field of a recipe that says whether it can run, changes the step, and is read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config.bench import BenchConfig
    from inpaint_bench.models.components import StepComponents

    from .observe import StepObservation


class Verification(NamedTuple):
    """What is really in effect. `active` None: it could not be determined."""

    effective: Any
    active: bool | None
    evidence: str


class Lever:
    """One field of `RecipeConfig`. Its methods are called only where the field differs from the baseline."""

    field: str

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        """Return why the lever cannot run on the device, in a sentence, or None. Builds nothing."""
        return None

    def apply(self, components: StepComponents) -> None:
        """Change the components of the step. Nothing to do for PyTorch's switches, nor for what the loader reads."""

    def verify(self, observed: StepObservation) -> Verification:
        """Read back what is in effect from the running step, not from the configuration."""
        raise NotImplementedError
