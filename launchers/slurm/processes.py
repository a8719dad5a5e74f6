"""Run a command for a bounded time, with all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

KILL_TIMEOUT_S = 2.0


def run_bounded(
    command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command and return its output. Raises OSError, and subprocess.TimeoutExpired after `timeout_s`.

    `subprocess.run` ends only the command itself, and then waits for whatever still holds its output open: the program
    that a wrapper script called, or the ProxyCommand of ssh.
    """
    # In a session of its own the command is a process group too, and cannot ask on the terminal.
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # What has left the group may hold the pipes open, so they are not read to their end.
        for file in (process.stdin, process.stdout, process.stderr):
            if file:
                with suppress(OSError):
                    file.close()
        # Not for ever: a process that waits for a dead file system does not die.
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
