"""A thread beside the sampling: it ends when asked to, and never keeps the process alive."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Helper(ABC):
    """One thread that does `_run`, which must return soon after `_stopping` is set.

    `join_s` is how long `stop` waits: SIGTERM leaves the sidecar less than a second in all.
    """

    def __init__(self, name: str, join_s: float) -> None:
        self._join_s = join_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def signal(self) -> None:
        """Ask the thread to end, and do not wait for it."""
        self._stopping.set()

    def stop(self) -> bool:
        """Wait for the thread's end; False where a call still holds it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(self._join_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None: ...
