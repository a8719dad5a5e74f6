"""Run MariaDB and slurmdbd, which the sites of a full test bed share."""

from __future__ import annotations

import contextlib
import getpass
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .errors import BedError
from .plan import Plan
from .processes import daemon_env, ours, spawn, start_tick, stop, tail, wait_until


@contextlib.contextmanager
def installing(plan: Plan) -> Iterator[None]:
    """Create an empty database in the background; complete at the end of the block."""
    home = _home(plan)
    (home / "pids").mkdir(parents=True, exist_ok=True)
    for name, text in plan.render_database(home).items():
        (home / name).touch(mode=0o600)  # the mode that slurmdbd requires
        (home / name).write_text(text, encoding="utf-8")
    log = home / "install.log"
    with log.open("wb") as out:
        install = subprocess.Popen(
            [
                "mariadb-install-db",
                f"--defaults-file={home / 'mariadb.cnf'}",
                f"--user={getpass.getuser()}",
                f"--datadir={home / 'data'}",
                "--auth-root-authentication-method=socket",
                "--skip-test-db",
                "--skip-name-resolve",
                "--force",  # the host name may not resolve
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=daemon_env(plan.state, {}),
            cwd="/",
        )
    try:
        yield
        code = install.wait(timeout=60)
    except BaseException:
        install.kill()
        install.wait()
        raise
    if code:
        raise BedError(f"mariadb-install-db failed ({code})\n--- {log}\n{tail(log)}")


def start(plan: Plan) -> None:
    """Start both daemons and register the sites as clusters."""
    home = _home(plan)
    _spawn(plan, "mariadbd", plan.mariadb_port, "mariadbd", f"--defaults-file={home / 'mariadb.cnf'}")
    start_slurmdbd(plan)
    done = subprocess.run(
        ["sacctmgr", "-i", "-Q", "add", "cluster", ",".join(plan.sites)],
        env=daemon_env(plan.state, {"SLURM_CONF": str(plan.conf(plan.sites[0]))}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise BedError(f"sacctmgr could not add the clusters: {done.stderr.strip() or done.stdout.strip()}")


def start_slurmdbd(plan: Plan) -> None:
    """Start slurmdbd and wait until it listens."""
    conf = {"SLURM_CONF": str(_home(plan) / "slurm.conf")}  # slurmdbd reads the slurmdbd.conf in the same folder
    _spawn(plan, "slurmdbd", plan.slurmdbd_port, "slurmdbd", "-D", **conf)


def stop_slurmdbd(plan: Plan) -> None:
    if pid := ours(_home(plan) / "pids" / "slurmdbd", plan.state):
        stop([pid], patience_s=10)


def _home(plan: Plan) -> Path:
    return plan.state / "database"


def _spawn(plan: Plan, name: str, port: int, *command: str, **env: str) -> None:
    home = _home(plan)
    log = home / f"{name}.out"
    pid = spawn(command, pid_file=home / "pids" / name, log=log, env=daemon_env(plan.state, env))
    wait_until(
        lambda: _listens(port) or start_tick(pid) is None,
        timeout_s=30,
        what=f"{name} to listen on port {port}",
        logs=[log],
        step_s=0.02,
    )
    if not _listens(port):
        raise BedError(f"{name} ended at once\n--- {log}\n{tail(log)}")


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False
