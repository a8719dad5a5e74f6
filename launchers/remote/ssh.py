"""One OpenSSH connection to a site's login node, with the user's own ssh and configuration.

Opening it starts a ControlMaster, which may ask for a password or a second factor if there is a terminal. All later
commands are multiplexed over it and never ask. It closes `persist_min` minutes after its last use. Host keys are always
checked, and a host that stops answering ends a command in bounded time.
"""

import atexit
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from inpaint_bench.core import child
from inpaint_bench.core.config.site import ConnectConfig
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.errors import UserError

SSH_ERROR = 255  # exit code of ssh itself
CONTROL_TIMEOUT_S = 5.0  # for the local master process, which answers at once
MAX_MESSAGE_CHARS = 600  # limit for what another machine says
# In /tmp, because the path of a socket may have 107 bytes, of which ssh needs 57, and a file system of the network may
# have no sockets.
SOCKETS = Path(f"/tmp/inpaint-bench-{os.getuid()}")
MARK = ": inpaint-bench"  # a line before what a script prints: above it stands what startup files of a shell print
MARK_LINE = f"\n{MARK}\n".encode()
PROBE = b":\n"  # as a command it does nothing


class UnreachableError(Exception):
    """The site gave no answer, or none that can be read. The message has what ssh printed."""


