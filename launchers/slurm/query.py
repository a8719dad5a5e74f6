"""Query the jobs of a site: squeue for those in the queue, sacct for those that ended, with one call of each.

Either may be down or busy. A job that only the other one could have known is then not lost, and the missing source is
reported. Slurm assigns job ids anew after a reset, and every cluster counts from 1: a job with an id of this sweep but
another name is foreign; its state does not count, and it is never cancelled.
"""

import math
import re
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from textwrap import shorten

from ClusterShell.RangeSet import RangeSet, RangeSetException

from inpaint_bench.core import child
from inpaint_bench.core.attempt_state import DROPPED, LEFT_QUEUE, RENAMED, SchedulerState
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.config.validation import duration_s
from inpaint_bench.core.console import sanitize
from inpaint_bench.core.schema import PointState

from .environment import at_cluster, slurm_environment

DAY_S = 86400
OK = "ok"
NOT_ASKED = "not asked"
UNKNOWN = "not known"  # when a job would start
UNNAMED = "allocation"  # sacct's name for a job whose end its database has received before the start

_RANGE = r"[0-9]{1,7}(-[0-9]{1,7}(:[0-9]+)?)?"  # in 7_[0-2,5%4], 7_[0-12:2] and 7_[0,3,6,...]
_TASKS = re.compile(_RANGE)
_WHOLE_LIST = re.compile(rf"[0-9]+_(0|[1-9][0-9]*|\[{_RANGE}(,{_RANGE})*(%[0-9]+)?\])")
_JOB_ID = r"[1-9][0-9]*([_+.].*)?"
# Lines of the loader, of a startup file of a shell, and of Slurm beside an answer. One about an error is no such line.
_NOISE = re.compile(
    rb"(?im)^(.*\bld\.so\b.*ignored|(ba|k|z)?sh: .*(/etc/|profile|rc: |locale|job control|terminal process)"
    rb"|(?!.*\b(error|fatal)\b).*\b(warning|info|debug\d?): ).*$"
)
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")
# sacct says so for good: it will never know how a job ended.
_NO_ACCOUNTING = "accounting storage is disabled"
# Slurm's reasons why a job ended. Others are those that it waited for before.
_END_REASON = r"(Non|Raised|Time|Out|Inactive|Node|PartitionDown|Burst|System|JobLaunch|DeadLine|BadC|Constr|Inval).*"

JobNames = Mapping[str, str | None]  # name that a job was submitted under, if known, by job id ("123_4")


@dataclass(frozen=True, kw_only=True)
class SlurmReply:
    """The jobs of a site, and by command OK, NOT_ASKED or the reason why it did not answer."""

    states: dict[str, SchedulerState] = field(default_factory=dict)  # by job id
    steps: dict[str, dict[str, SchedulerState]] = field(default_factory=dict)  # by job id and name of the step
    squeue: str = NOT_ASKED
    sacct: str = NOT_ASKED
    owner: str | None = None  # another user, whose jobs Slurm may hide
    foreign: Mapping[str, str] = field(default_factory=dict)  # names of foreign jobs by array id
    duplicates: Sequence[str] = ()  # sentences on arrays with the name of a recorded one
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
        return ", ".join(failed) or "Slurm does not say which tasks of its array it lists"

    def missing_reason(self, job_id: str) -> str:
        if name := self.foreign.get(array_id(job_id)):
            return _another_job(array_id(job_id), name)
        if self.foreign and self.complete:
            return f"this Slurm has other jobs under ids of this sweep ({', '.join(sorted(self.foreign))})"
        return self.no_answer_reason


