"""Plan of a test bed: sites, variant, folder, ports, configuration files. Starts nothing."""

from __future__ import annotations

import getpass
import json
import random
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from .errors import BedError, PortsTakenError

SITES = ("grace", "delta")
DEFAULT_PORT = 17000
PORTS_PER_SITE = 10  # slurmctld and up to nine nodes
PORT_RANGE = PORTS_PER_SITE * len(SITES) + 2  # and slurmdbd, mariadbd
TEMPLATES = Path(__file__).parent / "sites"
PLAN_FILE = "testbed.json"
DEVICES = Path("/dev")

# A socket's path holds 107 characters; slurmstepd's is
# STATE/delta/gpua001/gpua001_<8-digit job>.<10-digit step>
STATE_PATH_LIMIT = 107 - len("/delta/gpua001/gpua001_12345678.4294967291")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sites, variant, folder and ports of a test bed."""

    state: Path  # all files of the bed
    sites: tuple[str, ...] = SITES
    light: bool = False  # no database; sacct is a stand-in
    gpus: int = 0  # if not 0: delta as one node with so many of the machine's own GPUs
    port: int = DEFAULT_PORT  # first of PORT_RANGE ports

    def __post_init__(self) -> None:
        unknown = [site for site in self.sites if site not in SITES]
        if unknown or not self.sites or len(set(self.sites)) != len(self.sites):
            raise BedError(f"sites={','.join(self.sites)!r}: name each once, of: {', '.join(SITES)}")
        if self.gpus and self.sites != ("delta",):
            raise BedError(f"gpus={self.gpus}: real GPUs are a variant of delta alone, give --sites delta as well")
        if not 0 <= self.gpus <= (have := len(machine_gpus())):
            raise BedError(f"gpus={self.gpus}: this machine has {have} (/dev/nvidia0 and so on)")
        if not 1024 <= self.port <= 65535 - PORT_RANGE:
            raise BedError(f"port={self.port}: the bed needs {PORT_RANGE} ports from 1024 to 65535")
        text = str(self.state)
        if not self.state.is_absolute() or re.search(r"[^\w./+@~-]", text):
            raise BedError(f"state={text!r}: needs an absolute path without blanks or signs Slurm reads")
        if len(text) > STATE_PATH_LIMIT:
            raise BedError(
                f"state={text!r} is {len(text)} characters long; sockets inside it allow {STATE_PATH_LIMIT}. "
                "Set INPAINT_BENCH_TESTBED or --state to a shorter folder"
            )

    @property
    def variant(self) -> str:
        return f"light, real GPUs: {self.gpus}" if self.gpus else "light" if self.light else "full"

    @property
    def slurmdbd_port(self) -> int:
        return self.port + PORTS_PER_SITE * len(SITES)

    @property
    def mariadb_port(self) -> int:
        return self.slurmdbd_port + 1

    def home(self, site: str) -> Path:
        return self.state / site

    def conf(self, site: str) -> Path:
        return self.home(site) / "etc" / "slurm.conf"

    def munge_socket(self, site: str) -> Path:
        return self.home(site) / "munge" / "sock"

    def site_ports(self, site: str) -> range:
        """Return the ports of a site: first slurmctld's, then one per node."""
        first = self.port + PORTS_PER_SITE * SITES.index(site)
        return range(first, first + PORTS_PER_SITE)

    def ports(self) -> list[int]:
        """Return every port that this bed may listen on."""
        ports = [port for site in self.sites for port in self.site_ports(site)]
        return ports if self.light else [*ports, self.slurmdbd_port, self.mariadb_port]

    def site_conf(self, site: str) -> str:
        return "\n".join(
            (TEMPLATES / name).read_text(encoding="utf-8")
            for name in (
                "common.conf",
                "light.conf" if self.light else "full.conf",
                f"{self._folder(site)}/slurm.conf",
            )
        )

    def nodes(self, site: str) -> list[str]:
        """Return the names of the site's nodes, in the order of its template; each has a slurmd."""
        return re.findall(r"^NodeName=(?!DEFAULT)(\S+)", self.site_conf(site), flags=re.MULTILINE)

    def render(self, site: str, version: str) -> dict[str, str]:
        """Return the content of the site's configuration files by name, for a version of Slurm such as 24.11."""
        values: dict[str, object] = {f"port{i}": port for i, port in enumerate(self.site_ports(site))}
        values |= {
            "site": site,
            "home": self.home(site),
            "user": getpass.getuser(),
            "munge_socket": self.munge_socket(site),
            "slurmdbd_port": self.slurmdbd_port,
            # Job ids differ between sites and beds; 20 and 40 million stay below Slurm's limit of 67 million.
            "first_job_id": (SITES.index(site) + 1) * 20_000_000 + int(time.time()) % 10_000_000,
            "gpus": self.gpus,
            "last_gpu": self.gpus - 1,
            "get_env": "GetEnvTimeout=0" if version < "26" else "",
            "cgroup": "cgroup/v1" if version < "24" else "disabled",
        }
        gres = (TEMPLATES / self._folder(site) / "gres.conf").read_text(encoding="utf-8")
        return {
            "slurm.conf": Template(self.site_conf(site)).substitute(values),
            "gres.conf": Template(gres).substitute(values),
            "cgroup.conf": Template((TEMPLATES / "cgroup.conf").read_text(encoding="utf-8")).substitute(values),
        }

    def render_database(self, home: Path) -> dict[str, str]:
        """Return the content of the database's configuration files by name, with a new random password."""
        values = {
            "home": home,
            "user": getpass.getuser(),
            "munge_socket": self.munge_socket(self.sites[0]),
            "slurmdbd_port": self.slurmdbd_port,
            "mariadb_port": self.mariadb_port,
            "password": secrets.token_hex(16),
        }
        return {
            path.name: Template(path.read_text(encoding="utf-8")).substitute(values)
            for path in sorted((TEMPLATES / "database").iterdir())
        }

    def save(self) -> None:
        data = asdict(self) | {"state": str(self.state)}
        (self.state / PLAN_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, state: Path) -> Plan | None:
        """Return the plan of the bed in this folder, or None."""
        try:
            data = json.loads((state / PLAN_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(**data | {"state": state, "sites": tuple(data["sites"])})

    def _folder(self, site: str) -> str:
        return f"{site}_real_gpus" if self.gpus else site


def machine_gpus() -> list[Path]:
    """Return the device files of this machine's GPUs, by number."""
    return sorted(DEVICES.glob("nvidia[0-9]*"), key=lambda path: int(path.name.removeprefix("nvidia")))


def port_is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore closed connections in TIME_WAIT
        try:
            probe.bind(("", port))
            probe.listen(1)  # with SO_REUSEADDR, bind may succeed although the port is in use
        except OSError:
            return True
    return False


def free_port() -> int:
    """Return the first port of a free range, below those of jobs on several nodes (20000 and up, ranks/engine.py)."""
    for first in random.sample(range(10000, 20000 - PORT_RANGE, PORT_RANGE), k=100):
        if not any(port_is_taken(port) for port in range(first, first + PORT_RANGE)):
            return first
    raise PortsTakenError(f"no {PORT_RANGE} free ports in a row between 10000 and 20000")
