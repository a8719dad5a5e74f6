"""What Slurm says of jobs: squeue for those it still holds, sacct for those that ended. One call each per site.

Either may be down or busy. A job that only one of them could have named is then not called unknown to Slurm:
nobody concludes that it is lost, and what is missing is said. Numbers of jobs are given anew, and by every Slurm: what
bears another name than the attempt's job is another's, neither believed nor touched.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from inpaint_bench.core.attempt_state import LEFT_QUEUE, SchedulerState
from inpaint_bench.core.site import SiteConfig

from .environment import for_slurm

TIMEOUT_S = 60
OK = "ok"
NOT_ASKED = "not asked"
UNNAMED = "allocation"  # sacct's name for a job of which its database has heard the end and not yet the beginning

Jobs = Mapping[str, str | None]  # by id ("123_4") the name that it was submitted under; None: not known


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the two commands said of one site's jobs, and how each of them did: OK, or why it gave nothing."""

    words: dict[str, SchedulerState] = field(default_factory=dict)
    squeue: str = NOT_ASKED
    sacct: str = NOT_ASKED
    owner: str | None = None  # another user, whose jobs Slurm may hide
    others: Mapping[str, str] = field(default_factory=dict)  # by array id the name of what is not ours

    def why_silent(self, job_id: str) -> str:
        """Why this job has no word."""
        if name := self.others.get(_array(job_id)):
            return f"job {_array(job_id)} of the Slurm that is asked here is another one, named {name}"
        if self.others and (self.squeue, self.sacct) == (OK, OK):
            taken = ", ".join(sorted(self.others))
            return f"the Slurm that is asked here holds other jobs under this sweep's numbers ({taken})"
        return self.silence

    @property
    def silence(self) -> str:
        """Why a job has no word."""
        if self.owner and (self.squeue, self.sacct) == (OK, OK):
            return f"Slurm shows you no such job of {self.owner}"
        silent = [f"{name} {said}" for name, said in (("squeue", self.squeue), ("sacct", self.sacct)) if said != OK]
        return ", ".join(silent) or "Slurm was not asked"


def ask(site: SiteConfig, jobs: Jobs, *, settled: Collection[str] = (), owner: str | None = None) -> Answer:
    """A word per job for which there is one under its name; state None only where both commands answered.

    Of `settled` jobs the last word is known: sacct, the slower of the two, is not asked for them. `owner`: another
    user whose jobs they are. Slurm may hide those, so that it does not know one of them tells nothing. Nor does it
    where it holds another job under a number of ours: it is not the Slurm that they were sent to, or began anew.
    """
    known = _Names(jobs)
    held, squeue = _held(site, owner, known)
    words = {i: word for i, word in (held or {}).items() if i in jobs}
    open_ends = [i for i in jobs if i not in settled and (i not in words or _over(words[i]))]
    if not open_ends:
        return Answer(words=words, squeue=squeue, owner=owner, others=known.others)
    ended, sacct = _ended(site, open_ends, known)
    # sacct hears of an end a moment later than squeue, and then knows more of it
    words |= {i: word for i in open_ends if (word := (ended or {}).get(i)) and (_over(word) or i not in words)}
    if held is not None and not owner and not known.others:
        lost = (
            SchedulerState(state=None)
            if ended is not None
            else SchedulerState(state=LEFT_QUEUE, detail=f"it has left the queue, and sacct {sacct}")
        )
        words = dict.fromkeys((i for i in open_ends if _array(i) not in known.unnamed), lost) | words
    return Answer(words=words, squeue=squeue, sacct=sacct, owner=owner, others=known.others)


class _Names:
    """What every array of ours is called, and what Slurm calls the jobs that have their numbers."""

    def __init__(self, jobs: Jobs) -> None:
        self._ours: dict[str, str | None] = {}
        for job_id, name in jobs.items():
            self._ours[_array(job_id)] = name or self._ours.get(_array(job_id))
        self.others: dict[str, str] = {}
        self.unnamed: set[str] = set()

    def fits(self, listed: str, name: str) -> bool:
        """Whether a job that squeue or sacct lists is one of ours; one that only has the number is noted."""
        array = _array(listed)
        if array not in self._ours:
            return False
        if name == self._ours[array]:
            return True
        if name == UNNAMED:
            self.unnamed.add(array)
        else:
            self.others[array] = name
        return False


def _array(job_id: str) -> str:
    """Of "123_4", "123_[0-4]" and "123" alike."""
    return job_id.split("_")[0]


def _over(word: SchedulerState) -> bool:
    return word.ended


