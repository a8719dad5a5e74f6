"""Run login nodes for the bed's sites: a real sshd each on loopback, with its own keys and client configuration.

Nothing of the machine's own ssh is read or written, nor of the user's shell profiles; who uses it says `ssh -F CONFIG
SITE-login`. What an sshd runs finds the site's Slurm, and a login shell greets whoever comes, as on a real login node.
It goes away with its bed, or with `down`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import packages, processes
from .bed import Bed
from .errors import BedError
from .plan import free_port, port_is_taken
from .processes import daemon_env, ours, spawn, wait_until

PACKAGES = ("openssh-server", "openssh-client", "rsync")
PRIVSEP = Path("/run/sshd")  # compiled into sshd, which needs it as root

_SSHD = """\
ListenAddress 127.0.0.1:{port}
HostKey {home}/hostkey
PidFile none
AuthorizedKeysFile {keys}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxSessions 100
MaxStartups 100
UseDNS no
PrintMotd no
PrintLastLog no
SetEnv SLURM_CONF={conf} INPAINT_BENCH_TESTBED={state} HOME={home}/user
Subsystem sftp internal-sftp
"""
_CLIENT = """\
Host {site}-login
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {keys}/id
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  GlobalKnownHostsFile none
"""


def install() -> None:
    """Install sshd and rsync. Raises PackagesError if that fails."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin"
    if missing := [name for name in ("sshd", "ssh", "rsync", "ssh-keygen") if not shutil.which(name, path=path)]:
        packages.apt_get(PACKAGES, f"NO LOGIN NODES: {', '.join(missing)} missing")


class LoginNodes:
    """sshds for the sites of a bed. The bed's `down` stops them too, by their environment variable."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.keys = bed.state / "ssh"
        self.ports: dict[str, int] = {}
        self._made: list[Path] = []

    @property
    def config(self) -> Path:
        """Return the client configuration for `ssh -F`."""
        return self.keys / "config"

    def up(self, *sites: str) -> None:
        self.keys.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0 and not PRIVSEP.exists():
            PRIVSEP.mkdir(mode=0o755)
            self._made.append(PRIVSEP)
        if not (self.keys / "id").exists():
            _keygen(self.keys / "id")
            shutil.copyfile(self.keys / "id.pub", self.keys / "authorized_keys")
        for site in sites:
            self._configure(site)
            self.start(site)

    def start(self, site: str) -> None:
        """Start the sshd of a configured site."""
        home, port = self._home(site), self.ports[site]
        log = home / "log"
        env = daemon_env(self.bed.state, {})
        sshd = shutil.which("sshd", path=env["PATH"])
        assert sshd is not None
        # below a shell: sshd overwrites its environment, and so the bed's variable, with its title
        command = ["sh", "-c", '"$0" -D -e -f "$1"; exit', sshd, str(home / "sshd_config")]
        spawn(command, pid_file=home / "pids" / "sshd", log=log, env=env)
        wait_until(lambda: port_is_taken(port), timeout_s=10, what=f"sshd of {site}", logs=[log])

    def stop(self, site: str) -> None:
        """Kill the sshd and every session."""
        processes.kill(self._processes(site))
        port = self.ports[site]
        wait_until(lambda: not port_is_taken(port), timeout_s=10, what=f"sshd of {site} to end")

    def freeze(self, site: str) -> None:
        """Stop the sshd and its sessions: connections stay open without any answer."""
        processes.kill(self._processes(site), signal.SIGSTOP)

    def thaw(self, site: str) -> None:
        processes.kill(self._processes(site), signal.SIGCONT)

    @contextlib.contextmanager
    def another_host_key(self, site: str) -> Iterator[None]:
        """Change the host key, as after a reinstallation or in an attack."""
        key = self._home(site) / "hostkey"
        kept = key.rename(key.with_name("kept"))
        _keygen(key)
        self.stop(site)
        self.start(site)
        try:
            yield
        finally:
            self.stop(site)
            kept.replace(key)
            self.start(site)

    def down(self) -> None:
        for site in self.ports:
            self.stop(site)
        shutil.rmtree(self.keys, ignore_errors=True)
        for folder in self._made:
            folder.rmdir()

    def _configure(self, site: str) -> None:
        home = self._home(site)
        for folder in ("pids", "user"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        _keygen(home / "hostkey")
        port = self.ports[site] = free_port()
        facts = {"port": port, "home": home, "keys": self.keys, "site": site, "user": getpass.getuser()}
        (home / "user" / ".bash_profile").write_text(f"echo Welcome to {site}.\n", encoding="ascii")
        conf = _SSHD.format(**facts, conf=self.bed.conf(site), state=self.bed.state)
        (home / "sshd_config").write_text(conf, encoding="utf-8")
        with self.config.open("a", encoding="utf-8") as out:
            out.write(_CLIENT.format(**facts))
        kind, key = (home / "hostkey.pub").read_text(encoding="ascii").split()[:2]
        with (self.keys / "known_hosts").open("a", encoding="ascii") as out:
            out.write(f"[127.0.0.1]:{port} {kind} {key}\n")

    def _home(self, site: str) -> Path:
        return self.keys / site

    def _processes(self, site: str) -> set[int]:
        """Return the sshd, its sessions and their commands."""
        pid = ours(self._home(site) / "pids" / "sshd", self.bed.state)
        if pid is None:
            return set()
        return {pid, *processes.descendants(pid)}


def _keygen(path: Path) -> None:
    path.with_suffix(".pub").unlink(missing_ok=True)
    done = subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BedError(f"ssh-keygen: {done.stderr.strip()}")
