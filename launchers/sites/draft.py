"""The first file of a site, from what its Slurm reports: `inpaint-bench new site`.

Its values are what `doctor site` puts in the place of the largest requests of the schema. What Slurm does not report,
or nobody can read, is TO_TYPE.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from inpaint_bench.core.config.bench import GpuConfig
from inpaint_bench.core.config.site import Account, ConnectConfig, Limits, SiteConfig, SiteGpu
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.key_docs import comment

from .compare import Agreement, compare
from .site_file import as_yaml
from .slurm_facts import Cluster, NotReportedError, Partition, is_slice, parse_minutes

TO_TYPE = "???"  # the reader of configuration files refuses it, with file and line
_LARGEST: dict[str, Any] = {"max_per_node": 64, "max_minutes": 527040, "cpus_per_gpu": 512, "mem_gb_per_gpu": 8192}
_KEYS = ("partition", "request", "gres", "max_nodes", *_LARGEST)


def draft(
    name: str, cluster: Cluster, cards: Mapping[str, GpuConfig], hosts: tuple[str, str]
) -> tuple[str, list[str], str]:
    """Return the text of a site file, its GPUs, and what was not found.

    `cards` are the GPUs of conf/gpu, `hosts` the short and the full name of this machine.
    """
    site, hostnames, missing = SiteConfig(name=name), TO_TYPE, set[str]()
    notes = {"connect.hostnames": "each for a whole name, in single quotes, as 'login\\d+'"}
    try:
        _add_gpus(site, notes, cluster, cards)
        hostnames = _hostnames(*hosts)
    except NotReportedError as error:
        notes["gpus"] = f"no Slurm answers here: {error}"
    site.account.required = True  # so that the comparison lists the accounts
    for _ in range(2):  # the memory depends on the cores
        for finding in compare(site, cluster):
            for key, value in finding.corrections.items():
                block, last = key.split(".")[-2:]
                vars(site.gpus[block] if key.startswith("gpus.") else getattr(site, block))[last] = value
            if finding.key == "account.value" and finding.agreement is Agreement.DIFFERS:
                notes[finding.key] = f"yours: {finding.reported}"
                missing |= set() if finding.corrections else {finding.key}
            elif finding.agreement is Agreement.UNKNOWN and finding.name in ("value", "partition", "gres", *_LARGEST):
                notes[finding.key] = finding.note
                missing.add(finding.key)
    if not site.gpus:
        site.gpus["h100"] = SiteGpu(**_LARGEST)
        missing |= {f"gpus.h100.{key}" for key in ("partition", "gres", *_LARGEST)}
        notes["gpus.h100"] = "the name of a file in conf/gpu: `inpaint-bench launch --help gpu` lists them"
    lines = _lines(site, hostnames, notes, missing)
    return "".join(f"{sanitize(line)}\n" for line in lines), list(site.gpus), notes.get("gpus", "")


def _lines(site: SiteConfig, hostnames: str, notes: Mapping[str, str], missing: set[str]) -> Iterator[str]:
    def line(key: str, value: str = "", kind: type | None = None) -> str:
        *blocks, last = key.split(".")
        note = "; ".join(filter(None, (comment(kind, last) if kind else "", notes.get(key))))
        text = f"{'  ' * len(blocks)}{last}: {TO_TYPE if key in missing else value}".rstrip()
        return f"{text} # {note}" if note else text

    yield f"# docs/configuration.md lists all keys of a site. What is marked {TO_TYPE} is yet to be typed."
    yield line("name", site.name, SiteConfig)
    yield line("connect")
    yield line("connect.hostnames", hostnames, ConnectConfig)
    yield line("account")
    yield line("account.value", as_yaml(site.account.value), Account)
    yield line("gpus")
    for number, (gpu, entry) in enumerate(site.gpus.items()):
        yield line(f"gpus.{gpu}")
        for key in _KEYS:
            value, name = getattr(entry, key), f"gpus.{gpu}.{key}"
            if name in missing or value not in (None, "gres"):
                unlimited = (key, value) == ("max_minutes", _LARGEST["max_minutes"])
                yield line(
                    name,
                    "UNLIMITED" if unlimited else as_yaml(value),
                    None if number and name not in missing else SiteGpu,
                )
    yield line("limits")
    yield line("limits.max_array_size", str(site.limits.max_array_size), Limits)
    if site.limits.max_submit_jobs:
        yield f"  max_submit_jobs: {site.limits.max_submit_jobs} # jobs that you may have there"
    yield "# environment: {modules: [GCC/13.2.0, Python/3.12.3]} # what a job loads, in this order"


def _add_gpus(site: SiteConfig, notes: dict[str, str], cluster: Cluster, cards: Mapping[str, GpuConfig]) -> None:
    """Add the GPUs that the cluster names as a file of conf/gpu does, each with its likely partition."""
    offers, others = dict[str, list[tuple[Partition, str]]](), list[str]()
    for partition in cluster.partitions.values():
        for gres in partition.gpu_types:
            # A feature of the nodes may name GPUs that have no type.
            nodes = [node.features for node in partition.nodes if gres in node.gpus]
            labels = [gres] if gres else frozenset.intersection(*nodes)
            matching = {card for label in labels for card in cards if _names(label, card, cards[card])}
            if len(matching) == 1:
                offers.setdefault(matching.pop(), []).append((partition, gres))
            else:
                others.append(f"{gres or 'GPUs without a type'} in {partition.name}")
    notes["gpus"] = f"no file of conf/gpu is known to be {', '.join(others)}" if others else ""
    for gpu, served in offers.items():
        partition, gres = max(served, key=_size)
        request: dict[str, Any] = {"gres": gres} if gres else {"request": "gpus_per_node"}
        site.gpus[gpu] = SiteGpu(partition=partition.name, **request, **_LARGEST)
        alike = [card for card in cards if card.startswith(f"{gpu}_") and gres.lower() in ("", gpu)]
        also = [other.name for other, _ in served if other is not partition]
        notes[f"gpus.{gpu}"] = "; ".join([f"or {card}?" for card in alike] + [f"also in {name}" for name in also])


def _names(label: str, name: str, card: GpuConfig) -> bool:
    """Return whether a label is this GPU and no other: a100-80gb, or NVML's name as in nvidia_a100-sxm4-80gb."""
    words, known = set(re.split(r"[^a-z0-9]+", label.lower())) - {"", "nvidia"}, set(name.split("_"))
    full_name = re.match(card.nvml_name or "$", label.replace("_", " "), re.IGNORECASE)
    return not is_slice(label) and (words in (known, known | {f"{card.memory_gb:g}gb"}) or full_name is not None)


def _size(offer: tuple[Partition, str]) -> tuple[bool, bool, bool, float]:
    """Return what makes a partition the likely one: open, not preempted, many nodes for a long time."""
    values, size = offer[0].values, 0.0
    with suppress(NotReportedError):
        size = parse_minutes(offer[0].value("MaxTime")) * sum(offer[1] in node.gpus for node in offer[0].nodes)
    is_open = {values.get(key, "ALL") for key in ("AllowGroups", "AllowAccounts")} == {"ALL"}
    return values.get("State") == "UP", is_open, values.get("PreemptMode", "OFF") == "OFF", size


def _hostnames(host: str, full_name: str) -> str:
    """Return a pattern of this machine's name with any number at its end: login3 is one of `login\\d+`."""
    short, _, domain = (full_name if full_name.startswith(f"{host}.") else host).partition(".")
    stem = short.rstrip("0123456789")
    pattern = re.escape(stem) + r"\d+" * (stem != short) + rf"(\.{re.escape(domain)})?" * bool(domain)
    return TO_TYPE if short == "localhost" else "['" + pattern.replace(r"\-", "-") + "']"
