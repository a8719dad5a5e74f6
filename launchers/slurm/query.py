"""Query the jobs of a site: squeue for those in the queue, sacct for those that ended, with one call of each.

Either may be down or busy. A job that only the other one could have known is then not lost, and the missing source is
reported. Slurm assigns job ids anew after a reset, and every cluster counts from 1: a job with an id of this sweep but
another name is foreign; its state does not count, and it is never cancelled.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ClusterShell.RangeSet import RangeSet, RangeSetException

from inpaint_bench.core import child
from inpaint_bench.core.attempt_state import LEFT_QUEUE, RENAMED, SchedulerState
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.slurm_time import duration_s

from .environment import at_cluster, slurm_environment

DAY_S = 86400
OK = "ok"
NOT_ASKED = "not asked"
UNKNOWN = "not known"  # when a job would start
MAX_ESTIMATES = 20  # per site and command: its controller computes every estimate
UNNAMED = "allocation"  # sacct's name for a job whose end its database has received before the start

JobNames = Mapping[str, str | None]  # name that a job was submitted under, if known, by job id ("123_4")


@dataclass(frozen=True, kw_only=True)
class SlurmReply:
    """The jobs of a site, and by command OK, NOT_ASKED or the reason why it did not answer."""

    states: dict[str, SchedulerState] = field(default_factory=dict)  # by job id
    squeue: str = NOT_ASKED
    sacct: str = NOT_ASKED
    owner: str | None = None  # another user, whose jobs Slurm may hide
    foreign: Mapping[str, str] = field(default_factory=dict)  # names of foreign jobs by array id
    error: str | None = None  # why the site could not be queried at all

    @property
    def complete(self) -> bool:
        return (self.squeue, self.sacct) == (OK, OK)

    @property
    def answered(self) -> bool:
        return OK in (self.squeue, self.sacct)

    @property
    def no_answer_reason(self) -> str:
        if self.error:
            return self.error
        if self.owner and self.complete:
            return f"no such job is visible for user {self.owner} (PrivateData?)"
        results = {"squeue": self.squeue, "sacct": self.sacct}
        failed = [f"{name} {result}" for name, result in results.items() if result != OK]
        return ", ".join(failed) or "Slurm was not asked"

    def missing_reason(self, job_id: str) -> str:
        if name := self.foreign.get(array_id(job_id)):
            return _another_job(array_id(job_id), name)
        if self.foreign and self.complete:
            return f"this Slurm has other jobs under ids of this sweep ({', '.join(sorted(self.foreign))})"
        return self.no_answer_reason


def query_jobs(
    site: SiteConfig, jobs: JobNames, *, settled: Collection[str] = (), owner: str | None = None
) -> SlurmReply:
    """Return the state of every job that Slurm has under its name; state None if both commands know no such job.

    `settled` jobs have a final state already: sacct, the slower command, is not asked about them. `owner` is another
    user, whose jobs Slurm may hide, so one that it does not show is not lost. Beside a foreign job none is lost either:
    this is another cluster, or one that was set up anew.
    """
    names = _KnownNames(jobs)
    queued, squeue = _query_squeue(site, owner, names)
    states = {job_id: state for job_id, state in (queued or {}).items() if job_id in jobs}
    # sacct may still have the start before, under the name that the task had then.
    renamed = {job_id: name for job_id, name in names.renamed.items() if job_id in jobs}
    states |= {i: SchedulerState(state=RENAMED, detail=_another_job(i, name)) for i, name in renamed.items()}
    # A job that squeue lists as queued or running needs no sacct.
    unresolved = [i for i in jobs if i not in settled and (i not in states or states[i].ended)]
    accounted, sacct = _query_sacct(site, unresolved, names) if unresolved else ({}, NOT_ASKED)
    for job_id in unresolved:
        state = (accounted or {}).get(job_id)
        # sacct learns of an end a moment after squeue, and then has the exit code too.
        if state and (state.ended or job_id not in states):
            states[job_id] = state
    # A job is known to be gone only from a full list of our own jobs on the cluster that they were submitted to.
    if queued is not None and not owner and not names.foreign:
        missing = SchedulerState(state=None)
        if accounted is None:
            missing = SchedulerState(state=LEFT_QUEUE, detail=f"it has left the queue, and sacct {sacct}")
        for job_id in unresolved:
            # The database has such a job, only not its name yet: the next poll decides.
            if array_id(job_id) not in names.unnamed:
                states.setdefault(job_id, missing)
    return SlurmReply(states=states, squeue=squeue, sacct=sacct, owner=owner, foreign=names.foreign)


class _KnownNames:
    """The names of this sweep's arrays, compared with those that Slurm has under their ids."""

    def __init__(self, jobs: JobNames) -> None:
        self._names = {array_id(job_id): name for job_id, name in jobs.items()}
        self.foreign: dict[str, str] = {}
        self.renamed: dict[str, str] = {}  # foreign names by job id as listed
        self.unnamed: set[str] = set()

    def claim(self, job_id: str, name: str) -> bool:
        """Return whether a listed job belongs to this sweep; record one that only has an id of it."""
        array = array_id(job_id)
        if array not in self._names:
            return False
        if name == self._names[array]:
            return True
        if name == UNNAMED:
            self.unnamed.add(array)
        else:
            self.foreign[array] = self.renamed[job_id] = name
        return False


