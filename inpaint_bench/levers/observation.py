"""What levers read back from: a workload that trains, and what was seen of one of its steps."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from inpaint_bench.core.config import BenchConfig
    from inpaint_bench.data.loader import Batches
    from inpaint_bench.data.samples import Batch
    from inpaint_bench.models.assembly import Assembly
    from inpaint_bench.models.cuda_graph import GraphedStep
    from inpaint_bench.models.ema import Average

LAUNCHES = re.compile(r"^(cuda|cu)LaunchKernel")
GRAPH_LAUNCHES = re.compile(r"^cudaGraphLaunch")


@dataclass(kw_only=True)
class Seen:
    """One step: kernels on the device, operators and runtime calls on the host, and calls of the networks."""

    kernels: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    batch: dict[str, Tensor] = field(default_factory=dict)  # as the loader handed it out
    prediction: torch.dtype | None = None
    problem: str = ""  # why the profiler saw nothing

    def count(self, pattern: str) -> int:
        """Kernels whose name matches, or on the processor operators."""
        names = self.kernels or self.host
        return sum(n for name, n in names.items() if re.search(pattern, name, re.IGNORECASE))

    @property
    def launches(self) -> int:
        return sum(n for name, n in self.host.items() if LAUNCHES.match(name))

    @property
    def graph_launches(self) -> int:
        return sum(n for name, n in self.host.items() if GRAPH_LAUNCHES.match(name))


class Running(Protocol):
    """What levers read back from: a workload that trains an assembly."""

    @property
    def assembly(self) -> Assembly: ...
    @property
    def bench(self) -> BenchConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def parameters(self) -> list[torch.nn.Parameter]: ...
    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...
    @property
    def average(self) -> Average | None: ...
    @property
    def graphed(self) -> GraphedStep | None: ...
    @property
    def batches(self) -> Batches: ...
    def next_batch(self) -> Batch: ...
    def step(self, batch: Batch) -> torch.Tensor: ...
