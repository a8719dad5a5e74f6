"""The fine-tuning, but torch's process group never ends on rank 0, as NCCL's may, and is given up sooner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.ranks import group
from inpaint_bench.workloads import finetune_inpaint

LEAVING_S = 2.0


def build(config: BenchConfig, device: torch.device) -> Any:
    if dist.get_rank() == 0:
        dist.destroy_process_group = threading.Event().wait
        leave_group = group.leave_group

        def leave_soon(value: Any, give_up: Callable[[], None]) -> list[Any]:
            group.LEAVING_S = LEAVING_S
            return leave_group(value, give_up)

        group.leave_group = leave_soon
    return finetune_inpaint.build(config, device)
