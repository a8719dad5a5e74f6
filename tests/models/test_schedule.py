"""Schedules, optimizers and weight decay of a training, beside PyTorch's own loop."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from inpaint_bench.core.workloads.finetune_inpaint import Config
from inpaint_bench.kernels.adamw import SplitMasterAdamW
from inpaint_bench.models.optimizers import ADAMW
from inpaint_bench.models.schedule import Schedule
from inpaint_bench.models.training_step import diffusion_loss, draw
from inpaint_bench.workloads import finetune_inpaint
from inpaint_bench.workloads.finetune_inpaint import FineTuning
from tests.run.support import bench

STEPS = 6


def build(*keys: str) -> FineTuning:
    overrides = ["recipe=cpu", "workload.learning_rate=0.003", f"workload.train_steps={STEPS}"]
    return finetune_inpaint.build(bench(*overrides, *(f"workload.{key}" for key in keys)), torch.device("cpu"))


def trace(workload: FineTuning, steps: int) -> list[tuple[float, float]]:
    return [(workload.learning_rate(), workload.step(workload.next_batch()).item()) for _ in range(steps)]


def plain(keys: tuple[str, ...], make: Any) -> list[tuple[float, float]]:
    """The loop as one writes it in PyTorch: `make` returns optimizers and schedulers of the parameters."""
    workload = build(*(key for key in keys if "schedule" not in key))
    step = workload.training_step
    optimizers, schedulers = make(step.parameters)
    found = []
    for _ in range(STEPS):
        batch = workload.next_batch()
        loss = diffusion_loss(step.components, batch, draw(step.components, len(batch["mask"]), step.generator))
        loss.backward()
        found.append((optimizers[0].param_groups[0]["lr"], loss.item()))
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    workload.close()
    return found


def adamw(parameters: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003, foreach=False, **settings)


def linear(parameters: list[nn.Parameter]) -> Any:
    optimizer = adamw(parameters, weight_decay=0.3)
    return [optimizer], [LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)]


def cosine(parameters: list[nn.Parameter]) -> Any:
    optimizer = adamw(parameters)
    parts = [LinearLR(optimizer, 1 / 3, 1.0, total_iters=2), CosineAnnealingLR(optimizer, T_max=7)]
    return [optimizer], [SequentialLR(optimizer, parts, [2])]


def warmed(parameters: list[nn.Parameter]) -> Any:
    optimizer = adamw(parameters)
    return [optimizer], [LinearLR(optimizer, 1 / 4, 1.0, total_iters=3)]


def adafactor(parameters: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.Adafactor(parameters, lr=0.003, weight_decay=0.01)
    return [optimizer], [CosineAnnealingLR(optimizer, T_max=STEPS)]


def muon(parameters: list[nn.Parameter]) -> Any:
    matrices = [p for p in parameters if p.ndim == 2]
    first = adamw([p for p in parameters if p.ndim != 2])
    second = torch.optim.Muon(matrices, lr=0.003, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [first, second], [CosineAnnealingLR(each, T_max=STEPS) for each in (first, second)]


@pytest.mark.parametrize(
    ("keys", "make"),
    [
        (("schedule=linear", "weight_decay=0.3"), linear),
        (("schedule=cosine", "schedule_warmup=2", "schedule_steps=9"), cosine),
        (("schedule_warmup=3",), warmed),
        (("optimizer=adafactor", "schedule=cosine"), adafactor),
        (("optimizer=muon", "schedule=cosine"), muon),
    ],
)
def test_rates_and_losses_are_those_of_a_plain_loop_also_after_a_resume(keys: tuple[str, ...], make: Any) -> None:
    expected = plain(keys, make)
    assert len({loss for _, loss in expected}) == STEPS
    first, second = build(*keys), build(*keys)
    found = trace(first, 3)
    tensors, values = first.state()
    state = {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values))
    found_on = trace(first, STEPS - 3)
    assert found + found_on == expected
    second.restore(*state)
    assert trace(second, STEPS - 3) == found_on
    rate = second.learning_rate()
    trace(second, 2)
    assert second.learning_rate() == rate or "schedule_steps=9" in keys, "the rate stays after the end of the schedule"
    first.close()
    second.close()


def test_rate_of_a_captured_or_compiled_update_is_a_tensor_that_stays() -> None:
    """A graph reads memory; what loads an optimizer's state replaces the tensor, before the capture."""
    keys = Config(name="", module="", train_steps=4, schedule="linear")
    narrow = SplitMasterAdamW([nn.Parameter(torch.ones(8, dtype=torch.bfloat16))], lr=0.5, **ADAMW)
    wide = torch.optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.5, capturable=True)
    schedule = Schedule([narrow, wide], 0.5, keys)
    rates = [narrow.param_groups[0]["lr"], wide.param_groups[0]["lr"]]
    for expected in (0.375, 0.25, 0.125, 0.0, 0.0):
        schedule.step()
        assert [rate.item() for rate in rates] == [expected, expected]
    narrow.param_groups[0]["params"][0].grad = torch.ones(8, dtype=torch.bfloat16)
    narrow.step()
    assert bool((narrow.param_groups[0]["params"][0] == 1).all()), "a rate of zero changes nothing"
