"""The schema of a site file: how to reach a cluster, what it has, what it allows and what it charges."""

import math
import re
from dataclasses import dataclass, field

from inpaint_bench.core.errors import UserError

from .validation import REGULAR_EXPRESSIONS, Minutes, bounds, matching, one_of, regular_expression, time_limit, within

VARIABLE_NAMES = matching(r"[A-Za-z_]\w*", "a variable name: letters, digits and _")
MODULES = matching(r"[\w.+@:/-]+", "one module, such as GCC/13.2.0, without spaces and shell metacharacters")
# one partition: with several, the GPU would be a matter of chance
PARTITION = matching(r"[\w.+@:-]+", "the name of one partition")
CLUSTER = matching(r"(?!all$)\w[\w.-]*", "the name of one cluster, as `sacctmgr show cluster` lists them")
ACCOUNT = matching(r"\S+", "the name of one account, without spaces")
RESERVATION = matching(r"[\w.,+@:-]+", "the name of a reservation")
GRES = matching(r"[\w.+-]+", "a GPU type without its number, such as a100")
IMAGE = matching(r"/.+", "an absolute path at the site, such as /projects/abcd/inpaint-bench.sif")
FOLDER = matching(r"[/~$].*", "an absolute path at the site, which may begin with a $VARIABLE")
BIND = matching(r"/[^:,]*(:/[^:,]*(:(ro|rw))?)?", "an absolute path, or source:target, without commas")
# job-name and array stay, because a job is found again by them
DIRECTIVE = matching(r"(?!(job-name|array)$)[a-z][a-z0-9-]*", "an option of sbatch in full; job-name and array stay")
DATE = matching(r"|\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", "a date such as 2026-11-20")


@dataclass(kw_only=True)
class SiteBlock:
    """Base of every block of a site file: the source of its values, and whether they were verified on the cluster."""

    source: str = ""  # what, date of the source; what, date of the next source
    checked_on: str = field(default="", metadata=DATE)  # on which the sources were read
    verified: bool = False  # every value was compared with the cluster itself
    seen: dict[str, str] = field(default_factory=dict)  # if only some values were: their keys, with the date

    @property
    def sources(self) -> list[str]:
        """Return the sources, without remarks that no public text supports: those have no date."""
        return [
            each.strip() for each in self.source.split(";") if re.search(r"\d{4}-\d\d-\d\d$|, undated$", each.strip())
        ]


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What this machine can do at a site: the meaning of `connect.method`, which nothing else asks."""

    has_slurm: bool = True  # its jobs have a script, an account, limits and a price; else they are processes here
    submits_here: bool = False  # sbatch, squeue, sacct and scancel of this machine reach its Slurm
    over_ssh: bool = False  # the agent at the site calls them

    @property
    def is_remote(self) -> bool:
        """Return whether its Slurm and its files are out of this machine's reach: over ssh, or by a plan file."""
        return self.has_slurm and not self.submits_here

    @property
    def is_polled(self) -> bool:
        """Return whether this machine asks its Slurm, itself or over ssh."""
        return self.submits_here or self.over_ssh


AUTO, SOONEST = CHOSEN = "auto", "soonest"  # their files describe no site: one is chosen for each point
CONNECTIONS = {
    "slurm": Connection(submits_here=True),
    "ssh": Connection(over_ssh=True),
    "bundle": Connection(),
    "local": Connection(has_slurm=False),
}


@dataclass(kw_only=True)
class ConnectConfig(SiteBlock):
    """How this machine submits to the site.

    slurm: sbatch of this machine. ssh: over OpenSSH, by the agent at the site. bundle: in a plan file that a person
    copies. local: on this machine without Slurm. On a machine of the site itself ssh and bundle become slurm.
    """

    # how this machine submits: see this block's description
    method: str = one_of(*CONNECTIONS, default="slurm")
    slurm_conf: str | None = None  # SLURM_CONF of this site's cluster, if a login node serves several
    # a match means: this machine belongs to the site
    hostnames: list[str] = field(default_factory=list, metadata=REGULAR_EXPRESSIONS)
    # names of compute nodes; other clusters may use the same short names: the full name must match if there is one
    compute_nodes: list[str] = field(default_factory=list, metadata=REGULAR_EXPRESSIONS)
    host: str | None = None  # ssh: a name in your ssh configuration, or user@host
    folder: str | None = None  # ssh: absolute path at the site under which sweep directories are made; scratch, best
    ssh_config: str | None = None  # ssh: a configuration file in place of ~/.ssh/config
    timeout_s: int = within(1, 3600, 20)  # ssh: a site that sends nothing for this long counts as unreachable
    persist_min: int = within(0, 24 * 60, 10)  # ssh: OpenSSH's ControlPersist; 0: until the command ends


