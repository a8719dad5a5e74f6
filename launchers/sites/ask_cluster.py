"""Asking a site's live Slurm what it is: a few commands, each once, each with a time limit. Reads only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from inpaint_bench.core.site import SiteConfig
from launchers.remote.ssh import Connection, UnreachableError, printable, shell
from launchers.slurm.environment import for_slurm

from .slurm_facts import ASSOCIATION_FIELDS, NODE_FORMAT, QOS_FIELDS, Answer, Cluster, NotKnownError

TIMEOUT_S = 30

Ask = Callable[[Sequence[str]], Answer]


def inspect(site: SiteConfig) -> Cluster:
    """Where Slurm's controller does not answer the first of them, it is left alone."""
    ask = _over_ssh(site) if site.connect.method == "ssh" else _here(site)
    config = ask(["scontrol", "show", "config"])
    if config.text is None:
        return Cluster(dict.fromkeys(("config", "partitions", "nodes", "associations", "qos"), config))
    answers = {
        "config": config,
        "partitions": ask(["scontrol", "-a", "-o", "show", "partition"]),
        "nodes": ask(["sinfo", "-a", "-h", "-N", "-o", NODE_FORMAT]),
    }
    return Cluster(answers | _accounting(ask, Cluster(answers)))


def _accounting(ask: Ask, cluster: Cluster) -> dict[str, Answer]:
    """What slurmdbd knows of the user, on this cluster alone: one database may serve several."""
    try:
        if cluster.setting("AccountingStorageType") in ("accounting_storage/none", "(null)"):
            raise NotKnownError("this Slurm keeps no accounts (AccountingStorageType)")
        name = cluster.setting("ClusterName")
    except NotKnownError as error:
        return dict.fromkeys(("associations", "qos"), Answer(why=str(error)))
    show = ["sacctmgr", "-n", "-P", "show"]
    qos = ask([*show, "qos", f"format={','.join(QOS_FIELDS)}"])
    user = ask(["id", "-un"])
    if user.text is None:
        return {"associations": user, "qos": qos}
    me = user.text.split()[-1]  # a login shell may greet before it
    mine = [f"user={me}", f"cluster={name}"]
    return {"associations": ask([*show, "assoc", "where", *mine, f"format={','.join(ASSOCIATION_FIELDS)}"]), "qos": qos}


def _here(site: SiteConfig) -> Ask:
    environment = for_slurm(site) | {"LC_ALL": "C"}

    def ask(command: Sequence[str]) -> Answer:
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
            )
        except FileNotFoundError:
            return Answer(why=f"{command[0]} is not on PATH")
        except subprocess.TimeoutExpired:
            return Answer(why=f"{_name(command)} gave no answer within {TIMEOUT_S} s")
        except OSError as error:
            return Answer(why=f"{_name(command)}: {error}")
        return _answer(command, done.returncode, done.stdout, done.stderr or done.stdout)

    return ask


def _over_ssh(site: SiteConfig) -> Ask:
    connection = Connection(site.connect)
    variables = {"LC_ALL": "C"} | ({"SLURM_CONF": site.connect.slurm_conf} if site.connect.slurm_conf else {})

    def ask(command: Sequence[str]) -> Answer:
        try:
            found = connection.run(shell(command, **variables), patience=1)
        except UnreachableError as error:
            return Answer(why=str(error))
        return _answer(command, found.code, found.out.decode(errors="replace"), found.err)

    return ask


def _answer(command: Sequence[str], code: int, out: str, said: str) -> Answer:
    if code == 0:
        return Answer(text=out)
    last = printable((said.strip().splitlines() or [f"exit code {code}"])[-1])
    return Answer(why=f"{_name(command)} failed: {last}")


def _name(command: Sequence[str]) -> str:
    words = [word for word in command if not word.startswith("-")]
    return f"`{' '.join(words[:3])}`"
