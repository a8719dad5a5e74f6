"""Levers are read back from what runs: one that was undone is reported as inactive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from inpaint_bench import levers, workloads
from inpaint_bench.models.execution import Execution
from tests.run.support import bench

CPU = torch.device("cpu")
KINDS = {
    "finetune_inpaint": (),
    "denoise_patch": ("batch=1", "workload.channels=[4,8,8,8]"),
    "volume3d_train": ("batch=2", "workload.network=tiny"),
    "sd_inference": ("model=tiny", "workload.steps=2"),
}


def no_autocast(execution: Execution) -> None:
    execution.autocast_dtype = None


def contiguous(execution: Execution) -> None:
    execution.memory_format = torch.contiguous_format
    for network in execution.modules.values():
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def one_batch(execution: Execution) -> None:
    execution.micro_batches = 1


def math(execution: Execution) -> None:
    execution.attention_kernels = lambda: sdpa_kernel(SDPBackend.MATH)


@pytest.mark.parametrize(
    ("workload", "lever", "undo"),
    [
        ("finetune_inpaint", "recipe.channels_last=true", contiguous),
        ("finetune_inpaint", "recipe.attention=flash", math),  # the frozen networks' attention does not count
        ("denoise_patch", "recipe.precision=bf16", no_autocast),
        ("denoise_patch", "recipe.channels_last=true", contiguous),
        ("volume3d_train", "recipe.precision=bf16", no_autocast),
        ("volume3d_train", "recipe.accumulate=2", one_batch),
        ("sd_inference", "recipe.precision=bf16", no_autocast),
        ("sd_inference", "recipe.attention=flash", math),
    ],
)
def test_lever_is_read_back_from_what_runs(workload: str, lever: str, undo: Callable[[Execution], None]) -> None:
    built = workloads.load(bench(f"workload={workload}", *KINDS[workload], lever), CPU)
    assert built.execution is not None
    (before,) = levers.verify(built.execution, built.probe)
    undo(built.execution)
    (after,) = levers.verify(built.execution, built.probe)
    built.close()
    assert (before.active, after.active) == (True, False)
