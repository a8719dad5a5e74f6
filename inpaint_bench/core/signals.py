"""Signals that ask a run to end: raised at once, or held until what must not be cut is done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Terminated(SystemExit):
    """A signal to end. Exit code 128 + its number, as a shell reports a process that the signal ended.

    `further`: there is a checkpoint beyond where this start of the run began, so that another one would get on.
    """

    def __init__(self, signum: int, note: str = "", *, further: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum, self.note, self.further = signum, note, further

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name

    def __str__(self) -> str:
        said = f"received {self.name}"
        return f"{said}; {self.note}" if self.note else said


class Ending:
    """The signal that asked this run to end, if one did."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._held = False

    def word(self) -> str | None:
        """Name of the signal that came."""
        return None if self.signum is None else signal.Signals(self.signum).name

    def ask(self, signum: int) -> None:
        """The signal is here. Raises Terminated unless it is held."""
        self.signum = signum
        if not self._held:
            raise Terminated(signum)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal does not interrupt the block; it raises Terminated where the block ends."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.signum is not None:
            raise Terminated(self.signum)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals to end, Ctrl-C among them, come when the block has ended. For renames that belong together, and forks.

    What a handler raises while Python runs the hooks of a fork is lost. Blocking the signals would not do: any other
    thread that lets them through (of BLAS, of a progress bar) makes the handler run in this one all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {one: signal.signal(one, lambda signum, _: came.append(signum)) for one in (signal.SIGINT, *SIGNALS)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    for signum in came:
        signal.raise_signal(signum)


@contextmanager
def terminable() -> Iterator[Ending]:
    """SIGTERM raises Terminated in the main thread, once: a second one must not cut the closing short.

    So does SIGUSR2, by which submitit's local executor announces the end of the time limit. A process forked
    from this one is no concern of the signal: its parent will end it.
    """
    ending = Ending()
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return
    owner = os.getpid()

    def stop(signum: int, _: Any) -> None:
        if os.getpid() != owner:
            return
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        ending.ask(signum)

    before = {one: signal.signal(one, stop) for one in SIGNALS}
    try:
        yield ending
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