def query_jobs(
    site: SiteConfig,
    jobs: JobNames,
    *,
    settled: Collection[str] = (),
    blocks: Collection[str] = (),
    owner: str | None = None,
    since_unix: float = 0.0,
) -> SlurmReply:
    """Return the state of every job that Slurm has under its name; state None if both commands know no such job.

    `settled` jobs have a final state already: sacct, the slower command, is not asked about them. The steps of
    `blocks`, jobs of several points, are returned too if sacct is asked about any. `owner` is another user, whose
    jobs Slurm may hide, so one that it does not show is not lost. Beside a foreign job none is lost either:
    this is another cluster, or one that was set up anew. No job was submitted before `since_unix`.
    """
    names = _KnownNames(jobs)
    queued, squeue = _query_squeue(site, owner, names)
    states = {job_id: state for job_id, state in (queued or {}).items() if job_id in jobs}
    # sacct may still have the start before, under the name that the task had then.
    renamed = {job_id: name for job_id, name in names.renamed.items() if job_id in jobs}
    states |= {i: SchedulerState(state=RENAMED, detail=_another_job(i, name)) for i, name in renamed.items()}
    # A job that squeue lists as queued or running needs no sacct.
    unresolved = [i for i in jobs if i not in settled and (i not in states or states[i].ended)]
    steps: dict[str, dict[str, SchedulerState]] | None = {} if set(blocks) & set(unresolved) else None
    accounted, sacct = _query_sacct(site, unresolved, names, since_unix, steps) if unresolved else ({}, NOT_ASKED)
    for job_id in unresolved:
        state = (accounted or {}).get(job_id)
        # sacct learns of an end a moment after squeue, and then has the exit code too.
        if state and (state.ended or job_id not in states):
            states[job_id] = state
    # A job is known to be gone only from a full list of our own jobs on the cluster that they were submitted to.
    if queued is not None and squeue == OK and not owner and not names.foreign:
        left = SchedulerState(state=LEFT_QUEUE, detail=f"it has left the queue, and sacct {sacct}")
        active, recorded = (set(map(array_id, ids)) for ids in (queued, accounted or ()))
        for job_id in unresolved:
            state, array = states.get(job_id), array_id(job_id)
            if array in names.unclear or array in names.cancelled or job_id in queued:
                continue  # the next poll decides
            if state is None:
                gone = _DROPPED if array in recorded else SchedulerState(state=None)
                states[job_id] = gone if sacct == OK or _NO_ACCOUNTING in sacct else left
            # A pending task that is cancelled leaves the list of its array, and sacct may print the list of before.
            elif state.state == "PENDING" and array in active:
                states[job_id] = _DROPPED
            elif state.meaning.phase in (PointState.QUEUED, PointState.RUNNING):
                states[job_id] = replace(state, unlisted=True)
    return SlurmReply(
        states=states,
        steps=steps or {},
        squeue=squeue,
        sacct=sacct,
        owner=owner,
        foreign=names.foreign,
        duplicates=names.duplicates(site),
    )


_DROPPED = SchedulerState(state=DROPPED, detail="Slurm lists the rest of its array without it")


class _KnownNames:
    """The names of this sweep's arrays, compared with those that Slurm has under their ids."""

    def __init__(self, jobs: JobNames) -> None:
        self._names = {array_id(job_id): name for job_id, name in jobs.items()}
        self._jobs = jobs
        self.foreign: dict[str, str] = {}
        self.renamed: dict[str, str] = {}  # foreign names by job id as listed
        self._unrecorded: dict[str, str] = {}  # names of this sweep by the id of an array that is not recorded
        self.cancelled: set[str] = set()  # arrays that squeue lists as one job
        self.unclear: set[str] = set()  # arrays with a row that does not say whose or which tasks it is about

    def claim(self, job_id: str, name: str, state: str = "") -> bool:
        """Return whether a listed job belongs to this sweep; record one that only has an id of it."""
        array = array_id(job_id)
        if array not in self._names:
            if name in self._names.values() and not SchedulerState(state=_name(state)).ended:
                self._unrecorded[array] = name
            return False
        if "." in job_id and "[" not in job_id:  # a step, whose job has to be there too
            self.unclear.add(array)
            return False
        if name == self._names[array]:
            whole = _WHOLE_LIST.fullmatch(job_id) or _is_cancelled_array(job_id, state)
            if not whole or not self.tasks(job_id, state):
                self.unclear.add(array)
            return True
        if name == UNNAMED:  # the database has such a job, only not its name yet
            self.unclear.add(array)
        else:
            self.foreign[array] = self.renamed[job_id] = name
        return False

    def duplicates(self, site: SiteConfig) -> list[str]:
        """Say that Slurm has an array twice, perhaps as a site's sbatch repeats a call."""
        return [
            f"job {array} is also named {name}, and is not recorded: unless a copy of this sweep submitted it, both "
            f"write into one folder, so `{' '.join(at_cluster(site, ['scancel', array]))}`"
            for array, name in self._unrecorded.items()
        ]

    def tasks(self, job_id: str, state: str) -> list[str]:
        """Return the jobs that a row is about, as far as it says."""
        whole = _is_cancelled_array(job_id, state)
        return [own for own in self._jobs if array_id(own) == job_id] if whole else list(expand_array(job_id))


