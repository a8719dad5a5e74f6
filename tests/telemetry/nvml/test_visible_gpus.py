"""Which GPUs a program will use, by its environment."""

from __future__ import annotations

import os
import subprocess

import pytest

from inpaint_bench.core.errors import UserError
from inpaint_bench.telemetry.visible_gpus import uuids_of, visible_uuids
from tests.telemetry.support import FakeNvml, uuid


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (uuid(1), [1]),
        ("GPU-00000000-0000-0000-0000-000000000002", [2]),
        (uuid(1).removeprefix("GPU-"), [1]),
        (f"{uuid(0)},{uuid(2)}", [0, 2]),
        ("1,-1,2", [1]),
    ],
)
def test_gpus_are_those_of_cuda_in_its_order(value: str | None, gpus: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_uuids(FakeNvml(3), environment) == [uuid(index) for index in gpus]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "CUDA_VISIBLE_DEVICES= names none"),
        ("-1", "CUDA_VISIBLE_DEVICES=-1 names none"),
        ("-1,0", "CUDA_VISIBLE_DEVICES=-1,0 names none"),
        ("NoDevFiles", "CUDA_VISIBLE_DEVICES=NoDevFiles names none"),
        ("2", "there is no GPU 2 among 2"),
        ("GPU-0000", "GPU-0000 is none of the GPUs here"),  # the beginning of both
        ("MIG-00000000-0000-0000-0000-000000000000", "a MIG slice has no power"),
        ("first", "'first' is not a GPU UUID"),
    ],
)
def test_gpu_that_cannot_be_told_is_refused(value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        visible_uuids(FakeNvml(2), {"CUDA_VISIBLE_DEVICES": value})


def test_machine_without_gpus_says_so() -> None:
    with pytest.raises(UserError, match="the program has no GPU to sample: NVML lists none"):
        visible_uuids(FakeNvml(0), {})


def test_numbers_among_gpus_of_several_kinds_need_cudas_order() -> None:
    """CUDA puts the fastest first, NVML goes by PCI address."""
    nvml = FakeNvml(2)
    nvml.query = lambda handle, name: f"NVIDIA {handle[-1]}"  # type: ignore[method-assign]
    with pytest.raises(UserError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs"):
        visible_uuids(nvml, {"CUDA_VISIBLE_DEVICES": "1"})
    assert visible_uuids(nvml, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [uuid(1)]
    assert visible_uuids(nvml, {"CUDA_VISIBLE_DEVICES": uuid(1)}) == [uuid(1)]


def test_a_running_program_uses_the_gpus_that_list_it_or_a_process_that_it_started() -> None:
    nvml = FakeNvml(3)
    with subprocess.Popen(["sleep", "60"]) as child:
        lists = {uuid(0): [1], uuid(1): [child.pid], uuid(2): []}
        nvml.compute_processes = lambda handle: lists[handle]  # type: ignore[method-assign]
        assert uuids_of(nvml, os.getpid()) == [uuid(1)]
        lists[uuid(1)] = [1]
        with pytest.raises(UserError, match=rf"--attach {child.pid}: computes on no GPU .* name the GPUs with --gpus"):
            uuids_of(nvml, child.pid)
        child.kill()
