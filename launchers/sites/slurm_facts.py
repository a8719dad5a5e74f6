"""What a cluster's Slurm says of itself, read from the text of its commands. Pure: nothing is asked here.

Read on Slurm 22.05; newer versions add keys, which are passed over, and write a partition on one line or on many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

ASSOCIATION_FIELDS = ("Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs")
QOS_FIELDS = ("Name", "GraceTime", "PreemptExemptTime", "PreemptMode", "MaxWall", "MaxSubmitJobsPerUser")
NODE_FORMAT = "%P|%N|%c|%m|%G|%f"

_NOTHING = frozenset({"", "(null)", "none", "n/a", "-1"})
_UNLIMITED = frozenset({"unlimited", "infinite"})


class NotKnownError(Exception):
    """Slurm did not say: the reason. Never taken for a no."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one command printed, or why there is nothing."""

    text: str | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    partition: str
    cpus: int
    memory_mb: int
    gpus: dict[str, int]  # by GRES type; "" where the site gives its GPUs no type
    features: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    values: Mapping[str, str]
    nodes: tuple[Node, ...]

    @property
    def up(self) -> bool:
        return self.state == "UP"

    @property
    def state(self) -> str:
        return self.said("State")

    @property
    def max_minutes(self) -> float:
        """math.inf: no limit."""
        return duration_min(self.said("MaxTime")) or 0.0

    @property
    def qos(self) -> str | None:
        """The QOS whose limits hold for every job in it."""
        return word(self.values.get("QoS"))

    @property
    def preempt_modes(self) -> set[str]:
        return set(self.said("PreemptMode").upper().split(","))

    def allows(self, what: str, name: str) -> bool:
        """Whether AllowAccounts or AllowQos (`what`: Accounts, Qos) lets `name` in; a Deny list counts where given."""
        denied = self.values.get(f"Deny{what}")
        if denied is not None:
            return name not in denied.split(",")
        allowed = self.values.get(f"Allow{what}", "ALL")
        return allowed == "ALL" or name in allowed.split(",")

    def most(self, key: str) -> float:
        """A limit such as MaxMemPerNode; math.inf where there is none."""
        value = self.values.get(key, "UNLIMITED")
        return math.inf if value.lower() in _UNLIMITED else number(value)

    def said(self, key: str) -> str:
        try:
            return self.values[key]
        except KeyError:
            raise NotKnownError(f"`scontrol show partition` gives {self.name} no {key}") from None


@dataclass(frozen=True, kw_only=True)
class Association:
    """One right of the user to submit."""

    account: str
    partition: str
    qos: tuple[str, ...]
    default_qos: str | None
    max_submit: int | None


@dataclass(frozen=True, kw_only=True)
class Qos:
    name: str
    grace_s: int
    exempt_s: int | None
    preempt_mode: str
    max_minutes: float
    max_submit: int | None


