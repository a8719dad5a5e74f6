"""The fine-tuning, but rank 1 ends badly, or not at all, after the run is complete: in the interpreter's teardown."""

from __future__ import annotations

import atexit
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.workloads import finetune_inpaint


def build(config: BenchConfig, device: torch.device) -> Any:
    if dist.get_rank() == 1:
        # Hooks run in the order opposite to that of their registration.
        atexit.register(os._exit, 3)
        if os.environ["LATE"] == "hang":
            atexit.register(time.sleep, 100_000)
    return finetune_inpaint.build(config, device)