@dataclass(kw_only=True)
class Account(SiteBlock):
    """The account that jobs are charged to."""

    value: str | None = field(default=None, metadata=ACCOUNT)  # the account, or the project
    required: bool = False  # a launch without an account is refused
    pattern: str | None = regular_expression()  # that every account of the site matches
    how_to_list: str = ""  # command that prints the user's accounts


@dataclass(kw_only=True)
class SiteGpu(SiteBlock):
    """How to request one GPU model."""

    partition: str | None = field(default=None, metadata=PARTITION)  # the Slurm partition with this GPU
    # option of sbatch that asks for GPUs: --gres, --gpus-per-node or none
    request: str = one_of("gres", "gpus_per_node", "none", default="gres")
    gres: str | None = field(default=None, metadata=GRES)  # type in --gres=gpu:<type>:N; null: the model
    max_per_node: int = within(1, 64, 1)  # GPUs of this model in one node
    max_nodes: int | None = within(1, 65536, None)  # nodes that one job of the partition may have; null: not known
    # longest time limit of the partition, in minutes or Slurm's formats
    max_minutes: Minutes = time_limit(1, 60 * 24 * 366, 60 * 24, unlimited=True)  # noqa: RUF009 (an immutable default)
    cpus_per_gpu: int | None = within(1, 512, None)  # cores that a job requests for each GPU; null: left to Slurm
    mem_gb_per_gpu: int | None = within(1, 8192, None)  # in Slurm's G, 2^30 bytes; null: left to Slurm, without --mem
    charge_factor: float | None = within(0, 1e6, None)  # the partition's factor; not needed with charging.units_per_gpu


@dataclass(kw_only=True)
class Charging(SiteBlock):
    """Service units per hour, times charge_factor.

    `combine: largest` takes the largest of the GPU, core and memory shares. `combine: sum` adds to the GPU share the
    core share or, if it is larger, the memory share in whole units.

    A share without its keys is not part of the rule. If none has one, the rule is not known; nor is it for a GPU that
    `units_per_gpu` does not name, unless `gpus_per_unit` is given too.
    """

    unit: str = "SU"  # name of the service unit
    # how the shares of GPU, cores and memory make the charge
    combine: str = one_of("largest", "sum", default="largest")
    gpus_per_unit: float | None = within(0.001, 1e6, None)  # GPU-hours that cost one unit
    units_per_gpu: dict[str, float] = field(default_factory=dict, metadata=bounds(0.001, 1e6))  # by GPU model
    upper_bounds: list[str] = field(default_factory=list)  # GPU models that cost this at most: their rate is not known
    cores_per_unit: float | None = within(0.001, 1e6, None)  # core-hours that cost one unit
    mem_gb_per_unit: dict[str, float] = field(default_factory=dict, metadata=bounds(0.001, 1e6))  # by GPU model
    price_per_unit: float | None = within(0, 1e6, None)  # money for a unit; null: the report shows none
    currency: str = "USD"  # currency of price_per_unit

    def units_per_hour(self, gpu: str, entry: SiteGpu, gpus: int, cpus: int | None, mem_gb: int | None) -> float | None:
        """Return the units that a job with these GPUs, cores and memory costs in an hour; None: not known."""
        factor = entry.charge_factor
        of_gpus = of_cores = of_memory = 0.0
        if gpu in self.units_per_gpu:
            of_gpus = gpus * self.units_per_gpu[gpu]
            factor = 1.0 if factor is None else factor  # the rate of a model needs none of its partition
        elif self.gpus_per_unit:
            of_gpus = gpus / self.gpus_per_unit
        elif self.units_per_gpu:
            return None
        if self.cores_per_unit:
            if cpus is None:
                return None
            of_cores = cpus / self.cores_per_unit
        if per_unit := self.mem_gb_per_unit.get(gpu):
            if mem_gb is None:
                return None
            of_memory = mem_gb * 2**30 / 1e9 / per_unit  # Slurm's G is 2^30 bytes, the rule's GB 10^9
        combined = max(of_gpus, of_cores, of_memory)
        if self.combine == "sum":
            combined = of_gpus + max(of_cores, math.ceil(of_memory))
        return combined * factor if combined and factor is not None else None


