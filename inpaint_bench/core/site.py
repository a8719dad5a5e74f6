"""The typed shape of a site file: how a cluster is reached, what it has, allows and charges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import UserError
from .validation import REGULAR_EXPRESSIONS, bounds, http_address, one_of, regular_expression, within


@dataclass(kw_only=True)
class Fact:
    """Base of every block of a site file: where it comes from, and whether someone saw it on the machine."""

    source: str = ""
    checked_on: str = ""  # ISO date on which the source was read
    verified: bool = False  # all of it seen on the machine itself, not only read
    seen: dict[str, str] = field(default_factory=dict)  # where only some of it was: those keys, with the date


@dataclass(kw_only=True)
class ConnectConfig(Fact):
    """How this machine submits to the site.

    slurm: sbatch of this machine. ssh: over OpenSSH, by the agent at the site. bundle: in a tar file that a person
    carries. local: on this machine without Slurm. On a machine of the site itself ssh and bundle become slurm.
    """

    method: str = one_of("slurm", "ssh", "bundle", "local", default="slurm")
    slurm_conf: str | None = None  # SLURM_CONF of this site's cluster, where a login node serves several
    # a match means: this machine belongs to the site
    hostnames: list[str] = field(default_factory=list, metadata=REGULAR_EXPRESSIONS)
    host: str | None = None  # ssh: a name in your ssh configuration, or user@host
    folder: str | None = None  # ssh: absolute path at the site under which sweep directories are made; scratch, best
    ssh_config: str | None = None  # ssh: a configuration file in place of ~/.ssh/config
    timeout_s: int = within(1, 3600, 60)  # ssh: a site that sends nothing for this long counts as unreachable
    persist_min: int = within(0, 24 * 60, 10)  # ssh: OpenSSH's ControlPersist; 0: until the command ends


@dataclass(kw_only=True)
class Account(Fact):
    value: str | None = None
    required: bool = False
    pattern: str | None = regular_expression()  # of a well-formed account
    how_to_list: str = ""  # command that prints the user's accounts


@dataclass(kw_only=True)
class SiteGpu(Fact):
    """How a site is asked for one GPU model."""

    partition: str | None = None
    request: str = one_of("gres", "gpus_per_node", "none", default="gres")
    gres: str | None = None  # type in --gres=gpu:<type>:N
    max_per_node: int = within(1, 64, 1)
    max_minutes: int = within(1, 60 * 24 * 366, 60 * 24)
    cpus_per_gpu: int = within(1, 512, 1)
    mem_gb_per_gpu: int = within(1, 8192, 1)  # in Slurm's G, 2^30 bytes
    charge_factor: float | None = within(0, 1e6, None)  # the partition's factor in the site's charging rule
    dcgm_url: str | None = http_address()  # a dcgm-exporter as its nodes see it; telemetry.dcgm_url where that is null


@dataclass(kw_only=True)
class Charging(Fact):
    """Service units per hour: the largest of the GPU, core and memory shares, or their sum, times a partition's factor.

    A share's divisor that is null is not part of the rule; all null: the rule is not known.
    """

    unit: str = "SU"
    combine: str = one_of("largest", "sum", default="largest")
    gpus_per_unit: float | None = within(0.001, 1e6, None)
    cores_per_unit: float | None = within(0.001, 1e6, None)
    mem_gb_per_unit: dict[str, float] = field(default_factory=dict, metadata=bounds(0.001, 1e6))  # by GPU model


@dataclass(kw_only=True)
class Limits(Fact):
    max_array_size: int = within(1, 4_000_001, 1001)  # Slurm's MaxArraySize: highest index + 1
    max_submit_jobs: int | None = None  # jobs of one user in queue; arrays are no longer; null: not known
    poll_s: int = within(1, 86400, 60)  # a command that waits or watches asks its Slurm at most once in so long
    submit_pause_s: float = within(0, 60, 1.0)  # between two sbatch calls, from the eleventh of a command on


@dataclass(kw_only=True)
class Requeue(Fact):
    request: bool = False  # write --requeue; a job that is pre-empted, a training at its limit too, then asks for it


@dataclass(kw_only=True)
class Preempt(Fact):
    signal: str | None = None  # the signal that Slurm sends first
    grace_s: int = within(0, 86400, 0)
    min_run_s: int = within(0, 86400, 0)


@dataclass(kw_only=True)
class Environment(Fact):
    """What a job inherits. Nothing is relied on: what a job needs is written into its script."""

    export: str | None = None  # --export
    get_user_env: str | None = None  # --get-user-env
    variables: dict[str, str] = field(default_factory=dict)  # exported in the script
    modules_reset: bool = False
    modules_purge: bool = False
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # further shell lines before the job


@dataclass(kw_only=True)
class Quota:
    """How many files a file system takes of one user, or of one project."""

    folder: str  # where it is mounted, or the part of it that is counted
    files: int = within(1, 10**9)


@dataclass(kw_only=True)
class Storage(Fact):
    scratch: str | None = None
    node_tmp: str | None = None
    quotas: list[Quota] = field(default_factory=list)


@dataclass(kw_only=True)
class SiteConfig:
    """A cluster with its own Slurm: everything one edits to bring a new one in."""

    name: str = "auto"
    title: str = ""
    template: str = "base.sh.j2"
    python: str | None = None  # interpreter on the compute nodes; null: the one that submits
    constraint: list[str] = field(default_factory=list)
    qos: str | None = None
    exclude_nodes: list[str] = field(default_factory=list)  # --exclude; `rerun` adds nodes that failed
    use_srun: bool = True
    connect: ConnectConfig = field(default_factory=ConnectConfig)
    account: Account = field(default_factory=Account)
    gpus: dict[str, SiteGpu] = field(default_factory=dict)
    charging: Charging = field(default_factory=Charging)
    limits: Limits = field(default_factory=Limits)
    requeue: Requeue = field(default_factory=Requeue)
    preempt: Preempt = field(default_factory=Preempt)
    environment: Environment = field(default_factory=Environment)
    storage: Storage = field(default_factory=Storage)


_SSH_NEEDS = {
    "connect.host": "a name in your ssh configuration, or user@host",
    "connect.folder": "an absolute path there, such as a folder on its scratch",
    "python": "an interpreter there that has what this project needs",
}
_SSH_FORMS = {
    "connect.host": r"\w[\w.@:%+-]*",  # never an option
    "connect.folder": r"/[\w.@:,=+/-]*",
    "python": r"/[\w.@:,=+/ -]*",
}


def check_connect(site: SiteConfig) -> None:
    """Raise UserError where a key that the connection method needs is missing or unsafe."""
    values = {"connect.host": site.connect.host, "connect.folder": site.connect.folder, "python": site.python}
    if site.connect.method == "slurm" and site.connect.host:
        raise UserError(
            f"sites.{site.name}.connect.host={site.connect.host}: is used only with connect.method=ssh, "
            "and the method is slurm"
        )
    if site.connect.method != "ssh":
        return
    for key, what in _SSH_NEEDS.items():
        value = values[key]
        if not value:
            raise UserError(f"sites.{site.name}.{key} is empty: connect.method=ssh needs {what}")
        if not re.fullmatch(_SSH_FORMS[key], value, re.ASCII):
            raise UserError(f"sites.{site.name}.{key}={value!r}: must be {what}, without shell metacharacters")


def check_account(site: SiteConfig) -> None:
    """Refuse an account that cannot be one of the site's. Raises UserError."""
    account = site.account
    if account.value and account.pattern and not re.fullmatch(account.pattern, account.value):
        raise UserError(
            f"sites.{site.name}.account.value={account.value}: not an account of {site.name} "
            f"(pattern {account.pattern}); `{account.how_to_list}` there lists yours"
        )