@dataclass(frozen=True)
class Cluster:
    """Every property raises NotKnownError with the reason where the command behind it gave nothing."""

    answers: Mapping[str, Answer] = field(default_factory=dict)  # partitions, config, nodes, associations, qos

    @cached_property
    def config(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self._text("config").splitlines():
            key, mark, value = line.partition("=")
            if mark and " " not in key.strip():
                found.setdefault(key.strip(), value.strip())  # later sections (cgroup) have keys of their own
        return found

    def setting(self, key: str) -> str:
        try:
            return self.config[key]
        except KeyError:
            raise NotKnownError(f"`scontrol show config` has no {key}") from None

    @cached_property
    def partitions(self) -> dict[str, Partition]:
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            nodes.setdefault(node.partition, []).append(node)
        found = {}
        for block in re.split(r"(?=\bPartitionName=)", self._text("partitions")):
            values = dict(pair.split("=", 1) for pair in block.split() if "=" in pair)
            if name := values.get("PartitionName"):
                found[name] = Partition(name=name, values=values, nodes=tuple(nodes.get(name, ())))
        return found

    @property
    def default_partition(self) -> str | None:
        return next((p.name for p in self.partitions.values() if p.values.get("Default") == "YES"), None)

    @cached_property
    def nodes(self) -> list[Node]:
        """A node once per partition that it is in."""
        found = []
        for partition, name, cpus, memory_mb, gres, features in self._rows("nodes", NODE_FORMAT.count("|") + 1):
            found.append(
                Node(
                    name=name,
                    partition=partition.removesuffix("*"),  # the default partition
                    cpus=number(cpus.removesuffix("+")),
                    memory_mb=number(memory_mb.removesuffix("+")),
                    gpus=gpus(gres),
                    features=frozenset() if word(features) is None else frozenset(features.split(",")),
                )
            )
        return found

    @cached_property
    def associations(self) -> list[Association]:
        return [
            Association(
                account=account,
                partition=partition,
                qos=tuple(filter(None, qos.split(","))),
                default_qos=word(default_qos),
                max_submit=number(max_submit) if word(max_submit) else None,
            )
            for account, partition, qos, default_qos, max_submit in self._rows("associations", len(ASSOCIATION_FIELDS))
        ]

    @cached_property
    def qos(self) -> dict[str, Qos]:
        return {
            name: Qos(
                name=name,
                grace_s=round(60 * (duration_min(grace) or 0)),
                exempt_s=None if (minutes := duration_min(exempt)) is None else round(60 * minutes),
                preempt_mode=mode,
                max_minutes=math.inf if (longest := duration_min(wall)) is None else longest,
                max_submit=number(submit) if word(submit) else None,
            )
            for name, grace, exempt, mode, wall, submit in self._rows("qos", len(QOS_FIELDS))
        }

    def _text(self, topic: str) -> str:
        answer = self.answers.get(topic, Answer(why="was not asked"))
        if answer.text is None:
            raise NotKnownError(answer.why)
        return answer.text

    def _rows(self, topic: str, columns: int) -> list[list[str]]:
        rows = [line.split("|") for line in self._text(topic).splitlines()]
        return [row for row in rows if len(row) == columns]


def word(text: str | None) -> str | None:
    """A value, or None for the ways in which Slurm writes that there is none."""
    return None if text is None or text.strip().lower() in _NOTHING else text.strip()


def number(text: str) -> int:
    """Raises NotKnownError for what is none."""
    try:
        return int(text)
    except ValueError:
        raise NotKnownError(f"{text!r} stands where a number was expected") from None


def duration_min(text: str) -> float | None:
    """Minutes of [days-]hours:minutes:seconds, minutes:seconds or minutes; math.inf without limit, None for none.

    Raises NotKnownError for anything else.
    """
    if (said := word(text)) is None:
        return None
    if said.lower() in _UNLIMITED:
        return math.inf
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", said)):
        raise NotKnownError(f"{text!r} is no time that Slurm is known to write")
    days, first, second, third = found[1], *(int(part or 0) for part in found.groups()[1:])
    if days is not None:  # days-hours[:minutes[:seconds]]
        return int(days) * 1440 + first * 60 + second + third / 60
    if found[4] is not None:
        return first * 60 + second + third / 60
    return first + second / 60


def gpus(gres: str) -> dict[str, int]:
    """GPUs by type of a node's GRES: "gpu:a100:4(S:0-3),shard:8" is {"a100": 4}, "gpu:4" is {"": 4}."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):  # sockets and cores, which hold commas of their own
        name, *rest = [piece for piece in part.strip().split(":") if piece != "no_consume"]
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
        kind = rest[0] if rest else ""
        found[kind] = found.get(kind, 0) + count
    return {kind: count for kind, count in found.items() if count}


def is_model(model: str, kind: str) -> bool:
    """Whether a GRES type names this model: a100 is nvidia_a100-sxm4-40gb, and is not a10."""
    return model.lower() in re.split(r"[^a-z0-9]+", kind.lower())


def gpu_weight(weights: str | None, kind: str) -> float | None:
    """What TRESBillingWeights counts one GPU of this type as: its own weight first, else that of any GPU."""
    found = dict(pair.lower().rsplit("=", 1) for pair in (weights or "").split(",") if "=" in pair)
    said = found.get(f"gres/gpu:{kind.lower()}") or found.get("gres/gpu")
    return float(said) if said and re.fullmatch(r"[\d.]+", said) else None