def _another_job(job_id: str, name: str) -> str:
    return f"this Slurm has another job under id {job_id}, named {name}"


def array_id(job_id: str) -> str:
    """Return 123 for "123_4", "123_[0-4]" and "123"."""
    return job_id.split("_")[0]


def _query_squeue(
    site: SiteConfig, owner: str | None, names: _KnownNames
) -> tuple[dict[str, SchedulerState] | None, str]:
    user = ["-u", owner] if owner else ["--me"]
    # -r: a row per array task; -t all: also jobs that ended a few minutes ago.
    columns = ("%i", "%T", "%r", "%N", "%S", "%e", "%l", "%j")
    rows, result = _rows(site, ["squeue", *user, "-h", "-r", "-t", "all", "-o", "|".join(columns)], len(columns))
    if rows is None:
        return None, result
    states = {}
    for job_id, state, reason, node, start, end, limit, name in rows:
        if not names.claim(job_id, name):
            continue
        pending_reason = reason if reason not in ("None", "") else ""
        states[job_id] = SchedulerState(
            state=state,
            detail=pending_reason or _on_node(node),
            nodes=node if _on_node(node) else "",
            raw=f"squeue: {' '.join(filter(None, (state, pending_reason, _on_node(node))))}",
            start_unix=_unix_time(start),
            end_unix=_unix_time(end),
            time_limit_s=duration_s(limit),
        )
    return states, result


def _query_sacct(
    site: SiteConfig, job_ids: Sequence[str], names: _KnownNames
) -> tuple[dict[str, SchedulerState] | None, str]:
    arrays = sorted(set(map(array_id, job_ids)))
    # -X: jobs without their steps; -P: columns separated by "|" and not cut off.
    columns = ("JobID", "State", "ExitCode", "Reason", "NodeList", "JobName")
    command = ["sacct", "-X", "-P", "-n", "-o", ",".join(columns), "-j", ",".join(arrays)]
    rows, result = _rows(site, command, len(columns))
    if rows is None:
        return None, result
    states: dict[str, SchedulerState] = {}
    for listed, state, exit_code, reason, node, name in rows:
        if not names.claim(listed, name):
            continue
        detail = [f"exit code {exit_code}"] if exit_code not in ("0:0", "") else []
        detail += [text for text in (reason if reason != "None" else "", _on_node(node)) if text]
        scheduler_state = SchedulerState(
            state=state.split()[0],  # "CANCELLED by 1000"
            detail=", ".join(detail),
            nodes=node if _on_node(node) else "",
            raw=f"sacct: {', '.join([state, *detail])}",
        )
        states |= dict.fromkeys(expand_array(listed), scheduler_state)
    return states, result


def find_arrays(site: SiteConfig, names: Iterable[str], since_unix: float) -> tuple[dict[str, str], SlurmReply]:
    """Return the ids of arrays by job name, and the commands' results: if both answered, no other was submitted."""
    joined = ",".join(names)
    # Local time, as sacct reads it. A day earlier, because the clocks of two machines may differ.
    start = datetime.fromtimestamp(min(max(since_unix, 0.0), time.time()) - DAY_S).isoformat(timespec="seconds")
    queued, squeue = _rows(site, ["squeue", "--me", "-h", "-t", "all", "-n", joined, "-o", "%F|%j"], 2)
    ended, sacct = _rows(site, ["sacct", "-X", "-P", "-n", "-S", start, f"--name={joined}", "-o", "JobID,JobName"], 2)
    arrays = {name: array_id(job_id) for job_id, name in [*(ended or []), *(queued or [])]}
    return arrays, SlurmReply(squeue=squeue, sacct=sacct)


def jobs_named(site: SiteConfig, prefix: str) -> tuple[list[tuple[str, str, bool]] | None, str]:
    """Return id, name and whether it has not ended of every job in squeue whose name begins so, and squeue's result."""
    rows, result = _rows(site, ["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%j"], 3)
    if rows is None:
        return None, result
    jobs = [(job_id, SchedulerState(state=state), name) for job_id, state, name in rows if name.startswith(prefix)]
    return [(job_id, name, not state.ended) for job_id, state, name in jobs], result


def expand_array(job_id: str) -> Iterator[str]:
    """Yield 7_0, 7_1, 7_2, 7_5 for "7_[0-2,5%4]": sacct lists the pending tasks of an array together."""
    array, _, tasks = job_id.partition("_[")
    try:
        yield from (f"{array}_{task}" for task in RangeSet(tasks.rstrip("]").partition("%")[0]))
    except RangeSetException:  # not an array, or a list that Slurm has truncated
        yield job_id


