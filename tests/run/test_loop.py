"""Losses that land on the host while the device works on: a stand-in for its events."""

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


def under_way(*done: bool) -> Any:
    return deque(SimpleNamespace(number=n, loss_copy=(torch.zeros(()), Event(d))) for n, d in enumerate(done))


def test_steps_are_taken_in_order_and_only_those_whose_loss_has_landed() -> None:
    steps = under_way(True, True, False, True)
    assert [step.number for step in loop.take_completed(steps)] == [0, 1]
    assert [step.number for step in steps] == [2, 3]


def test_nothing_is_waited_for_while_there_is_room_to_land(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOSS_SLOTS", 3)
    steps = under_way(False, False)
    assert loop.take_completed(steps) == []
    assert not steps[0].loss_copy[1].done


def test_a_place_is_not_given_again_before_its_loss_was_read(monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOSS_SLOTS", 2)
    steps = under_way(False, False)
    assert [step.number for step in loop.take_completed(steps)] == [0]
    assert [step.number for step in steps] == [1]