def _is_cancelled_array(job_id: str, state: str) -> bool:
    """Return whether a row is about all tasks of an array, which is cancelled before the database knows them."""
    return job_id == array_id(job_id) and _name(state) == "CANCELLED"


def _another_job(job_id: str, name: str) -> str:
    return f"this Slurm has another job under id {job_id}, named {name}"


def array_id(job_id: str) -> str:
    """Return 123 for "123_4", "123_[0-4]", "123", "123.batch" and "123+0"."""
    return re.split(r"[_.+]", job_id, maxsplit=1)[0]


def _squeue(owner: str | None = None) -> list[str]:
    """Return squeue of one user. -a: without it, jobs in partitions that are hidden from the user are left out."""
    return ["squeue", *(["-u", owner] if owner else ["--me"]), "-a", "-h"]


def _query_squeue(
    site: SiteConfig, owner: str | None, names: _KnownNames
) -> tuple[dict[str, SchedulerState] | None, str]:
    # -r: a row per array task; -t all: also jobs that ended a few minutes ago.
    columns = ("%i", "%T", "%r", "%N", "%S", "%e", "%l", "%j")
    rows, result = _rows(site, [*_squeue(owner), "-r", "-t", "all", "-o", "|".join(columns)], len(columns))
    if rows is None:
        return None, result
    states: dict[str, SchedulerState] = {}
    for job_id, state, reason, node, start, end, limit, name in sorted(rows, key=_order):
        if not names.claim(job_id, name, state):
            continue
        # squeue may have forgotten tasks that ended before their array was cancelled: sacct decides.
        if _is_cancelled_array(job_id, state):
            names.cancelled.add(job_id)
            continue
        listed = replace(
            _state("squeue", state, "", reason, node),
            start_unix=_unix_time(start),
            end_unix=_unix_time(end),
            time_limit_s=duration_s(limit),
        )
        states |= dict.fromkeys(names.tasks(job_id, state), listed)
    return states, result


def _query_sacct(
    site: SiteConfig,
    job_ids: Sequence[str],
    names: _KnownNames,
    since_unix: float,
    steps: dict[str, dict[str, SchedulerState]] | None = None,
) -> tuple[dict[str, SchedulerState] | None, str]:
    """`steps` gets the steps by job and name, unless it is None."""
    arrays = sorted(set(map(array_id, job_ids)))
    # -X: jobs without their steps; -P: columns separated by "|" and not cut off.
    columns = ("JobID", "State", "ExitCode", "Reason", "NodeList", "JobName")
    command = ["sacct", *(["-X"] if steps is None else []), "-P", "-n", *_since(since_unix)]
    command += ["-o", ",".join(columns), "-j", ",".join(arrays)]
    rows, result = _rows(site, command, len(columns))
    if rows is None:
        return None, result
    states: dict[str, SchedulerState] = {}
    for listed, state, exit_code, reason, node, name in sorted(rows, key=_order):
        job, is_step, _ = listed.partition(".")
        if is_step and steps is not None:
            steps.setdefault(job, {})[name] = _state("sacct", state, exit_code, reason, node)
        elif names.claim(listed, name, state):
            states |= dict.fromkeys(names.tasks(listed, state), _state("sacct", state, exit_code, reason, node))
    return states, result


def _order(row: Sequence[str]) -> tuple[bool, int]:
    """Sort rows so that the last one of a task counts: no list, which may be older, nor the end of an earlier start."""
    name = _name(row[1])
    # A federated job is revoked on every cluster but one; squeue -a lists those records too.
    return "[" not in row[0] and "_" in row[0], -1 if name == "REVOKED" else _rank(name)


def _name(text: str) -> str:
    """Return CANCELLED for "CANCELLED by 1000", the flag in "PENDING,REQUEUED", and no end beside another state."""
    names = [name for name in (text.split() or [""])[0].split(",") if name]
    return max(reversed(names), key=_rank, default="no state")


def _rank(name: str) -> int:
    phase = SchedulerState(state=name).meaning.phase
    return 2 if phase is PointState.UNKNOWN else int(phase in (PointState.QUEUED, PointState.RUNNING))


