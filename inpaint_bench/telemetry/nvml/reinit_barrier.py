"""Keeps NVML from being closed under a helper thread that is inside one of its calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PATIENCE_S: Final = 2.0


class Gate:
    """Helper threads call NVML inside `calling`; who closes and opens it does so inside `closed`.

    `generation` counts the openings: what a thread got from NVML before (an event set) is void after.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._state = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Waits while NVML is being opened anew."""
        with self._state:
            self._state.wait_for(lambda: not self._shut)
            self._inside += 1
        try:
            yield
        finally:
            with self._state:
                self._inside -= 1
                self._state.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Lets nobody in and waits for those inside, 2 s at most: a call that hangs must not end the sampling."""
        with self._state:
            self._shut = True
            self._state.wait_for(lambda: self._inside == 0, _PATIENCE_S)
        try:
            yield
        finally:
            with self._state:
                self._shut = False
                self.generation += 1
                self._state.notify_all()
