"""Keys and results of the sample workload `matmul`."""

from __future__ import annotations

from dataclasses import dataclass

from inpaint_bench.core.config.validation import within
from inpaint_bench.core.workloads import Result as BaseResult
from inpaint_bench.core.workloads import WorkloadConfig


@dataclass(kw_only=True)
class Config(WorkloadConfig):
    """Products of random matrices."""

    width: int = within(1, 100_000, 64)  # rows and columns of the matrices


class Result(BaseResult, kw_only=True):
    """One product."""

    width: int
    time_ms: float
