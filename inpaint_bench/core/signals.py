"""Signals that ask a process to end: raised as an exception at once, or deferred to the end of a block."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # the latter: submitit's local executor announces the time limit


class Terminated(SystemExit):
    """A signal that ends the process. Its exit code is 128 + the signal's number, as in a shell.

    `progressed`: there is a checkpoint beyond the step at which this start began, so a restart would get further.
    """

    def __init__(self, signum: int, note: str = "", *, progressed: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum, self.note, self.progressed = signum, note, progressed

    @property
    def name(self) -> str:
        """Name of the signal, such as SIGTERM."""
        return signal.Signals(self.signum).name

    def __str__(self) -> str:
        return f"received {self.name}; {self.note}" if self.note else f"received {self.name}"


class StopSignal:
    """The signal that asks this run to end, once it has arrived."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._deferred = False

    @property
    def name(self) -> str | None:
        """Name of the signal, None while none has arrived."""
        return None if self.signum is None else signal.Signals(self.signum).name

    def receive(self, signum: int) -> None:
        """Note the signal. Raises Terminated unless signals are deferred."""
        self.signum = signum
        if not self._deferred:
            raise Terminated(signum)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal raise Terminated where the block ends, not inside it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        # Not reached if the block itself raised: that error has priority.
        if self.signum is not None:
            raise Terminated(self.signum)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Deliver signals, Ctrl-C among them, when the block has ended. For renames that belong together, and forks.

    What a handler raises while Python runs the hooks of a fork is lost. Blocking the signals would not help: any
    other thread that accepts them (of BLAS, of a progress bar) makes the handler run in this one all the same.
    """
    # Only the main thread may set signal handlers, and only it runs them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(signum: int, _: Any) -> None:
        received.append(signum)

    handlers = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, *SIGNALS)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    # The handlers of before are back, and get each signal as if it arrived now.
    for number in received:
        signal.raise_signal(number)


@contextmanager
def terminable(signums: Sequence[signal.Signals] = SIGNALS) -> Iterator[StopSignal]:
    """Turn these signals into Terminated in the main thread, once: a second one must not interrupt the cleanup.

    A process forked from this one ignores them: its parent will end it. If SIGINT is not among them, it raises
    KeyboardInterrupt, also where the process was started with it ignored (by a script in the background, by nohup).
    """
    stop_signal = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop_signal
        return
    owner_pid = os.getpid()

    def handle(signum: int, _: Any) -> None:
        if os.getpid() != owner_pid:
            return
        for handled in signums:
            signal.signal(handled, signal.SIG_IGN)
        stop_signal.receive(signum)

    handlers = {signum: signal.signal(signum, handle) for signum in signums}
    if signal.SIGINT not in signums:
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield stop_signal
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