def _state(command: str, text: str, exit_code: str, reason: str, node: str) -> SchedulerState:
    """Return the state in a row."""
    reason = "" if reason == "None" else reason
    nodes = "" if node == "None assigned" else node
    facts = [f"exit code {exit_code}" if exit_code not in ("0:0", "") else "", reason, nodes and f"on {nodes}"]
    raw = f"{command}: {', '.join(filter(None, [text, *facts]))}"
    state = SchedulerState(state=_name(text), nodes=nodes, exit_code=exit_code, raw=raw)
    if state.meaning.phase is PointState.QUEUED:
        return replace(state, detail=reason)
    if not re.fullmatch(_END_REASON, reason):
        facts.remove(reason)
    return replace(state, detail=", ".join(filter(None, facts)))


def find_arrays(site: SiteConfig, names: Iterable[str], since_unix: float) -> tuple[dict[str, str], SlurmReply]:
    """Return the ids of arrays by job name, and the commands' results: if both answered, no other was submitted."""
    joined, since = ",".join(names), _since(since_unix)
    queued, squeue = _rows(site, [*_squeue(), "-t", "all", "-n", joined, "-o", "%F|%j"], 2)
    ended, sacct = _rows(site, ["sacct", "-X", "-P", "-n", *since, f"--name={joined}", "-o", "JobID,JobName"], 2)
    arrays = {name: array_id(job_id) for job_id, name in [*(ended or []), *(queued or [])]}
    return arrays, SlurmReply(squeue=squeue, sacct=sacct)


def jobs_named(site: SiteConfig, prefix: str) -> tuple[list[tuple[str, str, bool]] | None, str]:
    """Return id, name and whether it has not ended of every job in squeue whose name begins so, and squeue's result."""
    rows, result = _rows(site, [*_squeue(), "-r", "-t", "all", "-o", "%i|%T|%j"], 3)
    if rows is None or result != OK:
        return None, result
    jobs = [(row_id, SchedulerState(state=state), name) for row_id, state, name in rows if name.startswith(prefix)]
    return [(job_id, name, not state.ended) for row_id, state, name in jobs for job_id in expand_array(row_id)], result


def expand_array(job_id: str) -> Iterator[str]:
    """Yield 7_0, 7_1, 7_2, 7_5 for "7_[0-2,5%4]", a list of pending tasks; those before the cut if it is cut off."""
    array, is_list, tasks = job_id.partition("_[")
    parts = tasks.rstrip("]").partition("%")[0].split(",")
    whole = ",".join(part.replace(":", "/") for part in parts if _TASKS.fullmatch(part))
    try:
        yield from (f"{array}_{task}" for task in RangeSet(whole)) if is_list else (job_id,)
    except RangeSetException:
        return


def cancellable_jobs(site: SiteConfig, jobs: JobNames) -> tuple[set[str], list[str]]:
    """Return the jobs that are in the queue under their names, and sentences on why others cannot be cancelled.

    scancel's own filter by name cannot be used: given one task of a pending array, 22.05 cancels the whole array.
    """
    names = _KnownNames(jobs)
    queued, result = _query_squeue(site, None, names)
    if queued is None:
        return set(), [f"nothing was cancelled because squeue {result}; cancel again when it answers"]
    foreign = [f"job {array} is not this sweep's, it is named {name}" for array, name in names.foreign.items()]
    foreign += [f"squeue does not say which tasks of {array} it lists; cancel again later" for array in names.unclear]
    foreign += names.duplicates(site)
    foreign += [f"squeue {result}; cancel again when it answers"] if result != OK else []
    return {job_id for job_id, state in queued.items() if job_id in jobs and not state.ended}, foreign


def cancellable_steps(site: SiteConfig, steps: Collection[tuple[str, str]]) -> tuple[set[str], list[str]]:
    """Return the ids of running steps, given as job and name of the step, and a sentence if squeue does not answer."""
    rows, result = _rows(site, [*_squeue(), "--steps", "-o", "%i|%j"], 2)
    if rows is None or result != OK:
        return set(), [f"steps that run may not be cancelled because squeue {result}; cancel again when it answers"]
    return {listed for listed, name in rows if (listed.partition(".")[0], name) in steps}, []


def cancel_jobs(site: SiteConfig, job_ids: Iterable[str], *options: str) -> str | None:
    """Run scancel on jobs that `cancellable_jobs` returned. Returns an error message, or None."""
    _, result = _run(site, ["scancel", *options, *job_ids])
    return None if result == OK else f"scancel {result}, so some jobs may go on; `status` shows which"


