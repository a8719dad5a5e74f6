"""Query a cluster's live Slurm for its configuration and parse the answers. Only reads.

Checked with Slurm 22.05. Newer versions print additional keys, which are ignored, and a partition on several lines.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from inpaint_bench.core.site import SiteConfig
from launchers.remote.ssh import Connection, UnreachableError, one_line, shell
from launchers.slurm.environment import slurm_environment
from launchers.slurm.query import duration_s

TIMEOUT_S = 30  # of each command
ASSOCIATION_FIELDS = ("Account", "QOS", "DefaultQOS", "MaxSubmitJobs")
QOS_FIELDS = ("Name", "GraceTime", "PreemptExemptTime", "MaxWall", "MaxSubmitJobsPerUser")
NODE_FORMAT = "%P|%N|%c|%m|%G|%f"

_EMPTY = frozenset({"", "(null)", "none", "n/a", "-1"})  # the ways in which Slurm prints that there is no value
_UNLIMITED = frozenset({"unlimited", "infinite"})


class NotReportedError(Exception):
    """Slurm did not report a value; the message says why. Never evidence that there is none."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output of one command, or the reason why there is none."""

    text: str | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node in one partition."""

    name: str
    partition: str
    cpus: int
    memory_mb: int
    gpus: dict[str, int]  # by GRES type; "" where the site gives its GPUs no type
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
    def max_minutes(self) -> float:
        """Return MaxTime; math.inf if unlimited."""
        return parse_minutes(self.value("MaxTime")) or 0.0

    @property
    def grace_s(self) -> int:
        """Return GraceTime, which scontrol prints in seconds."""
        return parse_int(self.value("GraceTime"))

    @property
    def qos(self) -> str | None:
        """Return the partition QOS, whose limits apply to every job in the partition."""
        return none_if_empty(self.values.get("QoS"))

    @property
    def preempt_modes(self) -> set[str]:
        """Return the preemption modes, such as {"REQUEUE", "GANG"}."""
        return set(self.value("PreemptMode").upper().split(","))

    @property
    def gpu_types(self) -> list[str]:
        """Return the GRES types of its GPUs, sorted; "" stands for GPUs without a type."""
        return sorted({gpu_type for node in self.nodes for gpu_type in node.gpus})

    def allows(self, kind: str, name: str) -> bool:
        """Return whether Deny<kind> and Allow<kind> admit `name`; `kind` is Accounts or Qos."""
        denied = self.values.get(f"Deny{kind}")
        if denied is not None:
            return name not in denied.split(",")
        allowed = self.values.get(f"Allow{kind}", "ALL")
        return allowed == "ALL" or name in allowed.split(",")

    def limit(self, key: str) -> float:
        """Return a limit such as MaxMemPerNode; math.inf if there is none."""
        value = self.values.get(key, "UNLIMITED")
        return math.inf if value.lower() in _UNLIMITED else parse_int(value)


@dataclass(frozen=True, kw_only=True)
class Association:
    """An account that the user may charge, with its limits."""

    account: str
    qos: tuple[str, ...]
    default_qos: str | None
    max_submit: int | None


@dataclass(frozen=True, kw_only=True)
class Qos:
    """A quality of service."""

    name: str
    grace_s: int
    exempt_s: int | None  # PreemptExemptTime
    max_minutes: float
    max_submit: int | None


@dataclass(frozen=True)
class Cluster:
    """A cluster's configuration. Every property raises NotReportedError if its command failed."""

    outputs: Mapping[str, Output] = field(default_factory=dict)  # config, partitions, nodes, associations, qos

    @cached_property
    def config(self) -> dict[str, str]:
        """Return `scontrol show config` by key."""
        values: dict[str, str] = {}
        for line in self._text("config").splitlines():
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
        """Return the partitions by name."""
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            nodes.setdefault(node.partition, []).append(node)
        partitions = {}
        for block in re.split(r"(?=\bPartitionName=)", self._text("partitions")):
            values = dict(pair.split("=", 1) for pair in block.split() if "=" in pair)
            if name := values.get("PartitionName"):
                partitions[name] = Partition(name=name, values=values, nodes=tuple(nodes.get(name, ())))
        return partitions

    @property
    def default_partition(self) -> str | None:
        """Return the name of the default partition."""
        return next((p.name for p in self.partitions.values() if p.values.get("Default") == "YES"), None)

    @cached_property
    def nodes(self) -> list[Node]:
        """Return every node, once per partition that it is in."""
        return [
            Node(
                name=name,
                partition=partition.removesuffix("*"),  # marks the default partition
                cpus=parse_int(cpus.removesuffix("+")),
                memory_mb=parse_int(memory_mb.removesuffix("+")),
                gpus=parse_gres(gres),
                features=frozenset(features.split(",") if none_if_empty(features) else ()),
            )
            for partition, name, cpus, memory_mb, gres, features in self._rows("nodes", NODE_FORMAT.count("|") + 1)
        ]

    @cached_property
    def associations(self) -> list[Association]:
        """Return the user's associations on this cluster."""
        return [
            Association(
                account=account,
                qos=tuple(filter(None, qos.split(","))),
                default_qos=none_if_empty(default_qos),
                max_submit=parse_int(max_submit) if none_if_empty(max_submit) else None,
            )
            for account, qos, default_qos, max_submit in self._rows("associations", len(ASSOCIATION_FIELDS))
        ]

    @cached_property
    def qos(self) -> dict[str, Qos]:
        """Return every QOS by name."""
        return {
            name: Qos(
                name=name,
                grace_s=round(60 * (parse_minutes(grace) or 0)),
                exempt_s=None if (minutes := parse_minutes(exempt)) is None else round(60 * minutes),
                max_minutes=math.inf if (wall := parse_minutes(max_wall)) is None else wall,
                max_submit=parse_int(max_submit) if none_if_empty(max_submit) else None,
            )
            for name, grace, exempt, max_wall, max_submit in self._rows("qos", len(QOS_FIELDS))
        }

    def _text(self, topic: str) -> str:
        output = self.outputs.get(topic, Output(error="not queried"))
        if output.text is None:
            raise NotReportedError(output.error)
        return output.text

    def _rows(self, topic: str, columns: int) -> list[list[str]]:
        rows = [line.split("|") for line in self._text(topic).splitlines()]
        return [row for row in rows if len(row) == columns]


