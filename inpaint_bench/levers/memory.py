"""Memory against time: recomputing, micro-batches, and the averaged copy of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inpaint_bench.models.assembly import Assembly

from .base import Effective, Lever, Machine

if TYPE_CHECKING:
    from .observation import Running, Seen

EMA_DECAY = 0.9999


class GradCheckpoint(Lever):
    field = "grad_checkpoint"

    def apply(self, assembly: Assembly) -> None:
        assembly.nets.unet.enable_gradient_checkpointing()

    def verify(self, workload: Running, seen: Seen) -> Effective:
        on = bool(workload.assembly.nets.unet.is_gradient_checkpointing)
        passes, calls = seen.calls["unet"], seen.calls["block"]
        again = calls > passes if calls else None  # compiled or replayed code calls no module
        text = f"is_gradient_checkpointing {on}; the first block ran {calls} times in {passes} UNet passes"
        return Effective(effective=on, active=on if again is None else again, evidence=text)


class Accumulate(Lever):
    field = "accumulate"

    def available(self, machine: Machine) -> str | None:
        batch, parts = machine.bench.batch, machine.recipe.accumulate
        if isinstance(batch, int) and batch % parts:
            return f"batch {batch} cannot be cut into {parts} equal micro-batches"
        return None

    def apply(self, assembly: Assembly) -> None:
        assembly.micro_batches = assembly.recipe.accumulate

    def verify(self, workload: Running, seen: Seen) -> Effective:
        calls = seen.calls["unet"]
        active = calls == workload.bench.recipe.accumulate if calls else None
        return Effective(effective=calls or None, active=active, evidence=f"{calls} UNet passes in a step")


class Ema(Lever):
    field = "ema"

    def apply(self, assembly: Assembly) -> None:
        assembly.ema_decay = EMA_DECAY

    def verify(self, workload: Running, seen: Seen) -> Effective:
        average = workload.average
        if average is None:
            return Effective(effective=None, active=False, evidence="no averaged weights are kept")
        moved = any((a != p).any().item() for a, p in zip(average.tensors, workload.parameters, strict=True))
        text = f"decay {average.decay}, averaged copy {'differs from' if moved else 'equals'} the weights"
        return Effective(effective=average.decay, active=moved, evidence=text)
