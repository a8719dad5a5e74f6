"""Query a cluster's live Slurm for its configuration and parse the answers. Only reads, each fact at its first use.

Checked with Slurm 22.05, 24.11 and 26.05. Additional keys are ignored; a partition may be on several lines.
"""

import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial

from inpaint_bench.core import child
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.validation import UNLIMITED, duration_s
from launchers.remote.ssh import SshConnection, UnreachableError, last_lines, one_line, shell
from launchers.slurm.environment import at_cluster, slurm_environment
from launchers.slurm.query import cause_of

ASSOCIATION_FIELDS = ("Account", "QOS", "DefaultQOS", "MaxSubmitJobs")
QOS_FIELDS = ("Name", "GraceTime", "MaxWall", "MaxSubmitJobsPerUser")
NODE_FIELDS = ("%P", "%N", "%c", "%m", "%G", "%f")

# Settings of slurm.conf that explain findings: defaults of memory (MB), preemption and what accounting enforces.
SUMMARY = (
    *("ClusterName", "SLURM_VERSION", "DefMemPerCPU", "DefMemPerNode"),
    *("PreemptType", "PreemptMode", "AccountingStorageEnforce"),
)

_EMPTY = frozenset({"", "(null)", "none", "n/a", "-1"})  # the ways in which Slurm prints that there is no value


class NotReportedError(Exception):
    """Slurm did not report a value; the message says why. Never evidence that there is none."""


Output = str | NotReportedError  # output of one command

_CONFIG = ("scontrol", "show", "config")
_SHOW_ACCOUNTING = ("sacctmgr", "-n", "-P", "show")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node in one partition."""

    cpus: int
    memory_mb: int
    gpus: dict[str, int]  # by GRES type; "" if the site gives its GPUs no type
    features: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition with its nodes; `values` as `scontrol show partition` prints them."""

    name: str
    values: Mapping[str, str]
    nodes: tuple[Node, ...]

    def value(self, key: str) -> str:
        """Return a value as text. Raises NotReportedError."""
        try:
            return self.values[key]
        except KeyError:
            raise NotReportedError(f"`scontrol show partition` has no {key} for {self.name}") from None

    @property
    def gpu_types(self) -> list[str]:
        """Return the GRES types of its GPUs, sorted; "" stands for GPUs without a type."""
        return sorted({gpu_type for node in self.nodes for gpu_type in node.gpus})

    def allows(self, account: str) -> bool:
        """Return whether DenyAccounts and AllowAccounts admit an account."""
        denied = self.values.get("DenyAccounts")
        if denied is not None:
            return account not in denied.split(",")
        allowed = self.values.get("AllowAccounts", "ALL")
        return allowed == "ALL" or account in allowed.split(",")

    def limit(self, key: str) -> float:
        """Return a limit such as MaxMemPerNode; math.inf if there is none."""
        value = self.values.get(key, "UNLIMITED")
        return math.inf if value.lower() in UNLIMITED else parse_int(value)