# --- query ---------------------------------------------------------------------------------------

RunCommand = Callable[[Sequence[str]], Output]


def query_cluster(site: SiteConfig) -> Cluster:
    """Query the site's Slurm, here or over ssh. If its controller does not answer, only one command is tried."""
    run = partial(_run, site, Connection(site.connect) if site.connect.method == "ssh" else None)
    config = run(["scontrol", "show", "config"])
    if config.text is None:
        return Cluster(dict.fromkeys(("config", "partitions", "nodes", "associations", "qos"), config))
    outputs = {
        "config": config,
        "partitions": run(["scontrol", "-a", "-o", "show", "partition"]),
        "nodes": run(["sinfo", "-a", "-h", "-N", "-o", NODE_FORMAT]),
    }
    return Cluster(outputs | _query_accounting(run, Cluster(outputs)))


def _query_accounting(run: RunCommand, cluster: Cluster) -> dict[str, Output]:
    """Query slurmdbd about the user, on this cluster only: one database may serve several."""
    try:
        if cluster.setting("AccountingStorageType") in ("accounting_storage/none", "(null)"):
            raise NotReportedError("this Slurm keeps no accounting (AccountingStorageType)")
        name = cluster.setting("ClusterName")
    except NotReportedError as error:
        return dict.fromkeys(("associations", "qos"), Output(error=str(error)))
    show = ["sacctmgr", "-n", "-P", "show"]
    qos = run([*show, "qos", f"format={','.join(QOS_FIELDS)}"])
    user = run(["id", "-un"])
    if user.text is None:
        return {"associations": user, "qos": qos}
    where = [f"user={user.text.split()[-1]}", f"cluster={name}"]  # a login shell may print a greeting first
    associations = run([*show, "assoc", "where", *where, f"format={','.join(ASSOCIATION_FIELDS)}"])
    return {"associations": associations, "qos": qos}


def _run(site: SiteConfig, connection: Connection | None, command: Sequence[str]) -> Output:
    label = f"`{' '.join([argument for argument in command if not argument.startswith('-')][:3])}`"
    try:
        if connection:
            conf = {"SLURM_CONF": site.connect.slurm_conf} if site.connect.slurm_conf else {}
            remote = connection.run(shell(command, LC_ALL="C", **conf), timeout_s=site.connect.timeout_s)
            code, stdout, stderr = remote.code, remote.out, remote.err
        else:
            environment = slurm_environment(site) | {"LC_ALL": "C"}
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": TIMEOUT_S}
            local = subprocess.run(command, env=environment, **options)
            code, stdout, stderr = (
                local.returncode,
                local.stdout,
                (local.stderr or local.stdout).decode(errors="replace"),
            )
    except UnreachableError as error:
        return Output(error=str(error))
    except FileNotFoundError:
        return Output(error=f"{command[0]} is not on PATH")
    except subprocess.TimeoutExpired:
        return Output(error=f"{label} did not answer within {TIMEOUT_S} s")
    except OSError as error:
        return Output(error=f"{label}: {error}")
    if code == 0:
        return Output(text=stdout.decode(errors="replace"))
    last_line = one_line((stderr.strip().splitlines() or [f"exit code {code}"])[-1])
    return Output(error=f"{label} failed: {last_line}")


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


def parse_minutes(text: str) -> float | None:
    """Return the minutes of a Slurm duration; math.inf if unlimited, None if there is none.

    Raises NotReportedError for any other text.
    """
    if (value := none_if_empty(text)) is None:
        return None
    if value.lower() in _UNLIMITED:
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
    """Return whether a GRES type names this GPU model: a100 is nvidia_a100-sxm4-40gb, and is not a10."""
    return model.lower() in re.split(r"[^a-z0-9]+", gres_type.lower())


def gpu_billing_weight(weights: str | None, gres_type: str) -> float | None:
    """Return the weight of one GPU in TRESBillingWeights: that of its type if listed, else that of any GPU."""
    values = dict(pair.lower().rsplit("=", 1) for pair in (weights or "").split(",") if "=" in pair)
    weight = values.get(f"gres/gpu:{gres_type.lower()}") or values.get("gres/gpu")
    return float(weight) if weight and re.fullmatch(r"[\d.]+", weight) else None
