"""The fine-tuning, but the last rank fails in its third step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.workloads import finetune_inpaint


def build(config: BenchConfig, device: torch.device) -> Any:
    workload = finetune_inpaint.build(config, device)
    if dist.get_rank() == config.ranks - 1:
        next_batch, calls = workload.next_batch, iter(range(100))

        def fail_later() -> Any:
            if next(calls) == 2:
                raise MemoryError("no host memory for another batch")
            return next_batch()

        workload.next_batch = fail_later  # type: ignore[method-assign]
    return workload
