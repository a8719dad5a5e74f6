"""Determinism, a lever in a module of its own."""

from __future__ import annotations

import torch

from inpaint_bench.models.execution import Execution

from .base import Lever, Observation, Verification


class Deterministic(Lever[Execution]):
    """PyTorch's deterministic algorithms."""

    field = "deterministic"

    def apply(self, execution: Execution) -> None:
        torch.use_deterministic_algorithms(True)

    def verify(self, observed: Observation[Execution]) -> Verification:
        return Verification(torch.are_deterministic_algorithms_enabled(), "PyTorch's own switch")