@dataclass(frozen=True)
class Cluster:
    """A cluster's configuration. Every property raises NotReportedError if its command failed."""

    run: Callable[..., Output]  # runs a command, once however often it is asked for

    @cached_property
    def config(self) -> dict[str, str]:
        values: dict[str, str] = {}
        for line in self.text(*_CONFIG).splitlines():
            key, separator, value = line.partition("=")
            if separator and " " not in key.strip():
                values.setdefault(key.strip(), value.strip())  # later sections (cgroup) repeat keys
        return values

    def setting(self, key: str) -> str:
        """Return one value of `scontrol show config`. Raises NotReportedError."""
        try:
            return self.config[key]
        except KeyError:
            raise NotReportedError(f"`scontrol show config` has no {key}") from None

    def enforces(self, kind: str) -> bool:
        """Return whether AccountingStorageEnforce lists associations, limits or qos."""
        enforced = self.setting("AccountingStorageEnforce").lower().split(",")
        return "all" in enforced or kind in enforced

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        nodes, partitions = self.nodes, {}
        # -a: partitions that are hidden, or closed to the user's groups, are listed too.
        text = self.text("scontrol", "-a", "-o", "show", "partition")
        # Split before every name and not by lines: newer versions print a partition on several.
        for block in re.split(r"(?=\bPartitionName=)", text):
            values = dict(pair.split("=", 1) for pair in block.split() if "=" in pair)
            if name := values.get("PartitionName"):
                partitions[name] = Partition(name=name, values=values, nodes=tuple(nodes.get(name, ())))
        if not partitions:
            raise NotReportedError(f"`scontrol show partition` lists none: {one_line(text) or 'it printed nothing'}")
        return partitions

    @property
    def summary(self) -> dict[str, str]:
        """Return settings that no key of a site file states, by name; empty if the cluster does not answer."""
        with suppress(NotReportedError):
            return {key: value for key in SUMMARY if (value := none_if_empty(self.config.get(key)))}
        return {}

    @property
    def default_partition(self) -> str | None:
        return next((p.name for p in self.partitions.values() if p.values.get("Default") == "YES"), None)

    @cached_property
    def nodes(self) -> dict[str, list[Node]]:
        """Return the nodes by partition."""
        nodes: dict[str, list[Node]] = {}
        for row in self._rows(NODE_FIELDS, "sinfo", "-a", "-h", "-N", "-o", "|".join(NODE_FIELDS)):
            node = Node(
                # sinfo appends "+" to the smallest number of a group of unequal nodes.
                cpus=parse_int(row["%c"].removesuffix("+")),
                memory_mb=parse_int(row["%m"].removesuffix("+")),
                gpus=parse_gres(row["%G"]),
                features=frozenset(row["%f"].split(",")),
            )
            nodes.setdefault(row["%P"].removesuffix("*"), []).append(node)  # "*" marks the default partition
        if not nodes:
            raise NotReportedError("`sinfo` lists no node")
        return nodes

    @cached_property
    def associations(self) -> list[dict[str, str]]:
        """Return ASSOCIATION_FIELDS of the accounts that the user may charge on this cluster."""
        self._require_accounting()
        # The cluster is named because one database may serve several. Over ssh the user may have another name there.
        user = self.text("id", "-un").strip()
        if not user or not user.isprintable():
            raise NotReportedError(f"`id -un` printed {user!r}, which is no user name")
        where = ("where", f"user={user}", f"cluster={self.setting('ClusterName')}")
        fields = f"format={','.join(ASSOCIATION_FIELDS)}"
        return self._rows(ASSOCIATION_FIELDS, *_SHOW_ACCOUNTING, "assoc", *where, fields)

    @cached_property
    def qos(self) -> dict[str, dict[str, str]]:
        """Return QOS_FIELDS of every quality of service, by name."""
        self._require_accounting()
        rows = self._rows(QOS_FIELDS, *_SHOW_ACCOUNTING, "qos", f"format={','.join(QOS_FIELDS)}")
        return {row["Name"]: row for row in rows}

    def _require_accounting(self) -> None:
        if self.setting("AccountingStorageType") in ("accounting_storage/none", "(null)"):
            raise NotReportedError("this Slurm keeps no accounting (AccountingStorageType)")

    def text(self, *command: str) -> str:
        """Return the output of a command. Raises NotReportedError, also if the controller does not answer."""
        # If the controller is down, every command runs into its timeout: the first one stands for all.
        output = self.run(*_CONFIG)
        if not isinstance(output, NotReportedError):
            output = self.run(*command)
        if isinstance(output, NotReportedError):
            raise output
        return output

    def _rows(self, fields: Sequence[str], *command: str) -> list[dict[str, str]]:
        rows = [line.split("|") for line in self.text(*command).splitlines() if line.strip()]
        # A row that cannot be read may be the one that decides.
        for row in (row for row in rows if len(row) != len(fields)):
            raise NotReportedError(f"`{command[0]}` printed what cannot be read: {one_line('|'.join(row))}")
        return [dict(zip(fields, row, strict=True)) for row in rows]