@dataclass(kw_only=True)
class Limits(SiteBlock):
    """Limits of the site's Slurm, and how often our commands may call it."""

    max_array_size: int = within(1, 4_000_001, 1001)  # Slurm's MaxArraySize: highest index + 1
    # jobs that a user may have there; more points are refused. null: not known. An array that Slurm finds too large is
    # halved until it fits, and `rerun` submits the rest
    max_submit_jobs: int | None = within(1, 10_000_000, None)
    command_timeout_s: int = within(1, 3600, 20)  # a command of Slurm that takes longer counts as not answering
    poll_s: int = within(1, 86400, 60)  # shortest interval in which a command that waits polls Slurm
    submit_pause_s: float = within(0, 60, 1.0)  # between sbatch calls, after the tenth of a command


@dataclass(kw_only=True)
class Requeue(SiteBlock):
    """Requeueing of jobs."""

    request: bool = False  # write --requeue; preempted jobs, and trainings at the time limit, then requeue themselves


@dataclass(kw_only=True)
class Preempt(SiteBlock):
    """How Slurm preempts jobs."""

    # sent first
    signal: str | None = one_of("SIGTERM", "SIGCONT", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", default=None)
    grace_s: int = within(0, 86400, 0)  # until SIGKILL


@dataclass(kw_only=True)
class Container(SiteBlock):
    """Apptainer, or Singularity, around the process of every job. The sweep directory is always visible in it."""

    # path at the site of an image, or of an unpacked one; null: jobs run without a container
    image: str | None = field(default=None, metadata=IMAGE)
    command: str = one_of("apptainer", "singularity", default="apptainer")  # with the modules of `environment` loaded
    python: str = "/opt/inpaint-bench/bin/python"  # interpreter in the image, with this project's dependencies
    # folders beside HOME and /tmp that jobs need, such as /projects or /projects/data:/data:ro
    binds: list[str] = field(default_factory=list, metadata=BIND)
    nv: bool = True  # make NVIDIA's driver and devices visible (--nv)


@dataclass(kw_only=True)
class SiteEnvironment(SiteBlock):
    """The environment of a job. Nothing is relied on: what a job needs is written into its script."""

    export: str | None = None  # --export
    get_user_env: str | None = None  # --get-user-env
    # exported in the script
    variables: dict[str, str] = field(default_factory=dict, metadata=VARIABLE_NAMES)
    modules_reset: bool = False  # begin with `module reset`
    modules_purge: bool = False  # begin with `module purge`
    modules: list[str] = field(default_factory=list, metadata=MODULES)  # loaded in this order
    setup: list[str] = field(default_factory=list)  # shell lines before the job
    container: Container = field(default_factory=Container)


@dataclass(kw_only=True)
class Storage(SiteBlock):
    """File systems of the site."""

    scratch: str | None = field(default=None, metadata=FOLDER)  # folder for large temporary files, visible to all nodes
    node_tmp: str | None = field(default=None, metadata=FOLDER)  # folder on a disk of the node
    # folder in which the jobs keep compiled kernels, by card and versions; $VARIABLES are those of the node. null:
    # inpaint-bench/kernels in `scratch`, or in ~/.cache
    kernels: str | None = field(default=None, metadata=FOLDER)
    file_quotas: dict[str, int] = field(default_factory=dict)  # how many files a project or user may have, by folder


@dataclass(kw_only=True)
class SiteConfig:
    """A cluster with its own Slurm: everything that a new cluster needs."""

    name: str = AUTO  # the name of its file, and of site=
    template: str = "base.sh.j2"  # template of the sbatch script, in slurm_templates
    python: str | None = None  # interpreter on the compute nodes; null: the one that runs this command
    constraint: list[str] = field(default_factory=list)  # --constraint, joined by &
    # profile=ncu: features of nodes that let a job read the GPU's counters, added to the constraint
    counter_features: list[str] = field(default_factory=list)
    qos: str | None = None  # --qos of the jobs
    reservation: str | None = field(default=None, metadata=RESERVATION)  # --reservation of the jobs
    cluster: str | None = field(default=None, metadata=CLUSTER)  # --clusters of the jobs; null: the local cluster
    exclude_nodes: list[str] = field(default_factory=list)  # --exclude; `rerun` adds failed nodes
    # options of sbatch by name, such as mem-per-cpu: 4G; null leaves one out, '' gives it no value
    directives: dict[str, str | None] = field(default_factory=dict, metadata=DIRECTIVE)
    use_srun: bool = True  # start the job's process with srun
    grid_gco2_per_kwh: float | None = within(0, 5000, None)  # grams of CO2 per kWh here; null: none is shown
    connect: ConnectConfig = field(default_factory=ConnectConfig)
    account: Account = field(default_factory=Account)
    gpus: dict[str, SiteGpu] = field(default_factory=dict)
    charging: Charging = field(default_factory=Charging)
    limits: Limits = field(default_factory=Limits)
    requeue: Requeue = field(default_factory=Requeue)
    preempt: Preempt = field(default_factory=Preempt)
    environment: SiteEnvironment = field(default_factory=SiteEnvironment)
    storage: Storage = field(default_factory=Storage)

    @property
    def connection(self) -> Connection:
        return CONNECTIONS[self.connect.method]


# What connect.method=ssh needs: the form of the value and its description.
_SSH_KEYS = {
    "connect.host": (r"\w[\w.@:%+-]*", "a name in your ssh configuration, or user@host"),  # never an option
    # no colon: it separates the folders of PYTHONPATH
    "connect.folder": (r"/[\w.@,=+/-]*", "an absolute path at the site, such as a folder on its scratch"),
    "python": (r"/[\w.@:,=+/ -]*", "an interpreter at the site that has the dependencies of this project"),
}


def check_connect(site: SiteConfig) -> None:
    """Raise UserError if a key that the connection method needs is missing or unsafe."""
    values = {"connect.host": site.connect.host, "connect.folder": site.connect.folder, "python": site.python}
    if site.connect.method == "slurm" and site.connect.host:
        raise UserError(
            f"sites.{site.name}.connect.host={site.connect.host}: is used only with connect.method=ssh, "
            "and the method is slurm"
        )
    if site.connect.method != "ssh":
        return
    for key, (pattern, description) in _SSH_KEYS.items():
        value = values[key]
        if not value:
            raise UserError(f"sites.{site.name}.{key} is empty: connect.method=ssh needs {description}")
        if not re.fullmatch(pattern, value, re.ASCII):
            raise UserError(f"sites.{site.name}.{key}={value!r}: must be {description}, without shell metacharacters")


def check_preempt(site: SiteConfig) -> None:
    """Raise UserError if only one of signal and grace period is given: neither is of use without the other."""
    preempt = site.preempt
    if (preempt.signal is None) != (preempt.grace_s == 0):
        given, missing = ("signal", "grace_s") if preempt.signal else ("grace_s", "signal")
        raise UserError(
            f"sites.{site.name}.preempt.{given}={getattr(preempt, given)}: needs {missing} too, "
            "since Slurm sends the signal so many seconds before it kills the job"
        )


def check_account(site: SiteConfig) -> None:
    """Raise UserError if the account does not match the site's pattern."""
    account = site.account
    if account.value and account.pattern and not re.fullmatch(account.pattern, account.value):
        raise UserError(
            f"sites.{site.name}.account.value={account.value}: not an account of {site.name} "
            f"(pattern {account.pattern}); `{account.how_to_list}` at {site.name} lists yours"
        )
