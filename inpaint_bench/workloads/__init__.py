"""What is executed. A workload is a module with `build(config, device) -> Workload`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inpaint_bench.core.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inpaint_bench.core.config import BenchConfig
    from inpaint_bench.core.records import DataFacts, LeverReport, Parity


class Workload(Protocol):
    """One step after another on one device, over endless batches.

    WorkloadConfig has the keys of all workloads; a workload that needs another key adds it there.
    `step` queues its work and returns at once: it neither synchronises with the device nor reads a value from it
    (fp16 does, once per step: PyTorch's gradient scaler checks whether the update is finite).
    """

    images_per_step: int
    facts: dict[str, Any]  # the manifest's workload_facts: plain JSON
    parity: Parity | None

    @property
    def data(self) -> DataFacts:
        """Return the images of this run, and the loader's settings."""

    @property
    def prefetched_batches(self) -> int:
        """Return the number of batches that the loader prepares while none is requested."""

    def next_batch(self) -> Any:
        """Wait for the loader; the time this takes is the step's `data_wait_ns`."""

    def step(self, batch: Any) -> Tensor:
        """Train on one batch. Return the loss, a detached scalar that stays on the device."""

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next step depends on, at a step boundary: tensors by name, and plain JSON."""

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned, as if never stopped. Raises UserError where it is another model's."""

    def validate(self) -> dict[str, float]:
        """Return metrics on held-out data, with fixed noise and masks; empty where nothing is held out."""

    def finish(self, run_dir: Path) -> dict[str, Any]:
        """Write what a finished training leaves and return the manifest's quality: weights, pictures, metrics."""

    def verify_levers(self) -> list[LeverReport]:
        """Return the levers with what is really in effect. May run more steps: only after the last that counts."""

    def skipped_steps(self) -> int:
        """Return the number of steps whose update fp16 overflow suppressed. Synchronises: at window edges only."""

    def close(self) -> None:
        """End worker processes."""


def load(config: BenchConfig, device: torch.device) -> Workload:
    """Build the workload that the configuration names. Raises UserError where there is no such module."""
    name = config.workload.module
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, something that it imports does not
        raise UserError(f"workload.module={name}: no such module") from None
    build = getattr(module, "build", None)
    if build is None:
        raise UserError(f"workload.module={name}: has no function build(config, device)")
    workload: Workload = build(config, device)
    return workload
