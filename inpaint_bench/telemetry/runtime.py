"""Signals and log of a sidecar process.

`block_signals` must run before pyarrow is imported: Arrow starts threads on import, and one that does not inherit the
mask would receive a SIGTERM in the main thread's place and die of it, with parts unsaved.
"""

import contextlib
import os
import signal
from typing import Final

STOP_SIGNALS: Final = {signal.SIGTERM, signal.SIGINT}


def block_signals() -> None:
    """Block the signals that `wait_for_stop` waits for."""
    # Slurm sends its warning of the time limit to every process of a step; it is meant for the worker.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def wait_for_stop(seconds: float, parent: int) -> str | None:
    """Sleep, or return early with the reason to stop: the name of a signal, or parent_gone."""
    received = signal.sigtimedwait(STOP_SIGNALS, seconds)
    # After a SIGSTOP that outlasts the wait, CPython returns a struct that nothing has filled.
    if received is not None and received.si_signo in STOP_SIGNALS:
        return signal.Signals(received.si_signo).name
    # Not PR_SET_PDEATHSIG: it also comes when only the parent's thread that started this process ends.
    return "parent_gone" if os.getppid() != parent else None


def log(text: str) -> None:
    """Write a line to sidecar.log, unbuffered: a full disk must not stop the sampling."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace") + b"\n")
