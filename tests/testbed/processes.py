"""Run daemons in the foreground; find them by pid file, start time, an environment variable and the log of a step."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .errors import BedError

# Every daemon carries these; a slurmstepd inherits them from its slurmd, jobs do not. They must come after
# SLURM_CONF: slurmstepd writes its title over the variables before it.
OWNER = "INPAINT_BENCH_TESTBED_OWNER"  # the bed's state folder
NODE = "INPAINT_BENCH_TESTBED_NODE"  # SITE/NODE, on a slurmd and its steps

_PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"

# References to children, so that they are reaped and Python does not warn about running ones.
_children: dict[int, subprocess.Popen[bytes]] = {}


def daemon_env(state: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Return a minimal environment, so that a bed behaves the same from pytest, make and a shell."""
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    env["PATH"] = f"{env.get('PATH', '/usr/bin:/bin')}:{_SBIN}"  # Debian keeps daemons in sbin
    return {**env, **extra, OWNER: str(state)}


def login_env() -> dict[str, str]:
    """Return the environment of a login shell without any profile."""
    user = pwd.getpwuid(os.getuid())
    path = f"{_SBIN}:/usr/local/bin:/usr/bin:/bin"
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": "/bin/bash", "PATH": path}


def spawn(command: Sequence[str], *, pid_file: Path, log: Path, env: Mapping[str, str]) -> int:
    """Start a daemon in its own session and record its pid."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd="/",
            umask=0o022,
            start_new_session=True,
        )
    _children[child.pid] = child
    pid_file.write_text(f"{child.pid} {start_tick(child.pid)}\n", encoding="ascii")
    return child.pid


def start_tick(pid: int) -> str | None:
    """Return when the process started; None if it does not run or is a zombie, which init may reap late."""
    if child := _children.get(pid):
        child.poll()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def environment(pid: int) -> dict[str, str]:
    """Return the environment of the process; empty if it ended, is a kernel thread or is not readable."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
    return {name: value for name, sep, value in pairs if sep}


def ours(pid_file: Path, state: Path) -> int | None:
    """Return the pid in the file if that process still runs and belongs to the bed, else None."""
    try:
        text, _, tick = pid_file.read_text(encoding="ascii").strip().partition(" ")
        pid = int(text)
    except (FileNotFoundError, ValueError):
        return None
    if start_tick(pid) != tick or environment(pid).get(OWNER) != str(state):
        return None
    return pid


def bed_processes(state: Path, *, node: str | None = None) -> set[int]:
    """Return all processes of the bed, or of one SITE/NODE: daemons, steps, jobs and their descendants.

    A job's process that was reparented is found by SLURM_CONF and node in its environment. The caller and its ancestors
    are excluded, because a shell may have the bed's SLURM_CONF.
    """
    parents = _parents()
    site, _, name = (node or "").partition("/")
    found = set()
    for pid in parents:
        env = environment(pid)
        if env.get(OWNER) == str(state):
            mine = node is None or env.get(NODE) == node
        elif log := _log_of_step(pid, state):
            mine = node is None or log == f"{site}/log/slurmd.{name}.log"
        else:
            conf = env.get("SLURM_CONF", "")
            here = str(state / site) if node else str(state)
            mine = conf.startswith(f"{here}/") and "SLURM_JOB_ID" in env and name in ("", env.get("SLURMD_NODENAME"))
        if mine:
            found.add(pid)
    grew = True
    while grew:
        kin = {pid for pid, parent in parents.items() if parent in found} - found
        found |= kin
        grew = bool(kin)
    myself = os.getpid()
    while myself in parents:
        found.discard(myself)
        myself = parents[myself]
    return found


def _log_of_step(pid: int, state: Path) -> str:
    """Return the log in the bed that a slurmstepd has open, its slurmd's: newer ones clear their environment."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd"):
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                if (log := opened.readlink()).is_relative_to(state):
                    return str(log.relative_to(state))
    return ""


def descendants(pid: int) -> set[int]:
    """Return all descendants of a process."""
    parents, found = _parents(), {pid}
    while kin := {one for one, parent in parents.items() if parent in found} - found:
        found |= kin
    return found - {pid}


def kill(pids: Iterable[int], sig: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def stop(pids: Iterable[int], *, patience_s: float) -> None:
    """Send SIGTERM, and SIGKILL to processes that still run after the timeout."""
    alive = {pid: tick for pid in pids if (tick := start_tick(pid))}
    kill(alive, signal.SIGTERM)
    end = time.monotonic() + patience_s
    while alive and time.monotonic() < end:
        time.sleep(0.02)
        alive = {pid: tick for pid, tick in alive.items() if start_tick(pid) == tick}
    kill(alive)


def wait_until(
    predicate: Callable[[], object],
    *,
    timeout_s: float,
    what: str,
    logs: Sequence[Path] = (),
    step_s: float = 0.05,
) -> None:
    """Poll until true. Raises BedError with the tail of the logs on timeout."""
    end = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= end:
            tails = "".join(f"\n--- {log}\n{tail(log)}" for log in logs)
            raise BedError(f"waited {timeout_s:g} s in vain for {what}{tails}")
        time.sleep(step_s)


def tail(log: Path, lines: int = 15) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({error})"


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
    return parents
