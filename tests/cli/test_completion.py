"""Completion in the real shells, installed as a user installs it. A shell that is not on the machine is skipped."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHELLS = ["bash", "zsh", "fish"]
LINES = [  # what is typed, a choice that is offered, one that is not
    ("inpaint-bench ", "status", "gpu="),
    ("inpaint-bench launch gpu=", "h200", "tuned"),
    ("inpaint-bench launch recipe=tuned_", "tuned_hopper", "baseline"),
    ("inpaint-bench launch gpu=a40,h", "h100", "l40s"),  # the second of two values
]
WAIT_S = 60.0
READY = "ready> "


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    environment = {"HOME": str(tmp_path), "TERM": "dumb", "LANG": "C.UTF-8"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Two commands: a shell replaces itself by the only one, and then cannot be recognised.
    install = subprocess.run(
        [shell, "-c", "inpaint-bench --install-completion; true"], env=environment, capture_output=True, text=True
    )
    assert f"{shell} completion installed" in install.stdout, install.stderr
    for typed, offered, left_out in LINES:
        if shell == "fish":  # it completes what is given, as a Tab would
            words = subprocess.run(
                [shell, "-c", f"complete -C '{typed}'"], env=environment, capture_output=True, text=True
            ).stdout
        else:
            words = _press_tab(shell, typed, offered, environment)
        assert offered in words, typed
        assert left_out not in words, typed


def _press_tab(shell: str, typed: str, offered: str, environment: dict[str, str]) -> str:
    """Type into an interactive shell and press Tab until it offers something; return what it then showed."""
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(shell, [shell, "-i"], environment)
    try:
        os.write(terminal, f"PS1='{READY}'; stty cols 200\n".encode())
        _read_until(terminal, f"\r{READY}|\n{READY}")
        os.write(terminal, typed.encode())
        shown = ""
        # One Tab completes what is common, the next one lists; in zsh the first of a session loads the completion.
        for _ in range(20):
            os.write(terminal, b"\t")
            shown += _read_until(terminal, re.escape(offered), wait_s=WAIT_S / 20)
            if offered in shown:
                break
        return shown
    finally:
        os.close(terminal)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _read_until(terminal: int, pattern: str, wait_s: float = WAIT_S) -> str:
    """Return what the terminal shows until the pattern and the half second after it, or until the time is over."""
    shown, end = "", time.monotonic() + wait_s
    while (left := end - time.monotonic()) > 0 and select.select([terminal], [], [], left)[0]:
        shown += os.read(terminal, 65536).decode(errors="replace")
        if re.search(pattern, shown):
            end = min(end, time.monotonic() + 0.5)
    return shown