def _held(site: SiteConfig, owner: str | None, known: _Names) -> tuple[dict[str, SchedulerState] | None, str]:
    whose = ["-u", owner] if owner else ["--me"]
    rows, said = _rows(site, ["squeue", *whose, "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N|%S|%e|%l|%j"])
    if rows is None:
        return None, said
    words = {}
    for job_id, state, reason, node, begins, ends, limit, name in rows:
        if not known.fits(job_id, name):
            continue
        waits_for = reason if reason not in ("None", "") else ""
        words[job_id] = SchedulerState(
            state=state,
            detail=waits_for or _on(node),
            raw=f"squeue: {' '.join(filter(None, (state, waits_for, _on(node))))}",
            start_unix=_unix(begins),
            end_unix=_unix(ends),
            time_limit_s=_seconds(limit),
        )
    return words, said


def _ended(site: SiteConfig, job_ids: Sequence[str], known: _Names) -> tuple[dict[str, SchedulerState] | None, str]:
    arrays = sorted(set(map(_array, job_ids)))
    fields = "JobID,State,ExitCode,Reason,NodeList,JobName"
    rows, said = _rows(site, ["sacct", "-X", "-P", "-n", "-o", fields, "-j", ",".join(arrays)])
    if rows is None:
        return None, said
    words: dict[str, SchedulerState] = {}
    for listed, state, exit_code, reason, node, name in rows:
        if not known.fits(listed, name):
            continue
        detail = [f"exit code {exit_code}"] if exit_code not in ("0:0", "") else []
        detail += [text for text in (reason if reason != "None" else "", _on(node)) if text]
        word = SchedulerState(
            state=state.split()[0],  # "CANCELLED by 1000"
            detail=", ".join(detail),
            raw=f"sacct: {', '.join([state, *detail])}",
        )
        words |= dict.fromkeys(expanded(listed), word)
    return words, said


@dataclass(frozen=True, kw_only=True)
class Found:
    """Array ids by job name. An array that is not among them was not submitted, if both commands answered."""

    arrays: dict[str, str]
    asked: Answer  # how the two commands did

    @property
    def silence(self) -> str | None:
        """Why an array that was not found may be there none the less."""
        return None if (self.asked.squeue, self.asked.sacct) == (OK, OK) else self.asked.silence


def find(site: SiteConfig, names: Iterable[str], since_unix: float) -> Found:
    """Arrays of these names, submitted since."""
    wanted = ",".join(names)
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since_unix - 60))
    held, squeue = _rows(site, ["squeue", "--me", "-h", "-t", "all", "-n", wanted, "-o", "%F|%j"])
    ended, sacct = _rows(site, ["sacct", "-X", "-P", "-n", "-S", start, f"--name={wanted}", "-o", "JobID,JobName"])
    arrays = {name: _array(job_id) for job_id, name in [*(ended or []), *(held or [])]}
    return Found(arrays=arrays, asked=Answer(squeue=squeue, sacct=sacct))


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


def held(site: SiteConfig, jobs: Jobs) -> tuple[set[str], list[str]]:
    """Those of the jobs that Slurm holds under their names, to be stopped, and in sentences what speaks against others.

    scancel's own filter by name is of no use: given a task of an array that waits, 22.05 then cancels the whole array.
    """
    known = _Names(jobs)
    words, said = _held(site, None, known)
    if words is None:
        return set(), [f"nothing was cancelled, for squeue {said}; cancel again when it answers"]
    others = [f"job {array} is not this sweep's, it is named {name}" for array, name in known.others.items()]
    return {job_id for job_id, word in words.items() if job_id in jobs and not _over(word)}, others


def cancel(site: SiteConfig, job_ids: Iterable[str]) -> str | None:
    """None, or what scancel complained of. The jobs are ours: `held` says which are."""
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
    # the last one is a job's name, which may hold the separator
    rows = [line.split("|", columns - 1) for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns], OK


def elapsed_s(site: SiteConfig, jobs: Jobs) -> dict[str, float] | None:
    """How long each job has held what it asked for, over all its starts; None where sacct did not answer."""
    arrays, known = ",".join(sorted(set(map(_array, jobs)))), _Names(jobs)
    rows, _ = _rows(site, ["sacct", "-X", "-D", "-P", "-n", "-o", "JobID,Elapsed,JobName", "-j", arrays])
    if rows is None:
        return None
    taken: dict[str, float] = {}
    for listed, elapsed, name in rows:
        for job_id in expanded(listed) if known.fits(listed, name) else ():
            taken[job_id] = taken.get(job_id, 0.0) + (_seconds(elapsed) or 0.0)
    return taken
