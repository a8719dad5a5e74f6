"""Child processes: our own modules that run beside this process, and commands that take a bounded time.

Each gets a session of its own. Ctrl-C goes to this process alone, which decides when its children end, and whatever a
child has started ends with it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from .paths import import_path

KILL_TIMEOUT_S = 2.0


class Child:
    """One of our modules, `python -m MODULE ARGUMENT...`, with the import path of this process."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        log: Path | None = None,
        read_output: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; what it prints is appended to `log`, but for standard output with `read_output`. Raises OSError."""
        with ExitStack() as files:
            out = files.enter_context(log.open("ab")) if log else None
            self.process = subprocess.Popen(
                # -P: the working directory must not shadow the code of this process
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if read_output else out,
                stderr=out,
                bufsize=0,  # so that what follows a line that was read is left for `end`
                env={**os.environ, "PYTHONPATH": import_path(), **(environment or {})},
                start_new_session=True,
            )

    def send(self, message: bytes) -> None:
        """Give it all of its standard input. One that has died does not read it, which is no error here."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            rest = memoryview(message)
            while rest:
                rest = rest[pipe.write(rest) :]
        self.process.stdin = None

    def end(self, timeout_s: float, *, signum: int | None = None, last: bytes = b"") -> tuple[bytes, bool]:
        """Let it end, after a signal and these last bytes of its input if given; kill it after `timeout_s`.

        Kills what it has started, too. Return the output that was not read, and whether it ended by itself.
        """
        if signum is not None:
            self.process.send_signal(signum)
        ended = True
        try:
            # Reads on while it waits: the output may be longer than the pipe's buffer.
            output, _ = self.process.communicate(last, timeout_s)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            self.kill()
        if not ended:
            output, _ = self.process.communicate()
        return output or b"", ended

    def kill(self) -> None:
        """Kill it and what it has started."""
        _kill_group(self.process.pid)


def run(
    command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command and return its output. Raises OSError, and subprocess.TimeoutExpired after `timeout_s`.

    `subprocess.run` ends only the command itself, and then waits for whatever still holds its output open: the program
    that a wrapper script called, or the ProxyCommand of ssh.
    """
    pipe = subprocess.PIPE
    # In a session of its own it cannot ask on the terminal either.
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except BaseException:
        _kill_group(process.pid)
        # What has left the group may hold the pipes open, so they are not read to their end.
        for file in (process.stdin, process.stdout, process.stderr):
            if file:
                with suppress(OSError):
                    file.close()
        # A process that waits for a dead file system does not die: give up on it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def stat_fields(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return the fields of a process in /proc from its state on; the parent is next. Raises OSError if it has ended."""
    # The name before them, in parentheses, may itself hold spaces and parentheses.
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def is_descendant(pid: int, worker: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process is the worker or was started by it, through any number of others."""
    visited: set[int] = set()
    # From parent to parent. /proc is read entry by entry, so a reused id could lead round in a circle.
    while pid > 1 and pid not in visited:
        if pid == worker:
            return True
        visited.add(pid)
        try:
            pid = int(stat_fields(pid, proc)[1])
        except (OSError, ValueError, IndexError):
            return False
    return pid == worker