# --- query ---------------------------------------------------------------------------------------


def query_cluster(site: SiteConfig) -> Cluster:
    """Return the site's cluster, whose Slurm is queried here or over ssh, each command when its output is used."""
    return Cluster(cache(partial(_run, site)))


def _run(site: SiteConfig, *command: str) -> Output:
    label = f"`{' '.join([argument for argument in command if not argument.startswith('-')][:3])}`"
    if command[0] in ("scontrol", "sinfo"):  # sacctmgr asks the database that the clusters share
        command = tuple(at_cluster(site, command))
    try:
        if site.connection.over_ssh:
            # The configuration may say which of several clusters a login node serves.
            conf = {"SLURM_CONF": site.connect.slurm_conf} if site.connect.slurm_conf else {}
            script = shell(command, LC_ALL="C", **conf)
            done = SshConnection(site.connect).run_login(script, timeout_s=site.connect.timeout_s)
        else:
            environment = slurm_environment(site) | {"LC_ALL": "C"}
            done = child.run(command, env=environment, timeout_s=site.limits.command_timeout_s)
    except UnreachableError as error:
        return NotReportedError(str(error))
    except FileNotFoundError:
        return NotReportedError(f"{command[0]} is not on PATH")
    except subprocess.TimeoutExpired:
        return NotReportedError(f"{label} did not answer within {site.limits.command_timeout_s} s")
    if done.returncode or (done.stderr.strip() and not done.stdout.strip()):
        over_ssh = site.connection.over_ssh
        printed = last_lines(done.stderr) if over_ssh else cause_of(done.stderr or done.stdout)
        return NotReportedError(f"{label} failed: {printed or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")


# --- parse ---------------------------------------------------------------------------------------


def none_if_empty(text: str | None) -> str | None:
    """Return a value, or None for the ways in which Slurm prints that there is none."""
    return None if text is None or text.strip().lower() in _EMPTY else text.strip()


def parse_int(text: str) -> int:
    """Return an integer. Raises NotReportedError for any other text."""
    try:
        return int(text)
    except ValueError:
        raise NotReportedError(f"{text!r} is not a number") from None


def parse_minutes(text: str) -> float:
    """Return the minutes of a Slurm duration; math.inf if there is no limit.

    Raises NotReportedError for any other text.
    """
    value = none_if_empty(text)
    if value is None or value.lower() in UNLIMITED:
        return math.inf
    if (seconds := duration_s(value)) is None:
        raise NotReportedError(f"{text!r} is not a duration in a known form")
    return seconds / 60


def parse_gres(gres: str) -> dict[str, int]:
    """Return a node's GPUs by type: "gpu:a100:4(S:0-3),shard:8" is {"a100": 4}, "gpu:4" is {"": 4}."""
    counts: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):  # sockets and cores, which contain commas
        name, *rest = [piece for piece in part.strip().split(":") if piece != "no_consume"]
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
        gpu_type = rest[0] if rest else ""
        counts[gpu_type] = counts.get(gpu_type, 0) + count
    return {gpu_type: count for gpu_type, count in counts.items() if count}


def is_model(model: str, gres_type: str) -> bool:
    """Return whether a GRES type names this GPU model: a100 is nvidia_a100-sxm4-40gb, and is not a10 or a slice."""
    return not is_slice(gres_type) and model.lower() in re.split(r"[^a-z0-9]+", gres_type.lower())


def is_slice(gres_type: str) -> bool:
    """Return whether a GRES type is a MIG slice of a GPU, such as a100_3g.20gb, 1g.10gb or a100-mig; not 40gb."""
    return re.search(r"(?<![a-z\d])[1-7]g(?![a-z])|(?<![a-z])mig(?![a-z])", gres_type.lower()) is not None
