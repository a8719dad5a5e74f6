"""Asynchronous copies of losses, with a stand-in for CUDA events."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from inpaint_bench.run import loop


class Event:
    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def pending_steps(*done: bool) -> Any:
    return deque(SimpleNamespace(number=n, loss_copy=(torch.zeros(()), Event(d))) for n, d in enumerate(done))


def test_completed_steps_are_taken_in_order() -> None:
    steps = pending_steps(True, True, False, True)
    assert [step.number for step in loop.take_completed(steps)] == [0, 1]
    assert [step.number for step in steps] == [2, 3]


def test_does_not_wait_while_a_slot_is_free(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOSS_SLOTS", 3)
    steps = pending_steps(False, False)
    assert loop.take_completed(steps) == []
    assert not steps[0].loss_copy[1].done


def test_waits_for_the_oldest_loss_when_all_slots_are_used(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOSS_SLOTS", 2)
    steps = pending_steps(False, False)
    assert [step.number for step in loop.take_completed(steps)] == [0]
    assert [step.number for step in steps] == [1]
