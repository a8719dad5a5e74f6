"""The keys of a training that decide an update: optimizer, weight decay, and the learning rate of each step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from inpaint_bench.core.workloads.finetune_inpaint import Config
from inpaint_bench.kernels.adamw import FlatAdamW

MakeOptimizers = Callable[[list[nn.Parameter], float], list[torch.optim.Optimizer]]


def make_optimizers(
    make_adamw: MakeOptimizers, parameters: list[nn.Parameter], lr: float, keys: Config
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a training; `make_adamw` is how its recipe executes AdamW."""
    if keys.optimizer == "adafactor":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adafactor(parameters, lr=lr)]
    elif keys.optimizer == "muon":
        # It takes matrices alone. Its updates are as large as AdamW's, so that both have one learning rate.
        matrices, others = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
        optimizers = make_adamw(others, lr) if others else []
        optimizers += [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")] if matrices else []
    else:
        optimizers = make_adamw(parameters, lr)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["weight_decay"] = keys.weight_decay
    return optimizers


def make_scheduler(optimizer: torch.optim.Optimizer, keys: Config) -> LRScheduler | None:
    """Return PyTorch's scheduler of a training's keys; None for a constant learning rate without warm-up."""
    warmup, steps = keys.schedule_warmup, keys.steps_of_schedule or 0
    scheduler: LRScheduler
    if keys.schedule == "linear":
        scheduler = LinearLR(optimizer, 1.0, 0.0, total_iters=steps - warmup)
    elif keys.schedule == "cosine":
        scheduler = CosineAnnealingLR(optimizer, T_max=steps - warmup)
    elif warmup:
        scheduler = ConstantLR(optimizer, factor=1.0, total_iters=0)
    else:
        return None
    if not warmup:
        return scheduler
    # The first step has a rate above zero, and step `warmup` is the first with all of it.
    rising = LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
    return SequentialLR(optimizer, [rising, scheduler], [warmup])


class Schedule:
    """The learning rate of each step, computed on the host and handed to the optimizers.

    PyTorch's scheduler belongs to an optimizer of its own, which updates nothing: reading the rate never waits for the
    device, and several optimizers, each with its groups, have one rate.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], lr: float, keys: Config) -> None:
        self._host = torch.optim.SGD([torch.zeros(1)], lr=lr)
        self._scheduler = make_scheduler(self._host, keys)
        # The scheduler would raise the rate again after its end, where steps that are profiled may follow.
        self._end = keys.steps_of_schedule
        self._optimizers = optimizers
        if not self._scheduler:
            return
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # A CUDA graph and a compiled kernel would keep a number as it was: they read it in device memory.
                if isinstance(optimizer, FlatAdamW) or group.get("capturable"):
                    group["lr"] = torch.tensor(lr, dtype=torch.float32, device=group["params"][0].device)
        self._hand_over()

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self._host.param_groups[0]["lr"])

    def step(self) -> None:
        """Go on to the next step. Queues a small kernel at most."""
        if not self._scheduler or (self._end is not None and self._scheduler.last_epoch >= self._end):
            return
        self._host.step()  # else PyTorch warns that the scheduler goes ahead of its optimizer
        self._scheduler.step()
        self._hand_over()

    def state(self) -> dict[str, Any]:
        """Return the scheduler's state as plain JSON; empty without one."""
        return self._scheduler.state_dict() if self._scheduler else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        if self._scheduler:
            self._scheduler.load_state_dict(state)
            self._host.param_groups[0]["lr"] = self._scheduler.get_last_lr()[0]  # the next one is computed from it
            self._hand_over()

    def _hand_over(self) -> None:
        # The groups are looked up each time: loading an optimizer's state replaces what they hold.
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.learning_rate)
            else:
                group["lr"] = self.learning_rate