def elapsed_s(site: SiteConfig, jobs: JobNames, since_unix: float = 0.0) -> dict[str, float]:
    """Return how long each job held its resources, over all its starts; those alone that sacct says it of."""
    arrays, names = ",".join(sorted(set(map(array_id, jobs)))), _KnownNames(jobs)
    # -D: also the earlier starts of a requeued job.
    command = ["sacct", "-X", "-D", "-P", "-n", *_since(since_unix), "-o", "JobID,Elapsed,JobName", "-j", arrays]
    rows, result = _rows(site, command, 3)
    elapsed: dict[str, float] = {}
    for listed, duration, name in rows or () if result == OK else ():
        seconds = duration_s(duration)
        for job_id in expand_array(listed) if names.claim(listed, name) else ():
            elapsed[job_id] = elapsed.get(job_id, 0.0) + (math.nan if seconds is None else seconds)
    return {job_id: seconds for job_id, seconds in elapsed.items() if math.isfinite(seconds)}


def _unix_time(text: str) -> float | None:
    """Parse a time: Unix seconds from commands that obey SLURM_TIME_FORMAT, else local time; None for N/A."""
    if re.fullmatch(r"[0-9]{1,10}", text):
        return float(text)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _since(unix: float) -> tuple[str, str]:
    # Local time, as sacct reads it. A day earlier, because the clocks of two machines may differ.
    return "-S", datetime.fromtimestamp(min(max(unix, 2 * DAY_S), time.time()) - DAY_S).isoformat(timespec="seconds")


def _shown(text: str) -> str:
    return shorten(sanitize(text), 120, placeholder=" ...")


def cause_of(stderr: bytes) -> str:
    """Return the line that says what went wrong: the last error, else the first line."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(error|fatal|failure)\b", line, re.IGNORECASE)]
    line = next(iter([*reversed(errors), *lines]), "")
    # "slurm_load_jobs error: Unable to contact slurm controller": the part after "error: " is reported.
    return _shown(re.sub(r"^.*?(error|fatal|failure): ", "", line))


def read_rows(text: str, columns: int, first: str = ".*") -> tuple[list[list[str]], str | None]:
    """Return the rows of so many columns, the first of this pattern, and the first line that is none.

    The last column may contain the separator, as a job's name does. Greetings and headings beside rows do not count.
    """
    rows, others = [], []
    for line in _ESCAPE.sub("", text).split("\n"):
        *fields, last = line.rstrip("\r").split("|", columns - 1)
        row = [*map(str.strip, fields), last]
        if len(row) == columns and re.fullmatch(first, row[0]):
            rows.append(row)
        elif line.strip() and not line.startswith("CLUSTER: "):  # a heading of squeue --clusters
            others.append(line.strip())
    if rows:
        others = [line for line in others if re.match(r"\d|.*\d.*\||.*\|.*\d", line)]
    return rows, next(iter(others), None)


def _rows(site: SiteConfig, command: list[str], columns: int) -> tuple[list[list[str]] | None, str]:
    """Return the rows of so many columns that a command prints and OK, or why they are not all, or none."""
    output, result = _run(site, command)
    if output is None:
        return None, result
    rows, other = read_rows(output, columns, _JOB_ID)
    if other is None:
        return rows, result
    return rows or None, f"printed {'also ' if rows else ''}what cannot be read ({_shown(other)})"


def _run(site: SiteConfig, command: list[str]) -> tuple[str | None, str]:
    """Return the output of a command and OK, or why it may not be all of it; None and the reason why there is none."""
    # Unix seconds: a local time is ambiguous in the hour in which the clocks go back. Lists of tasks are not cut off.
    environment = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
    timeout_s = site.limits.command_timeout_s
    try:
        done = child.run(at_cluster(site, command), env=slurm_environment(site) | environment, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"did not answer within {timeout_s} s"
    except OSError as error:
        return None, f"could not be run ({error.strerror or error})"
    errors, output = _NOISE.sub(b"", done.stderr).strip(), done.stdout.decode(errors="replace")
    if done.returncode != 0:
        cause = cause_of(errors or done.stderr.strip() or done.stdout)
        return None, f"did not answer ({cause or f'exit code {done.returncode}'})"
    # Slurm's commands may end with 0 after an error.
    if errors and not output.strip():
        return None, f"did not answer ({cause_of(errors)})"
    return output, f"did not answer in full ({cause_of(errors)})" if re.search(rb"(?i)(error|fatal): ", errors) else OK
