"""What Slurm says of jobs: squeue for those it still holds, sacct for those that ended. One call each per site.

Either may be down or busy. A job that only one of them could have named is then not called unknown to Slurm:
nobody concludes that it is lost, and what is missing is said.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from inpaint_bench.site_config import SiteConfig
from inpaint_bench.truth import ENDED, LEFT, SUCCESS, SchedulerWord

from .environment import for_slurm

TIMEOUT_S = 60
OK = "ok"
NOT_ASKED = "not asked"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the two commands said of one site's jobs, and how each of them did: OK, or why it gave nothing."""

    words: dict[str, SchedulerWord] = field(default_factory=dict)
    squeue: str = NOT_ASKED
    sacct: str = NOT_ASKED
    owner: str | None = None  # another user, whose jobs Slurm may hide

    @property
    def silence(self) -> str:
        """Why a job has no word."""
        if self.owner and (self.squeue, self.sacct) == (OK, OK):
            return f"Slurm shows you no such job of {self.owner}"
        silent = [f"{name} {said}" for name, said in (("squeue", self.squeue), ("sacct", self.sacct)) if said != OK]
        return ", ".join(silent) or "Slurm was not asked"


def ask(site: SiteConfig, job_ids: Sequence[str], *, settled: Collection[str] = (), owner: str | None = None) -> Answer:
    """A word per job id ("123_4") for which there is one; state None only where both commands answered.

    Of `settled` jobs the last word is known: sacct, the slower of the two, is not asked for them. `owner`: another
    user whose jobs they are. Slurm may hide those, so that it does not know one of them tells nothing.
    """
    held, squeue = _held(site, owner)
    words = {i: word for i, word in (held or {}).items() if i in set(job_ids)}
    open_ends = [i for i in job_ids if i not in settled and (i not in words or _over(words[i]))]
    if not open_ends:
        return Answer(words=words, squeue=squeue, owner=owner)
    ended, sacct = _ended(site, open_ends)
    # sacct hears of an end a moment later than squeue, and then knows more of it
    words |= {i: word for i in open_ends if (word := (ended or {}).get(i)) and (_over(word) or i not in words)}
    if held is not None and not owner:
        lost = (
            SchedulerWord(state=None)
            if ended is not None
            else SchedulerWord(state=LEFT, detail=f"squeue holds it no more, and sacct {sacct}")
        )
        words = dict.fromkeys(open_ends, lost) | words
    return Answer(words=words, squeue=squeue, sacct=sacct, owner=owner)


def _over(word: SchedulerWord) -> bool:
    return word.state in ENDED or word.state in SUCCESS


def _held(site: SiteConfig, owner: str | None) -> tuple[dict[str, SchedulerWord] | None, str]:
    whose = ["-u", owner] if owner else ["--me"]
    rows, said = _rows(site, ["squeue", *whose, "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N|%S|%e|%l"])
    if rows is None:
        return None, said
    words = {}
    for job_id, state, reason, node, begins, ends, limit in rows:
        waits_for = reason if reason not in ("None", "") else ""
        words[job_id] = SchedulerWord(
            state=state,
            detail=waits_for or _on(node),
            said=f"squeue: {' '.join(filter(None, (state, waits_for, _on(node))))}",
            begins_unix=_unix(begins),
            ends_unix=_unix(ends),
            limit_s=_seconds(limit),
        )
    return words, said


def _ended(site: SiteConfig, job_ids: Sequence[str]) -> tuple[dict[str, SchedulerWord] | None, str]:
    arrays = sorted({job_id.split("_")[0] for job_id in job_ids})
    fields = "JobID,State,ExitCode,Reason,NodeList"
    rows, said = _rows(site, ["sacct", "-X", "-P", "-n", "-o", fields, "-j", ",".join(arrays)])
    if rows is None:
        return None, said
    words: dict[str, SchedulerWord] = {}
    for listed, state, exit_code, reason, node in rows:
        detail = [f"exit code {exit_code}"] if exit_code not in ("0:0", "") else []
        detail += [text for text in (reason if reason != "None" else "", _on(node)) if text]
        word = SchedulerWord(
            state=state.split()[0],  # "CANCELLED by 1000"
            detail=", ".join(detail),
            said=f"sacct: {', '.join([state, *detail])}",
        )
        words |= dict.fromkeys(expanded(listed), word)
    return words, said


def find(site: SiteConfig, names: Iterable[str], since_unix: float) -> dict[str, str] | None:
    """Array ids by job name, of arrays submitted since; None where not both of squeue and sacct answered."""
    wanted = ",".join(names)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix - 60))
    held, _ = _rows(site, ["squeue", "--me", "-h", "-t", "all", "-n", wanted, "-o", "%j|%F"])
    ended, _ = _rows(site, ["sacct", "-X", "-P", "-n", "-S", start, f"--name={wanted}", "-o", "JobName,JobID"])
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


def _unix(text: str) -> float | None:
    """Slurm's time: seconds where it heeds SLURM_TIME_FORMAT, else local time; None for N/A."""
    with suppress(ValueError):
        return float(text)
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _seconds(text: str) -> float | None:
    """Slurm's "2-03:04:05", "3:04:05" or "4:05"; None for UNLIMITED and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _rows(site: SiteConfig, command: list[str]) -> tuple[list[list[str]] | None, str]:
    """The command's rows and OK, or None and why it gave none."""
    environment = for_slurm(site) | {"SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"did not answer within {TIMEOUT_S} s"
    except OSError as error:
        return None, f"could not be run ({error.strerror or error})"
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, f"did not answer ({re.sub(r'^.*?(error|fatal): ', '', words[-1].strip())})"
    columns = command[command.index("-o") + 1].replace("|", ",").count(",") + 1
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns], OK


def elapsed_s(site: SiteConfig, job_ids: Sequence[str]) -> dict[str, float] | None:
    """How long each job has held what it asked for, over all its starts; None where sacct did not answer."""
    arrays = ",".join(sorted({job_id.split("_")[0] for job_id in job_ids}))
    rows, _ = _rows(site, ["sacct", "-X", "-D", "-P", "-n", "-o", "JobID,Elapsed", "-j", arrays])
    if rows is None:
        return None
    taken: dict[str, float] = {}
    for listed, elapsed in rows:
        for job_id in expanded(listed):
            taken[job_id] = taken.get(job_id, 0.0) + (_seconds(elapsed) or 0.0)
    return taken
