"""Signals that ask a process to end: raised as an exception at once, or deferred to the end of a block."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Ctrl-C, the end of a job, and the time limit as submitit's local executor announces it.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
ON_CTRL_C = b"\nCtrl-C: a checkpoint follows at the end of this step or validation; a second Ctrl-C quits without it.\n"


class Terminated(SystemExit):
    """A signal that ends the process. Its exit code is 128 + the signal's number, as in a shell.

    `progressed`: there is a checkpoint beyond the step at which this start began, so a restart would get further.
    `at_once`: a second Ctrl-C, after which nothing is saved any more.
    """

    def __init__(self, signum: int, note: str = "", *, progressed: bool = False, at_once: bool = False) -> None:
        super().__init__(128 + signum)
        self.signum, self.note, self.progressed, self.at_once = signum, note, progressed, at_once

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name

    def __str__(self) -> str:
        return f"received {self.name}; {self.note}" if self.note else f"received {self.name}"


class StopSignal:
    """The signal that asks this run to end, once it has arrived."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.ignored = False  # the manifest is final
        self._interrupts = 0
        self._saving = False

    @property
    def name(self) -> str | None:
        return None if self.signum is None else signal.Signals(self.signum).name

    def receive(self, signum: int) -> None:
        """Note the signal. Raises Terminated for the first one unless it is deferred, and for a second Ctrl-C if so."""
        if self.ignored:
            return
        self._interrupts += signum == signal.SIGINT
        if self.signum is None:
            self.signum = signum
            if not self._saving:
                raise Terminated(signum)
            # Not `print`: this may run while the same buffer is being written.
            if signum == signal.SIGINT:
                os.write(2, ON_CTRL_C)
        # The second SIGINT and not the first one after SIGTERM: submitit sends both if a job has to end.
        elif self._saving and self._interrupts == 2:
            raise Terminated(signum, "nothing was saved after a second Ctrl-C", at_once=True)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let no signal but a second Ctrl-C interrupt the block, which ends in a state to save, or saves it."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal raise Terminated at the end of the block, not inside it, unless it is a second Ctrl-C."""
        try:
            with self.saving():
                yield
        except Exception as error:
            # The compilers that this process has started get Ctrl-C too, and a step fails if one dies of it.
            if self.signum == signal.SIGINT:
                raise Terminated(signal.SIGINT, f"{type(error).__name__} while it ended") from error
            raise  # with other signals, the error has priority
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

    handlers = {signum: signal.signal(signum, note) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    # The handlers of before are back, and get each signal as if it arrived now.
    for number in received:
        signal.raise_signal(number)


def obey_parent() -> None:
    """Ignore SIGINT in a worker process, and SIGTERM unless its parent sends it.

    Slurm and a terminal signal every process of a job, and only the parent knows when its workers end. At its exit
    Python ends by SIGTERM the workers that are left, and waits for them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_parent, args=(os.getppid(),), daemon=True).start()


def _await_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


@contextmanager
def terminable(signums: Sequence[signal.Signals] = SIGNALS, *, at_end: Any = None) -> Iterator[StopSignal]:
    """Turn these signals into Terminated in the main thread, once: a second one must not interrupt the cleanup.

    Only a second Ctrl-C is passed on to the StopSignal. A process forked from this one ignores the signals: its parent
    will end it. They are received also if the process was started with SIGINT ignored (in the background of a
    script). `at_end` is the handler that they get when the block ends, in place of the one that they had.
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
            if handled != signal.SIGINT:
                signal.signal(handled, signal.SIG_IGN)
        stop_signal.receive(signum)

    handlers = {signum: signal.signal(signum, handle) for signum in signums}
    try:
        yield stop_signal
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler if at_end is None else at_end)
