"""Memory against time: recomputation, micro-batches, and the averaged copy of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inpaint_bench.models.training_step import StepComponents

from .base import Lever, Machine, Verification

if TYPE_CHECKING:
    from .observe import StepObservation

EMA_DECAY = 0.9999


class GradCheckpoint(Lever):
    """Activations of the UNet are recomputed in the backward pass."""

    field = "grad_checkpoint"

    def apply(self, components: StepComponents) -> None:
        components.networks.unet.enable_gradient_checkpointing()

    def verify(self, observed: StepObservation) -> Verification:
        enabled = bool(observed.components.networks.unet.is_gradient_checkpointing)
        passes, blocks = observed.calls["unet"], observed.calls["block"]
        # Compiled or replayed code calls no module: then only the flag is known.
        active = blocks > passes if blocks else enabled
        text = f"is_gradient_checkpointing {enabled}; the first block ran {blocks} times in {passes} UNet passes"
        return Verification(enabled, active, text)


class Accumulate(Lever):
    """Gradients are accumulated over micro-batches."""

    field = "accumulate"

    def available(self, machine: Machine) -> str | None:
        batch, parts = machine.bench.batch, machine.recipe.accumulate
        if isinstance(batch, int) and batch % parts:
            return f"batch {batch} cannot be divided into {parts} equal micro-batches"
        return None

    def apply(self, components: StepComponents) -> None:
        components.micro_batches = components.recipe.accumulate

    def verify(self, observed: StepObservation) -> Verification:
        calls = observed.calls["unet"]
        active = calls == observed.recipe.accumulate if calls else None
        return Verification(calls or None, active, f"{calls} UNet passes in a step")


class Ema(Lever):
    """An exponential moving average of the weights."""

    field = "ema"

    def apply(self, components: StepComponents) -> None:
        components.ema_decay = EMA_DECAY

    def verify(self, observed: StepObservation) -> Verification:
        ema = observed.step.ema
        if ema is None:
            return Verification(None, False, "there is no average of the weights")
        moved = any((a != p).any().item() for a, p in zip(ema.tensors, observed.step.parameters, strict=True))
        text = f"decay {ema.decay}, the average {'differs from' if moved else 'equals'} the weights"
        return Verification(ema.decay, moved, text)
