"""What Slurm says of jobs: squeue for those it still holds, sacct for those that ended. One call each per site.

Either may be down or busy. A job that only one of them could have named is then not called unknown to Slurm:
no word is given for it, and nobody concludes that it is lost.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence

from inpaint_bench.config import SiteConfig
from inpaint_bench.truth import ENDED, SUCCESS, SchedulerWord

from .environment import for_slurm

TIMEOUT_S = 60


def ask(site: SiteConfig, job_ids: Sequence[str]) -> dict[str, SchedulerWord]:
    """A word per job id ("123_4") for which there is one; state None only where both commands answered."""
    held = _rows(site, ["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N"])
    words = {}
    for job_id, state, reason, node in held or []:
        words[job_id] = SchedulerWord(state=state, detail=reason if reason not in ("None", "") else _on(node))
    settled = [i for i in job_ids if i not in words or words[i].state in ENDED or words[i].state in SUCCESS]
    ended = _ended(site, settled) if settled else {}
    words |= {job_id: word for job_id, word in (ended or {}).items() if job_id in settled}
    unknown = {} if held is None or ended is None else {i: SchedulerWord(state=None) for i in job_ids}
    return {job_id: word for job_id, word in (unknown | words).items() if job_id in job_ids}


def _ended(site: SiteConfig, job_ids: Sequence[str]) -> dict[str, SchedulerWord] | None:
    arrays = sorted({job_id.split("_")[0] for job_id in job_ids})
    fields = "JobID,State,ExitCode,Reason,NodeList"
    rows = _rows(site, ["sacct", "-X", "-P", "-n", "-o", fields, "-j", ",".join(arrays)])
    if rows is None:
        return None
    words = {}
    for listed, state, exit_code, reason, node in rows:
        detail = [f"exit code {exit_code}"] if exit_code not in ("0:0", "") else []
        detail += [text for text in (reason if reason != "None" else "", _on(node)) if text]
        for job_id in expanded(listed):
            words[job_id] = SchedulerWord(state=state.split()[0], detail=", ".join(detail))  # "CANCELLED by 1000"
    return words


def find(site: SiteConfig, names: Iterable[str], since_unix: float) -> dict[str, str] | None:
    """Array ids by job name, of arrays submitted since; None where not both of squeue and sacct answered."""
    wanted = ",".join(names)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix - 60))
    held = _rows(site, ["squeue", "--me", "-h", "-t", "all", "-n", wanted, "-o", "%j|%F"])
    ended = _rows(site, ["sacct", "-X", "-P", "-n", "-S", start, f"--name={wanted}", "-o", "JobName,JobID"])
    if held is None or ended is None:
        return None
    return {name: job_id.split("_")[0] for name, job_id in [*ended, *held]}


def expanded(job_id: str) -> Iterator[str]:
    """ "7_[0-2,5%4]" as 7_0, 7_1, 7_2, 7_5: sacct lists the waiting tasks of an array together."""
    found = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job_id)
    if not found:
        yield job_id
        return
    for span in found[2].split(","):
        first, _, last = span.partition("-")
        for task in range(int(first), int(last or first) + 1):
            yield f"{found[1]}_{task}"


def cancel(site: SiteConfig, job_ids: Iterable[str]) -> str | None:
    """None, or what scancel complained of."""
    command = ["scancel", *job_ids]
    try:
        done = subprocess.run(command, env=for_slurm(site), capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def _on(node: str) -> str:
    return f"on {node}" if node and node != "None assigned" else ""


def _rows(site: SiteConfig, command: list[str]) -> list[list[str]] | None:
    try:
        done = subprocess.run(command, env=for_slurm(site), capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    columns = command[command.index("-o") + 1].replace("|", ",").count(",") + 1
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]
