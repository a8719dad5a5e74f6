"""How a sidecar hears that it must end: SIGTERM, SIGINT, or its parent's death.

`block` must run before pyarrow is imported: Arrow starts threads on import, and one that did not inherit
the mask would take a SIGTERM in the main thread's place and die of it, parts unsaved.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

STOP: Final = {signal.SIGTERM, signal.SIGINT}
PARENT_DIED: Final = signal.SIGUSR1
_PR_SET_PDEATHSIG: Final = 1


def block() -> None:
    """Hold the signals back for `wait`, and ask the kernel for one when the parent dies (Linux).

    SIGUSR2 is the worker's: Slurm sends its warning of the time limit to every process of a step.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP | {PARENT_DIED})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(PARENT_DIED), 0, 0, 0)


def wait(seconds: float, parent: int) -> str | None:
    """Sleep so long, or less when there is a reason to end: its name, else None."""
    caught = signal.sigtimedwait(STOP | {PARENT_DIED}, seconds)
    if caught is not None and caught.si_signo in STOP:
        return signal.Signals(caught.si_signo).name
    # Checked, not believed: the death signal also comes when only the parent's starting thread ends.
    return "parent_gone" if os.getppid() != parent else None
