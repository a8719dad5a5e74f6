"""One connection to a site's login node: the user's own OpenSSH and configuration, so whatever signs in by hand does.

The first command of a while opens a master connection (and may ask for a password or a second factor, where someone
sits at a terminal); all others go through it and never ask. It ends by itself some minutes after the last of them.
Host keys are always checked. A peer that falls silent ends a command in bounded time.
"""

from __future__ import annotations

import atexit
import os
import select
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.site import ConnectConfig

FAILED = 255  # ssh's own exit code, where the connection failed and not the command
MAX_ANSWER_BYTES = 512 << 20  # that it may write into files here
LOOK_S = 1.0  # between two looks at their size
SOCKET_FOLDER_LIMIT = 107 - len("/.") - 40 - 16  # a socket's path, less %C's digits and ssh's temporary ending


class UnreachableError(Exception):
    """The site did not answer; the text says which host and what ssh said."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    code: int
    out: bytes
    err: str  # the last words, printable


class Connection:
    """Commands on `connect.host`. Nothing is opened before the first of them."""

    def __init__(self, connect: ConnectConfig) -> None:
        assert connect.host is not None
        self.host: str = connect.host
        self.timeout_s = float(connect.timeout_s)
        self._connect = connect
        self._socket = socket_folder() / "%C"

    def open(self) -> None:
        """Make sure that a master is up, asking at the terminal if there is one. Raises UnreachableError."""
        if self._connect.persist_min == 0:
            atexit.register(self._control, "stop")
        if self._control("check") == 0:
            return
        asks = sys.stdin.isatty() and sys.stderr.isatty()
        with tempfile.TemporaryFile() as err:
            try:
                done = subprocess.run(
                    [*self._ssh(asks=asks), "--", self.host, "true"],
                    stdin=None if asks else subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None if asks else err,  # a file: a master that stays would hold a pipe open
                    timeout=None if asks else 2 * self.timeout_s,
                )
            except subprocess.TimeoutExpired:
                raise UnreachableError(f"{self.host} did not answer within {2 * self.timeout_s:g} s") from None
            if done.returncode == FAILED:
                raise UnreachableError(f"ssh {self.host}: {_last_words(err) or 'failed, as said above'}")

    def run(self, command: str, *, stdin: bytes = b"", patience: float = 3) -> Answer:
        """A shell command there, to its end or for `patience` times the time-out. Raises UnreachableError."""
        self.open()
        limit_s = patience * self.timeout_s
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            with subprocess.Popen(self._words(command), stdin=given, stdout=out, stderr=err) as process:
                try:
                    code = self._wait(process, limit_s, out, err)
                except BaseException:
                    process.kill()
                    raise
            if code == FAILED:
                raise UnreachableError(f"ssh {self.host}: {_last_words(err) or 'the connection broke'}")
            out.seek(0)
            return Answer(code=code, out=out.read(), err=_last_words(err))

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float, *files: IO[bytes]) -> int:
        """The exit code. What it writes meanwhile must not fill the disk here. Raises UnreachableError, UserError."""
        end = time.monotonic() + limit_s
        while True:
            try:
                code = process.wait(timeout=min(LOOK_S, max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                code = None
            _check_size(self.host, *files)
            if code is not None:
                return code
            if time.monotonic() >= end:
                raise UnreachableError(f"{self.host} did not answer within {limit_s:g} s")

    def stream(self, command: str, *, stdin: bytes = b"") -> Stream:
        """What a shell command there prints, as it comes. Raises UnreachableError."""
        self.open()
        return Stream(self._words(command), stdin, host=self.host, silence_s=3 * self.timeout_s)

    def push(self, source: Path, target: str) -> None:
        """Make the folder `target` there what `source` is here, by rsync; goes on where it was cut off.

        Raises UnreachableError, also where either side has no rsync.
        """
        self.open()
        with tempfile.TemporaryFile() as err:
            words = ["rsync", "--recursive", "--times", "--delete", "--compress", "--protect-args"]
            words += [f"--timeout={int(max(1, self.timeout_s))}", f"--rsh={shlex.join(self._ssh())}"]
            words += [f"{source}/", f"{self.host}:{target}/"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
            if done.returncode:
                raise UnreachableError(f"rsync to {self.host}: {_last_words(err) or f'exit code {done.returncode}'}")

    def _words(self, command: str) -> list[str]:
        return [*self._ssh(), "--", self.host, command]

    def _ssh(self, *, asks: bool = False) -> list[str]:
        every_s = max(1, int(self.timeout_s / 4))
        options = {
            "ControlMaster": "auto",
            "ControlPath": str(self._socket),
            "ControlPersist": str(60 * max(1, self._connect.persist_min)),
            "BatchMode": "no" if asks else "yes",
            "StrictHostKeyChecking": "ask" if asks else "yes",  # whatever the user's configuration says
            "ConnectTimeout": str(max(1, int(self.timeout_s))),
            "ServerAliveInterval": str(every_s),
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "RequestTTY": "no",
        }
        config = ["-F", self._connect.ssh_config] if self._connect.ssh_config else []
        return ["ssh", *config, *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]

    def _control(self, what: str) -> int:
        """ssh -O: asks the master here, no network."""
        words = [*self._ssh(), "-O", what, "--", self.host]
        nothing = subprocess.DEVNULL
        try:
            done = subprocess.run(words, stdin=nothing, stdout=nothing, stderr=nothing, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            return FAILED
        return done.returncode


class Stream:
    """Bytes of a command there; `last_words` says how it ended. Reading raises UnreachableError after a silence."""

    def __init__(self, words: Sequence[str], stdin: bytes, *, host: str, silence_s: float) -> None:
        self._host, self._silence_s = host, silence_s
        self._err = tempfile.TemporaryFile()  # noqa: SIM115  closed with the stream
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            self._process = subprocess.Popen(words, stdin=given, stdout=subprocess.PIPE, stderr=self._err, bufsize=0)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, none at the end."""
        out = self._process.stdout
        assert out is not None
        _check_size(self._host, self._err)
        if not select.select([out], [], [], self._silence_s)[0]:
            raise UnreachableError(f"{self._host} sent nothing for {self._silence_s:g} s")
        part: bytes = out.read(size)
        return part

    def read_line(self, limit: int = 65536) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) < limit and (one := self.read(1)):
            line += one
        return line

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdout:
            self._process.stdout.close()
        end = time.monotonic() + 2
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._err.close()

    def last_words(self) -> str:
        """What ssh, or the command there, said last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        return _last_words(self._err)


def shell(words: Sequence[str], **variables: str) -> str:
    """A command line for any login shell there, which starts a login bash: Slurm is often on PATH only in one."""
    line = " ".join(["exec", "env", *(shlex.quote(f"{k}={v}") for k, v in variables.items()), shlex.join(words)])
    return login(line)


def login(script: str) -> str:
    """`script` in a login bash. Raises UserError where it holds control characters: a value brought them."""
    if any(ord(sign) < 32 or ord(sign) == 127 for sign in script):
        raise UserError(f"a control character in a command for another machine: {script!r}")
    return f"exec bash -lc {shlex.quote(script)}"


def socket_folder() -> Path:
    """A folder for the masters' sockets, ours alone, with a path short enough. Raises UserError."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent", "inpaint-bench")
    short = len(str(runtime)) <= SOCKET_FOLDER_LIMIT and runtime.parent.is_dir()
    folder = runtime if short else Path(f"/tmp/inpaint-bench-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{folder}: must be a folder that is yours alone (mode 0700); remove it and try again")
    return folder


def printable(text: str, limit: int = 600) -> str:
    """Join the lines into one, sanitized, and return its last `limit` characters."""
    return sanitize(" ".join(text.split()))[-limit:]


def _check_size(host: str, *files: IO[bytes]) -> None:
    if sum(os.fstat(file.fileno()).st_size for file in files) > MAX_ANSWER_BYTES:
        raise UserError(f"{host} answered with more than {MAX_ANSWER_BYTES:,} bytes")


def _last_words(file: IO[bytes], lines: int = 2) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
    text = file.read().decode(errors="replace")
    said = [line for line in (printable(line) for line in text.splitlines()) if line.strip("@ ")]
    return "; ".join(said[-lines:])