def cancellable_jobs(site: SiteConfig, jobs: JobNames) -> tuple[set[str], list[str]]:
    """Return the jobs that are in the queue under their names, and sentences on why others cannot be cancelled.

    scancel's own filter by name cannot be used: given one task of a pending array, 22.05 cancels the whole array.
    """
    names = _KnownNames(jobs)
    queued, result = _query_squeue(site, None, names)
    if queued is None:
        return set(), [f"nothing was cancelled because squeue {result}; cancel again when it answers"]
    foreign = [f"job {array} is not this sweep's, it is named {name}" for array, name in names.foreign.items()]
    return {job_id for job_id, state in queued.items() if job_id in jobs and not state.ended}, foreign


def cancel_jobs(site: SiteConfig, job_ids: Iterable[str]) -> str | None:
    """Run scancel on jobs that `cancellable_jobs` returned. Returns an error message, or None."""
    _, result = _run(site, ["scancel", *job_ids])
    return None if result == OK else f"scancel {result}"


def elapsed_s(site: SiteConfig, jobs: JobNames) -> dict[str, float]:
    """Return how long each job held its resources, over all its starts; empty if sacct did not answer."""
    arrays, names = ",".join(sorted(set(map(array_id, jobs)))), _KnownNames(jobs)
    # -D: also the earlier starts of a requeued job.
    rows, _ = _rows(site, ["sacct", "-X", "-D", "-P", "-n", "-o", "JobID,Elapsed,JobName", "-j", arrays], 3)
    elapsed: dict[str, float] = {}
    for listed, duration, name in rows or ():
        for job_id in expand_array(listed) if names.claim(listed, name) else ():
            elapsed[job_id] = elapsed.get(job_id, 0.0) + (duration_s(duration) or 0.0)
    return elapsed


def estimate_starts(site: SiteConfig, scripts: Sequence[Path]) -> list[float | str]:
    """Return when Slurm would start each script: Unix seconds, or why there are none. `--test-only` submits nothing.

    The time is that of an array's first task, if nothing is submitted before it.
    """
    estimates: list[float | str] = [UNKNOWN] * len(scripts)
    environment, timeout_s = slurm_environment(site), site.limits.command_timeout_s
    for index, script in enumerate(scripts[:MAX_ESTIMATES]):
        try:
            done = child.run(["sbatch", "--test-only", str(script)], env=environment, timeout_s=timeout_s)
        except (OSError, subprocess.TimeoutExpired):
            break  # a controller that is down or busy is not queried again
        # "sbatch: Job 123 to start at 2026-11-20T10:00:00 using 16 processors on nodes ..."
        stderr = done.stderr.decode(errors="replace")
        if match := re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", stderr):
            estimates[index] = datetime.fromisoformat(match[1]).timestamp()
        elif done.returncode:
            lines = stderr.strip().splitlines()
            estimates[index] = f"refused: {re.sub(r'^.*?(error|failure): ', '', lines[-1])}" if lines else "refused"
    return estimates


def _on_node(node: str) -> str:
    return f"on {node}" if node and node != "None assigned" else ""


def _unix_time(text: str) -> float | None:
    """Parse a time: Unix seconds from commands that obey SLURM_TIME_FORMAT, else local time; None for N/A."""
    with suppress(ValueError):
        return float(text)
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _rows(site: SiteConfig, command: list[str], columns: int) -> tuple[list[list[str]] | None, str]:
    """Return the rows of so many columns that a command prints and OK, or None and the reason why there are none."""
    output, result = _run(site, command)
    if output is None:
        return None, result
    # The last column is the job's name, which may contain the separator.
    rows = [line.split("|", columns - 1) for line in output.splitlines()]
    return [row for row in rows if len(row) == columns], OK


def _run(site: SiteConfig, command: list[str]) -> tuple[str | None, str]:
    """Return the output of a command and OK, or None and the reason why there is none."""
    # Unix seconds: a local time is ambiguous in the hour in which the clocks go back.
    environment = slurm_environment(site) | {"SLURM_TIME_FORMAT": "%s"}
    timeout_s = site.limits.command_timeout_s
    try:
        done = child.run(at_cluster(site, command), env=environment, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"did not answer within {timeout_s} s"
    except OSError as error:
        return None, f"could not be run ({error.strerror or error})"
    if done.returncode != 0:
        # "slurm_load_jobs error: Unable to contact slurm controller": the part after "error: " is reported.
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return None, f"did not answer ({re.sub(r'^.*?(error|fatal): ', '', lines[-1].strip())})"
    # Some versions print the cluster's name first, even with -h.
    return re.sub(r"^CLUSTER: .*\n", "", done.stdout.decode(errors="replace")), OK
