"""What Slurm says of jobs: squeue for those it still holds, sacct for those that ended. Two calls per site."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence

from inpaint_bench.config import SiteConfig
from inpaint_bench.truth import ENDED, SUCCESS, SchedulerWord

from .environment import for_slurm

TIMEOUT_S = 60


def ask(site: SiteConfig, job_ids: Sequence[str]) -> dict[str, SchedulerWord] | None:
    """A word per job id ("123_4"); None where neither command answers."""
    held = _rows(site, ["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N"])
    words = {}
    for job_id, state, reason, node in held or []:
        words[job_id] = SchedulerWord(state=state, detail=reason if reason not in ("None", "") else node)
    open_ids = [i for i in job_ids if i not in words or words[i].state in ENDED or words[i].state in SUCCESS]
    ended = _ended(site, open_ids) if open_ids else {}
    if held is None and ended is None:
        return None
    words.update(ended or {})
    return {job_id: words.get(job_id, SchedulerWord(state=None)) for job_id in job_ids}


def _ended(site: SiteConfig, job_ids: Sequence[str]) -> dict[str, SchedulerWord] | None:
    arrays = sorted({job_id.split("_")[0] for job_id in job_ids})
    fields = "JobID,State,ExitCode,Reason,NodeList"
    rows = _rows(site, ["sacct", "-X", "-P", "-n", "-o", fields, "-j", ",".join(arrays)])
    if rows is None:
        return None
    words = {}
    for job_id, state, exit_code, reason, node in rows:
        detail = [f"exit code {exit_code}"] if exit_code not in ("0:0", "") else []
        detail += [text for text in (reason, f"on {node}") if text not in ("None", "", "on ", "on None assigned")]
        words[job_id] = SchedulerWord(state=state.split()[0], detail=", ".join(detail))  # "CANCELLED by 1000"
    return words


def cancel(site: SiteConfig, job_ids: Iterable[str]) -> str | None:
    """None, or what scancel complained of."""
    done = subprocess.run(
        ["scancel", *job_ids],
        env=for_slurm(site),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip()


def _rows(site: SiteConfig, command: list[str]) -> list[list[str]] | None:
    try:
        done = subprocess.run(
            command, env=for_slurm(site), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    width = command[command.index("-o") + 1].count("|" if command[0] == "squeue" else ",") + 1
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == width]