class SshConnection:
    """Runs commands on `connect.host`. Nothing is opened before the first of them."""

    def __init__(self, connect: ConnectConfig) -> None:
        assert connect.host is not None
        self.host = connect.host
        self.timeout_s = connect.timeout_s
        self._connect = connect
        # %C is OpenSSH's hash of both hosts, port and user: one socket for each destination.
        self._socket = SOCKETS / "%C"

    def open(self) -> None:
        """Make sure that a master connection is up. Raises UnreachableError."""
        make_socket_folder()
        # ControlPersist=0 would keep the master for ever. It gets a minute instead, and is stopped at exit.
        if self._connect.persist_min == 0:
            atexit.register(self._control, "stop")
        if self._control("check") == 0:
            return
        # Only a person at a terminal can be asked for a password or a second factor.
        interactive = sys.stdin.isatty() and sys.stderr.isatty()
        command = [*self._ssh(master=True, interactive=interactive), "--", self.host, "true"]
        # A little more than ssh's own limit, so that ssh can say what it waited for.
        timeout_s = self.timeout_s + CONTROL_TIMEOUT_S
        limits: dict[str, Any] = {} if interactive else {"stdin": subprocess.DEVNULL, "timeout": timeout_s}
        with tempfile.TemporaryFile() as err:
            try:
                # No pipe for standard error: the master keeps it open, so that reading it would not end.
                stderr = None if interactive else err
                code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, **limits).returncode
            except subprocess.TimeoutExpired:
                raise UnreachableError(f"{self.host} did not answer within {timeout_s:g} s") from None
            err.seek(0)
            # Any other exit code is that of `true` at the site, so the connection stands.
            if code == SSH_ERROR:
                raise UnreachableError(f"ssh {self.host}: {last_lines(err.read()) or 'failed, as printed above'}")

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> CompletedProcess[bytes]:
        """Run a shell command at the site, for at most three times the site's timeout. Raises UnreachableError."""
        self.open()
        timeout_s = timeout_s or 3 * self.timeout_s
        try:
            done = child.run([*self._ssh(), "--", self.host, command], stdin=stdin, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"{self.host} did not answer within {timeout_s:g} s") from None
        # A command that itself exits with 255 passes for a broken connection too.
        if done.returncode == SSH_ERROR:
            raise UnreachableError(f"ssh {self.host}: {last_lines(done.stderr) or 'the connection broke'}")
        return done

    def run_login(self, script: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> CompletedProcess[bytes]:
        """Run a script in a login bash there and return what it printed itself.

        Raises UnreachableError, also if a startup file kept the script from being run.
        """
        done = self.run(login(script), stdin=stdin, timeout_s=timeout_s)
        if not strip_startup(done):
            raise UnreachableError(f"{self.host}: the command was not run: {self.why_failed(done)}")
        return done

    def why_failed(self, done: CompletedProcess[bytes]) -> str:
        """Return what a startup file does to commands, else what a command printed last, else its exit code."""
        return self.startup_problem() or last_lines(done.stderr) or f"exit code {done.returncode}"

    def startup_problem(self) -> str | None:
        """Return what a startup file of a shell at the site does to commands, and the cure. It takes a login.

        An account that may run nothing, as with an expired password, ends a command too, and says why.
        """
        script = f"echo {MARK}; {login('cat')}"
        try:
            done = self.run(script, stdin=PROBE)
        except UnreachableError:
            return None
        _, shell, rest = done.stdout.partition(MARK_LINE[1:])
        _, profile, stdin = rest.partition(MARK_LINE)
        if stdin == PROBE:
            return None
        problem = "reads the standard input of commands" if profile else "ends or replaces it before it runs a command"
        names = "~/.bash_profile, ~/.profile, ~/.bashrc" if shell else "~/.bashrc"
        cure = "put those lines there between `if [ -t 0 ]; then` and `fi`, so that only a terminal gets them"
        sentence = f"a startup file of your shell on {self.host} ({names} or one of the site's) {problem}; {cure}"
        if not shell and (printed := last_lines(done.stdout.replace(PROBE, b"") + b"\n" + done.stderr)):
            return f"{self.host} printed {printed!r} and ran no command; if that does not say why, {sentence}"
        return sentence

    def _ssh(self, *, master: bool = False, interactive: bool = False) -> list[str]:
        # Without forwardings, local commands and terminals, whatever the user's configuration says for this host: they
        # would fail in batch mode, or print into the replies.
        # The ServerAlive options end a connection over which nothing comes for three quarters of the timeout.
        options = {
            "ControlMaster": "auto" if master else "no",
            "ControlPath": str(self._socket),
            "ControlPersist": str(60 * max(1, self._connect.persist_min)),
            "BatchMode": "no" if interactive else "yes",
            "StrictHostKeyChecking": "ask" if interactive else "yes",  # whatever the user's configuration says
            "ConnectTimeout": str(self.timeout_s),
            "ServerAliveInterval": str(max(1, self.timeout_s // 4)),
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "RequestTTY": "no",
        }
        config = ["-F", self._connect.ssh_config] if self._connect.ssh_config else []
        return ["ssh", *config, *(f"-o{key}={value}" for key, value in options.items())]

    def _control(self, request: str) -> int:
        """Send a control command to the local master process; no network is involved. Return its exit code."""
        command = [*self._ssh(), "-O", request, "--", self.host]
        try:
            return child.run(command, timeout_s=CONTROL_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            return SSH_ERROR


def shell(command: Sequence[str], **variables: str) -> str:
    """Return the script that runs a command with environment variables."""
    return f"exec {shlex.join(['env', *(f'{key}={value}' for key, value in variables.items()), *command])}"


def login(script: str) -> str:
    """Quote a script for the user's shell at the site, whichever it is. Raises UserError for a control character."""
    if not script.isprintable():  # it came in with a value
        raise UserError(f"a control character in a command for another machine: {script!r}")
    return f"exec {shlex.join(login_bash(script))}"


def login_bash(script: str) -> list[str]:
    """Return the command that runs a script in a login bash, because Slurm is often on PATH only there."""
    return ["bash", "-lc", f"for fd in 1 2; do printf '\\n%s\\n' '{MARK}' >&$fd; done; {script}"]


def strip_startup(done: CompletedProcess[bytes]) -> bool:
    """Remove what startup files printed from the output of a login bash; return False if it did not run its script."""
    if MARK_LINE not in done.stdout:
        return False
    done.stdout, done.stderr = (output.partition(MARK_LINE)[2] for output in (done.stdout, done.stderr))
    return True


def make_socket_folder(folder: Path = SOCKETS) -> None:
    """Make the folder of the masters' sockets, which only this user can enter. Raises UnreachableError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # lstat, not stat: another user may have put a link there.
    status = folder.lstat()
    if status.st_uid != os.getuid():
        raise UnreachableError(f"{folder}: belongs to user {status.st_uid}, and ssh needs it; ask them to remove it")
    if not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
        raise UnreachableError(f"{folder}: must be a folder that is yours alone (mode 0700); remove it and try again")


def last_lines(output: bytes) -> str:
    """Return the last two lines in one, without control characters."""
    text = [one_line(line) for line in output[-8192:].decode(errors="replace").splitlines()]
    return "; ".join([line for line in text if line.strip("@ ")][-2:])  # "@@@@" frames OpenSSH's warnings


def one_line(text: str) -> str:
    """Return a text from another machine in one line, without control characters."""
    return sanitize(" ".join(text.split()))[-MAX_MESSAGE_CHARS:]
