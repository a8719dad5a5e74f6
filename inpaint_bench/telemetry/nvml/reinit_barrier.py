"""Keeps NVML from being closed while another thread is inside one of its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TIMEOUT_S: Final = 2.0


class NvmlReinitBarrier:
    """Helper threads call NVML inside `calling`; the sampler closes and reopens it inside `reinitializing`.

    `generation` counts the openings: what a thread got from NVML in an earlier generation (an event set) is void.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._condition = threading.Condition()
        self._callers = 0
        self._reinitializing = False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wait while NVML is reinitialized, then keep it open during the block."""
        with self._condition:
            self._condition.wait_for(lambda: not self._reinitializing)
            self._callers += 1
        try:
            yield
        finally:
            with self._condition:
                self._callers -= 1
                self._condition.notify_all()

    @contextmanager
    def reinitializing(self) -> Iterator[None]:
        """Admit no caller during the block, and wait for those inside, 2 s at most: a hanging call must not block."""
        with self._condition:
            self._reinitializing = True
            self._condition.wait_for(lambda: self._callers == 0, _TIMEOUT_S)
        try:
            yield
        finally:
            with self._condition:
                self._reinitializing = False
                self.generation += 1
                self._condition.notify_all()
