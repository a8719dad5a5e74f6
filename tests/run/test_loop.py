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


def test_progress_counts_the_steps_that_the_device_has_completed() -> None:
    """The host queues steps within microseconds; the device takes 100 ms for each."""
    passed = 0

    class Timer:
        def __init__(self, number: int) -> None:
            self.number = number

        def has_passed(self) -> bool:
            return self.number < passed

        def ms(self, until: Timer) -> float:
            return 100.0 * (until.number + 1 - self.number)

    window: Any = SimpleNamespace(t_start_mono_ns=0)
    completed = loop._Completed()
    for number in range(8):
        row = {"t_start_mono_ns": number * 1000, "data_wait_ns": 0, "t_end_mono_ns": number * 1000 + 500}
        step: Any = SimpleNamespace(row=row, timer=Timer(number))
        completed.add(step)
    completed.update(window)
    assert (completed.steps, completed.elapsed_s) == (0, 0.0)
    for passed in (1, 5, 5, 8):
        completed.update(window)
        assert (completed.steps, completed.elapsed_s) == (passed, passed / 10)
