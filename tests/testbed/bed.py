"""Start and stop a test bed, run commands on it, and inject failures."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from . import database, packages, processes
from .errors import BedError, PortsTakenError
from .plan import PLAN_FILE, TEMPLATES, Plan, machine_gpus, port_is_taken
from .processes import NODE, daemon_env, login_env, ours, spawn, wait_until

# A requeued job may start again once its old steps are dead: KillWait (5 s) and 3 s. Sooner, slurmd answers
# "Job already running" and the node is drained.
REQUEUE_REST_S = 8
NODES_READY_S = 40

_SLURM_VARIABLES = (
    "SLURM_",
    "SBATCH_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SINFO_",
    "SACCT_",
    "SCANCEL_",
    "SCONTROL_",
)
PID_FILES = "*/pids/*"
_SACCT_FIELDS = "JobID,JobName,Partition,State,ExitCode,NodeList"
_STANDIN = TEMPLATES.parent / "sacct_standin.py"


class Bed:
    """The test bed of a state folder, running or not. Methods that need it running raise BedError otherwise."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def at(cls, state: Path) -> Bed:
        plan = Plan.load(state)
        if plan is None:
            raise BedError(f"no test bed in {state}; bring one up with `python -m tests.testbed up`")
        return cls(plan)

    @property
    def state(self) -> Path:
        return self.plan.state

    @property
    def sites(self) -> tuple[str, ...]:
        return self.plan.sites

    # -- start and stop ---------------------------------------------------------------------------

    def up(self) -> None:
        """Start all daemons and wait until all nodes are idle. After a failure nothing runs and the logs remain."""
        packages.require(light=self.plan.light)
        with self._lock():
            self._claim_state()
            self._refuse_taken_ports()
            try:
                self._start()
            except BaseException:
                self._stop_all(gently=False)
                raise

    def down(self, *, keep: bool = False) -> None:
        """Stop all daemons and jobs of this bed, and remove its folder unless `keep`, which leaves the logs.

        Idempotent. Jobs are killed, not cancelled. Without `keep` the folder is removed anyway, so daemons are killed
        too; files that were kept are removed by the next `up`.
        """
        if not (self.state / PLAN_FILE).exists():
            return
        with self._lock():
            self._stop_all(gently=keep)
            if not keep:
                shutil.rmtree(self.state)

    def is_up(self) -> bool:
        return bool(self.daemons()) and all(self.daemons().values())

    def daemons(self) -> dict[str, int | None]:
        """Return the pid of each daemon that was started, None for one that no longer runs."""
        files = sorted(self.state.glob(PID_FILES))
        return {f"{file.parent.parent.name}/{file.name}": ours(file, self.state) for file in files}

    # -- commands of a site -----------------------------------------------------------------------

    def conf(self, site: str) -> Path:
        """Return the path for SLURM_CONF."""
        self._check_site(site)
        return self.plan.conf(site)

    def exports(self, site: str) -> str:
        """Return shell lines that make Slurm's commands, and submitit, use the site."""
        lines = [f"export SLURM_CONF={shlex.quote(str(self.conf(site)))}"]
        if self.plan.light:
            # A second eval, for the other site, must not add a second folder.
            path = shlex.quote(f"{self._standin_folder()}:")
            lines.append(f'case "$PATH" in {path}*) ;; *) export PATH={path}"$PATH" ;; esac')
        return "\n".join(lines) + "\n"

    def env(self, site: str) -> dict[str, str]:
        """Return the caller's environment for the site, without variables of any other Slurm."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_SLURM_VARIABLES)}
        env["SLURM_CONF"] = str(self.conf(site))
        if self.plan.light:
            env["PATH"] = f"{self._standin_folder()}:{env.get('PATH', '/usr/bin:/bin')}"
        return env

    def run(
        self, site: str, *command: str | Path, timeout_s: float = 60, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the site. A non-zero exit code is returned, not raised."""
        return subprocess.run(
            [str(part) for part in command],
            env=self.env(site),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def sacct(self, site: str, job_ids: Iterable[int | str] | None = None) -> list[dict[str, str]]:
        """Return a row of sacct per job or array task, without steps. The database lags by about a second."""
        window = ["-S", "now-2days", "-a"] if job_ids is None else ["-j", ",".join(map(str, job_ids))]
        done = self.run(site, "sacct", "-X", "--parsable2", "-o", _SACCT_FIELDS, *window)
        if done.returncode:
            raise BedError(f"sacct at {site}: {done.stderr.strip()}")
        header, *rows = done.stdout.splitlines()
        return [dict(zip(header.split("|"), row.split("|"), strict=True)) for row in rows]

    def ended(self, site: str, job_ids: Sequence[str], timeout_s: float = 30) -> list[str]:
        """Wait until all jobs have ended in the accounting, and return their states."""
        seen: dict[str, str] = {}

        def all_ended() -> bool:
            seen.update({row["JobID"]: row["State"] for row in self.sacct(site)})
            return all(seen.get(job, "PENDING") not in ("PENDING", "RUNNING") for job in job_ids)

        self.wait(all_ended, timeout_s=timeout_s, what=f"the end of {', '.join(job_ids)} in sacct")
        return [seen[job] for job in job_ids]

    def wait(self, predicate: Callable[[], object], timeout_s: float = 120, what: str = "a condition") -> None:
        """Poll until true. Raises BedError with the tails of the controllers' logs on timeout."""
        logs = [self.plan.home(site) / "log" / "slurmctld.out" for site in self.sites]
        wait_until(predicate, timeout_s=timeout_s, what=what, logs=logs, step_s=0.1)

    # -- failures ---------------------------------------------------------------------------------

    def kill_node(self, site: str, node: str, *, at_once: bool = True) -> None:
        """Let a node fail as if it lost power: kill slurmd, steps and jobs on it.

        slurmctld would notice after about 25 s; with `at_once` it is set down at once, and jobs end as NODE_FAIL.
        """
        self._check_node(site, node)
        lost = processes.bed_processes(self.state, node=f"{site}/{node}")
        processes.kill(lost, signal.SIGSTOP)  # all at once: none is left to report that another was killed
        self._kill_all(node=f"{site}/{node}")
        (self.plan.home(site) / "pids" / node).unlink(missing_ok=True)
        if at_once:
            self._must(site, "scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def start_node(self, site: str, node: str) -> None:
        """Restart a failed node and wait until it accepts jobs."""
        self._check_node(site, node)
        if not ours(self.plan.home(site) / "pids" / node, self.state):
            self._spawn_node(site, node)
        log = self.plan.home(site) / "log" / f"slurmd.{node}.out"
        wait_until(
            lambda: node in self._ready_nodes(site),
            timeout_s=120,
            what=f"{node} of {site} to be ready",
            logs=[log],
        )

    def stop_controller(self, site: str) -> None:
        """Kill slurmctld: jobs continue, every Slurm command fails."""
        self._check_site(site)
        pid_file = self.plan.home(site) / "pids" / "slurmctld"
        if pid := ours(pid_file, self.state):
            processes.stop([pid], patience_s=10)

    def start_controller(self, site: str) -> None:
        """Restart slurmctld from its saved state and wait until it answers."""
        self._check_site(site)
        # -R: else partitions are up again as in slurm.conf, and jobs that waited in one that was set down start.
        self._spawn(site, "slurmctld", "slurmctld", "-D", "-R", "-f", str(self.conf(site)))
        log = self.plan.home(site) / "log" / "slurmctld.out"
        wait_until(lambda: self._ready_nodes(site), timeout_s=60, what=f"slurmctld of {site}", logs=[log])

    def stop_accounting(self) -> None:
        """Kill the slurmdbd of all sites: sacct fails, slurmctld queues its records until it is back."""
        database.stop_slurmdbd(self.plan)

    def start_accounting(self) -> None:
        """Restart slurmdbd and wait until it listens."""
        database.start_slurmdbd(self.plan)

    def nudge(self, site: str) -> list[str]:
        """Reset the begin time of requeued jobs, which Slurm delays by 120 s. Return their ids.

        A job that was requeued less than REQUEUE_REST_S ago is left for the next call.
        """
        fields = "JobArrayID:40,RestartCnt:12,SubmitTime:24,Reason:40"
        listing = self._must(site, "squeue", "-h", "-r", "-t", "PD", "-O", fields)
        nudged = []
        for line in listing.splitlines():
            job, restarts, submitted, reason = line.split(maxsplit=3)
            rested_s = time.time() - datetime.fromisoformat(submitted).timestamp()
            if reason.strip() == "BeginTime" and int(restarts) > 0 and rested_s >= REQUEUE_REST_S:
                self._must(site, "scontrol", "update", f"job={job}", "starttime=now")
                nudged.append(job)
        return nudged

    # -- implementation ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the folder. Raises BedError if another command holds the lock."""
        self.state.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BedError(f"another up or down is at work on {self.state}") from None
            yield
        finally:
            os.close(folder)

    def _claim_state(self) -> None:
        """Empty the state folder. Raises BedError if it holds other files, because `down` removes it whole."""
        if (self.state / PLAN_FILE).exists():
            if alive := processes.bed_processes(self.state):
                raise BedError(f"a bed is up in {self.state} ({len(alive)} processes); bring it down first")
            for entry in self.state.iterdir():  # the folder itself is locked and remains
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif any(self.state.iterdir()):
            raise BedError(f"{self.state} holds files that are no test bed's; name an empty or a new folder")
        self.plan.save()

    def _refuse_taken_ports(self) -> None:
        if taken := [port for port in self.plan.ports() if port_is_taken(port)]:
            shutil.rmtree(self.state)
            raise PortsTakenError(
                f"port {', '.join(map(str, taken))} taken (another bed up?); name other ports with --port"
            )

    def _start(self) -> None:
        for site in self.sites:
            self._write_site(site)
        with contextlib.ExitStack() as meanwhile:
            if not self.plan.light:
                meanwhile.enter_context(database.installing(self.plan))
            self._start_munge()
        if not self.plan.light:
            database.start(self.plan)
        for site in self.sites:
            self._spawn(site, "slurmctld", "slurmctld", "-D", "-f", str(self.conf(site)))
            for node in self.plan.nodes(site):
                self._spawn_node(site, node)
        for site in self.sites:
            nodes, logs = self.plan.nodes(site), self.plan.home(site) / "log"
            wait_until(
                lambda site=site, nodes=nodes: self._ready_nodes(site).issuperset(nodes),  # type: ignore[misc]
                timeout_s=NODES_READY_S,
                what=f"all nodes of {site} to be idle",
                logs=[logs / "slurmctld.out", *(logs / f"slurmd.{node}.out" for node in nodes)],
            )

    def _write_site(self, site: str) -> None:
        home = self.plan.home(site)
        for folder in ("etc", "log", "pids", "state", "dev", "munge"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        # Numbered from 0: a job's CUDA_VISIBLE_DEVICES is the number in the name that Slurm sees.
        devices = machine_gpus()[: self.plan.gpus] or [Path("/dev/null")] * 8
        for index, device in enumerate(devices):
            (home / "dev" / f"nvidia{index}").symlink_to(device)
        cached = home / "state" / "env_cache" / getpass.getuser()
        cached.parent.mkdir()
        cached.write_text("".join(f"{name}={value}\n" for name, value in login_env().items()), encoding="utf-8")
        for name, text in self.plan.render(site, packages.slurm_version()).items():
            (home / "etc" / name).write_text(text, encoding="utf-8")
        mail = home / "etc" / "mail"
        mail.write_text(f'#!/bin/sh\necho "$3: $2" >> {shlex.quote(str(home / "log" / "mail"))}\n', encoding="utf-8")
        mail.chmod(0o755)
        if self.plan.light:
            bin_folder = self._standin_folder()
            bin_folder.mkdir(exist_ok=True)
            # -I -S: independent of the caller's Python environment, and fast to start
            script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(str(_STANDIN))} "$@"\n'
            (bin_folder / "sacct").write_text(script, encoding="utf-8")
            (bin_folder / "sacct").chmod(0o755)
        (home / "env.sh").write_text(self.exports(site), encoding="utf-8")

    def _start_munge(self) -> None:
        """Start a munged per site, with one key where they share a slurmdbd."""
        shared = os.urandom(128)
        for site in self.sites:
            home = self.plan.home(site) / "munge"
            key = home / "key"
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128) if self.plan.light else shared)
            own = ("pid", "seed", "log")
            command = [
                *("munged", "--foreground", "--num-threads=2"),
                "--force",  # a parent folder may be world-writable, such as /tmp
                f"--socket={self.plan.munge_socket(site)}",
                f"--key-file={key}",
                *(f"--{name}-file={home / f'munged.{name}'}" for name in own),
            ]
            self._spawn(site, "munged", *command)
        for site in self.sites:
            path = self.plan.munge_socket(site)
            log = self.plan.home(site) / "log" / "munged.out"
            wait_until(
                lambda path=path: _answers(path),  # type: ignore[misc]
                timeout_s=10,
                what=f"munged of {site}",
                logs=[log],
                step_s=0.01,
            )

    def _spawn(self, site: str, name: str, *command: str, mark: str = "") -> None:
        home = self.plan.home(site)
        env = daemon_env(self.state, {"SLURM_CONF": str(self.conf(site))} | ({NODE: mark} if mark else {}))
        log = home / "log" / f"{f'slurmd.{name}' if mark else name}.out"
        spawn(command, pid_file=home / "pids" / name, log=log, env=env)

    def _spawn_node(self, site: str, node: str) -> None:
        (self.plan.home(site) / node).mkdir(exist_ok=True)
        self._spawn(site, node, "slurmd", "-D", "-f", str(self.conf(site)), "-N", node, mark=f"{site}/{node}")

    def _ready_nodes(self, site: str) -> set[str]:
        """Return the nodes that accept jobs; empty while slurmctld does not answer."""
        done = self.run(site, "sinfo", "-h", "-N", "-o", "%N %T", timeout_s=30)
        pairs = (line.split() for line in done.stdout.splitlines())
        return {node for node, state in pairs if state in ("idle", "mixed", "allocated")}

    def _stop_all(self, *, gently: bool) -> None:
        """Stop jobs first, then the daemons: in order from the nodes to munge, or all at once."""
        files = {file: ours(file, self.state) for file in self.state.glob(PID_FILES)}
        daemons = {pid: file for file, pid in files.items() if pid}
        if gently:
            # SIGKILL for jobs, but not for slurmscriptd: slurmctld waits for it.
            for site in self.sites:
                for node in self.plan.nodes(site):
                    on_node = processes.bed_processes(self.state, node=f"{site}/{node}")
                    processes.kill(on_node - set(daemons))
            last = ("slurmctld", "slurmdbd", "mariadbd", "munged")
            groups = [[pid for pid, file in daemons.items() if file.name == name] for name in last]
            nodes = [pid for pid, file in daemons.items() if file.name not in last]
            for group in (nodes, *groups):
                processes.stop(group, patience_s=10)
        self._kill_all()
        for file in files:
            file.unlink(missing_ok=True)

    def _kill_all(self, *, node: str | None = None) -> None:
        """Kill the processes of the bed, or of one SITE/NODE, until none is left: one of them may have forked."""
        end = time.monotonic() + 10
        while alive := processes.bed_processes(self.state, node=node):
            processes.kill(alive)
            if time.monotonic() > end:
                raise BedError(f"processes {sorted(alive)} of the bed in {self.state} survive SIGKILL")
            time.sleep(0.02)

    def _standin_folder(self) -> Path:
        return self.state / "bin"

    def _check_site(self, site: str) -> None:
        if site not in self.sites:
            raise BedError(f"site={site!r} is not in this bed; have: {', '.join(self.sites)}")

    def _check_node(self, site: str, node: str) -> None:
        self._check_site(site)
        if node not in (nodes := self.plan.nodes(site)):
            raise BedError(f"node={node!r} is not at {site}; have: {', '.join(nodes)}")

    def _must(self, site: str, *command: str) -> str:
        done = self.run(site, *command)
        if done.returncode:
            raise BedError(f"{' '.join(command)} at {site}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
