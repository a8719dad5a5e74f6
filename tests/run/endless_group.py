"""The fine-tuning, but torch's process group never ends on rank 0, as NCCL's may."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.workloads import finetune_inpaint


def build(config: BenchConfig, device: torch.device) -> Any:
    if dist.get_rank() == 0:
        dist.destroy_process_group = threading.Event().wait
    return finetune_inpaint.build(config, device)
