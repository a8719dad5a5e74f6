"""The tiny training with a validation that lasts for minutes after step 0."""

from __future__ import annotations

import time

import torch

from inpaint_bench.core.config.bench import BenchConfig

from . import support


class SlowValidation(support.TinyTraining):
    """Validates at once before the first step."""

    def validate(self) -> dict[str, float]:
        """Return the same metrics, late."""
        if self.steps:
            time.sleep(600)
        return super().validate()


def build(config: BenchConfig, device: torch.device) -> SlowValidation:
    """Return the workload."""
    assert device.type == "cpu"
    return SlowValidation(config)
