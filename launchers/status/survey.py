"""Poll a sweep: query Slurm for every attempt in its ledger, read the run directories, resolve each state."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import OmegaConf

from inpaint_bench.core.attempt_state import (
    LEFT_QUEUE,
    PROCESS_EXITED,
    AttemptState,
    RunArtifacts,
    SchedulerState,
    resolve_attempt_state,
)
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.schema import MANIFEST, SWEEP, PointState, Reason
from inpaint_bench.core.site import SiteConfig
from launchers.points.site_catalog import reachability
from launchers.remote import client
from launchers.slurm.local_executor import is_alive, process_id
from launchers.slurm.pending_reasons import PendingReason, explain
from launchers.slurm.query import NOT_ASKED, OK, SlurmReply, find_arrays, query_jobs, stoppable_jobs
from launchers.sweep.ledger import Attempt, Ledger, PointRecord

OPEN_STATES = frozenset({PointState.QUEUED, PointState.RUNNING, PointState.UNKNOWN})
NUM_READERS = 16  # files read at once: on a network file system each read waits for the server


@dataclass(frozen=True, kw_only=True)
class AttemptStatus(AttemptState):
    """The state of an attempt with its sources."""

    attempt: Attempt
    artifacts: RunArtifacts
    run_dir: Path  # may not exist
    scheduler: SchedulerState | None = None  # None: not queried, or no answer


@dataclass(frozen=True, kw_only=True)
class PointStatus(AttemptState):
    """The state of a point, which is that of its last attempt."""

    record: PointRecord
    attempts: tuple[AttemptStatus, ...] = ()  # oldest first
    artifacts: RunArtifacts = field(default_factory=RunArtifacts)  # these three are of the last attempt
    run_dir: Path | None = None
    scheduler: SchedulerState | None = None
    pending: PendingReason | None = None  # why the job is pending, if Slurm says

    @property
    def is_open(self) -> bool:
        """Return whether the state may still change without anyone's doing."""
        return self.state in OPEN_STATES

    @property
    def is_collected(self) -> bool:
        """Return whether the manifest is in this sweep directory; `collect` copies those of other sites."""
        return self.run_dir is not None and (self.run_dir / MANIFEST).is_file()


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Status of every point of a sweep, in order of point numbers, at one time."""

    points: list[PointStatus]
    sites: dict[str, SiteConfig]
    answers: dict[str, SlurmReply]  # by site how Slurm's commands did
    notes: list[str] = field(default_factory=list)  # problems that concern no single point's state
    polled_unix: float = field(default_factory=time.time)


def poll_sweep(ledger: Ledger, *, holding_lock: bool = False) -> SweepStatus:
    """Query every site of the sweep once and resolve the state of every point.

    Slurm is queried before the files are read: of a job that ends in between both then tell the end.
    `holding_lock`: the caller holds the sweep's lock, so no other command runs its points on this machine.
    """
    problems: list[str] = []
    records = ledger.points(problems)
    sites = sites_of(ledger)
    remote = client.query(ledger, sites, records)
    attempts = [attempt for record in records.values() for attempt in record.attempts]
    unreachable = _unreachable(sites, {attempt.site for attempt in attempts if _by_own_sbatch(attempt, sites)})
    searched, unconfirmed = _find_arrays(records, sites, unreachable)
    unconfirmed |= remote.unconfirmed
    with ThreadPoolExecutor(NUM_READERS) as pool:
        run_dirs = [ledger.folder / attempt.subdir for attempt in attempts]
        saved = dict(zip(map(_key, attempts), pool.map(SchedulerState.load, run_dirs), strict=True))
        queried = [attempt for attempt in attempts if attempt.site not in unreachable]
        answers = _query(sites, queried, saved, pool, _other_owner(ledger.folder))
        answers = _combined(answers, searched) | unreachable | remote.replies
        artifacts = dict(zip(map(_key, attempts), pool.map(RunArtifacts.read, run_dirs), strict=True))
    artifacts |= remote.artifacts
    sources = _Sources(
        folder=ledger.folder,
        sites=sites,
        answers=answers,
        saved=saved,
        artifacts={_key(a): _own_artifacts(a, artifacts[_key(a)]) for a in attempts},
        unconfirmed=unconfirmed,
        launcher_active=not holding_lock and ledger.is_locked(),
    )
    points = [_point_status(record, sources) for _, record in sorted(records.items())]
    _save_states((attempt for point in points for attempt in point.attempts), saved)
    return SweepStatus(points=points, sites=sites, answers=answers, notes=[*problems, *_superseded(points)])


_Key = tuple[int, int]  # point, attempt


def _key(attempt: Attempt) -> _Key:
    return attempt.point, attempt.attempt


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """Everything that states are resolved from."""

    folder: Path
    sites: dict[str, SiteConfig]
    answers: dict[str, SlurmReply]
    saved: dict[_Key, SchedulerState | None]
    artifacts: dict[_Key, RunArtifacts]
    unconfirmed: dict[str, str]  # by site why it is not known whether its last array was submitted
    launcher_active: bool  # a command is running points of this sweep on this machine


def _query(
    sites: dict[str, SiteConfig],
    attempts: Iterable[Attempt],
    saved: dict[_Key, SchedulerState | None],
    pool: ThreadPoolExecutor,
    owner: str | None,
) -> dict[str, SlurmReply]:
    """Query all jobs of a site at once, and all sites in parallel."""
    jobs: dict[str, dict[str, str | None]] = {}
    settled: dict[str, set[str]] = {}
    for attempt in attempts:
        if _by_own_sbatch(attempt, sites) and attempt.job_id and not attempt.job_id.startswith("pid:"):
            jobs.setdefault(attempt.site, {})[attempt.job_id] = attempt.job_name
            state = saved[_key(attempt)]
            if state and state.final:
                settled.setdefault(attempt.site, set()).add(attempt.job_id)
    answers = {
        site: pool.submit(query_jobs, sites[site], site_jobs, settled=settled.get(site, set()), owner=owner)
        for site, site_jobs in jobs.items()
    }
    return {site: answer.result() for site, answer in answers.items()}


def _unreachable(sites: dict[str, SiteConfig], names: Iterable[str]) -> dict[str, SlurmReply]:
    """Return the sites that the Slurm of this machine does not belong to: its answers would be about other jobs."""
    reach = {name: reachability(sites[name]) for name in names}
    return {
        name: SlurmReply(error=f"its Slurm cannot be queried from here ({result.reason})")
        for name, result in reach.items()
        if not result.ok
    }


def _combined(answers: dict[str, SlurmReply], searched: dict[str, SlurmReply]) -> dict[str, SlurmReply]:
    """Combine how the commands did over the query by job id and the search by job name: a failure of either counts."""
    combined = dict(answers)
    for site, search in searched.items():
        first = answers.get(site, search)
        squeue, sacct = (
            by_name if by_id in (OK, NOT_ASKED) else by_id
            for by_id, by_name in ((first.squeue, search.squeue), (first.sacct, search.sacct))
        )
        combined[site] = replace(first, squeue=squeue, sacct=sacct)
    return combined


def _own_artifacts(attempt: Attempt, artifacts: RunArtifacts) -> RunArtifacts:
    """Return the artifacts, or the contradiction if another run has written into the attempt's directory."""
    owner = artifacts.manifest.run_id if artifacts.manifest else None
    if not owner or owner == attempt.run_id:
        return artifacts
    return RunArtifacts(damage=f"{attempt.subdir}/{MANIFEST} belongs to run {owner}, not to {attempt.run_id}")


def _other_owner(folder: Path) -> str | None:
    """Return the user who owns the sweep; None if it is the caller."""
    record = folder / SWEEP
    uid = (record if record.exists() else folder).stat().st_uid
    if uid == os.getuid():
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _by_own_sbatch(attempt: Attempt, sites: dict[str, SiteConfig]) -> bool:
    """Return whether this sweep's own sbatch submitted the attempt, not a command over ssh or a carried plan."""
    return sites[attempt.site].connect.method == "slurm" and not attempt.carried


def _point_status(record: PointRecord, sources: _Sources) -> PointStatus:
    if record.last is None:
        message = f"waits in {record.plan}" if record.plan else "never planned: its launcher died"
        return PointStatus(record=record, state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message=message)
    attempts = tuple(_attempt_status(attempt, sources, last=attempt is record.last) for attempt in record.attempts)
    last, pending, message = attempts[-1], None, attempts[-1].message
    if last.state is PointState.QUEUED and last.scheduler and last.attempt.job_id:
        site, jobs = sources.sites[last.attempt.site], [last.attempt.job_id]
        pending = explain(last.scheduler.detail, site, state=last.scheduler.state or "", jobs=jobs)
        message = pending.sentence
    return PointStatus(
        record=record,
        state=last.state,
        reason=last.reason,
        message=message,
        attempts=attempts,
        artifacts=last.artifacts,
        run_dir=last.run_dir,
        scheduler=last.scheduler,
        pending=pending,
    )


def _attempt_status(attempt: Attempt, sources: _Sources, *, last: bool) -> AttemptStatus:
    artifacts = sources.artifacts[_key(attempt)]
    scheduler: SchedulerState | None = None
    if last and attempt.job_id is None and not artifacts.manifest and (unsubmitted := _unsubmitted(attempt, sources)):
        resolved = unsubmitted
    else:
        scheduler, no_answer_reason = _scheduler_state(attempt, sources.answers)
        saved = sources.saved[_key(attempt)]
        # What Slurm said of the end before outweighs that it has purged the job, or does not answer now.
        if attempt.job_id and saved and (saved.final if scheduler is None else scheduler.state in (None, LEFT_QUEUE)):
            scheduler = saved
        # scancel was called, but Slurm does not say whether the job has ended: it may still run.
        may_still_run = scheduler is None and attempt.job_id is not None and _by_own_sbatch(attempt, sources.sites)
        resolved = resolve_attempt_state(
            submitted=attempt.job_id is not None,
            refused=attempt.refused,
            cancelled=attempt.cancelled and not may_still_run,
            scheduler=scheduler,
            artifacts=artifacts,
            no_answer_reason=no_answer_reason,
        )
    return AttemptStatus(
        state=resolved.state,
        reason=resolved.reason,
        message=resolved.message,
        attempt=attempt,
        artifacts=artifacts,
        run_dir=sources.folder / attempt.subdir,
        scheduler=scheduler,
    )


def _unsubmitted(attempt: Attempt, sources: _Sources) -> AttemptState | None:
    """Return the state of an attempt without a job id that is queued here, or may have been submitted."""
    local = sources.sites[attempt.site].connect.method == "local"
    if local and sources.launcher_active and not attempt.cancelled:
        return AttemptState(state=PointState.QUEUED, message="waits for its turn on this machine")
    if attempt.site in sources.unconfirmed and not attempt.refused_for_certain:
        refused = f"; {attempt.refused}" if attempt.refused else ""
        message = f"submission unconfirmed: {sources.unconfirmed[attempt.site]}{refused}"
        return AttemptState(state=PointState.UNKNOWN, message=message)
    return None


def _scheduler_state(attempt: Attempt, answers: dict[str, SlurmReply]) -> tuple[SchedulerState | None, str]:
    """Return the scheduler's state of an attempt, or None and the reason why there is none."""
    job_id = attempt.job_id
    if job_id is None:
        return None, "it was not submitted"
    if job_id.startswith("pid:"):
        pid = process_id(job_id)
        if pid is None:
            return None, f"its process is on {job_id.partition('@')[2]} and cannot be checked from here"
        running = is_alive(pid)
        raw = f"process {pid} {'is running' if running else 'has exited'}"
        return SchedulerState(state="RUNNING" if running else PROCESS_EXITED, raw=raw), ""
    answer = answers.get(attempt.site, SlurmReply())
    return answer.states.get(job_id), answer.missing_reason(job_id)


def _save_states(attempts: Iterable[AttemptStatus], saved: dict[_Key, SchedulerState | None]) -> None:
    """Save new final states beside the manifests, in parallel: after a night there are many."""
    fresh = [(a.scheduler, a.run_dir) for a in attempts if a.scheduler and a.scheduler != saved[_key(a.attempt)]]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        list(pool.map(lambda pair: pair[0].save(pair[1]), fresh))


def _superseded(points: Iterable[PointStatus]) -> list[str]:
    """Describe earlier attempts that Slurm still holds beside a later one."""
    return [
        f"point {point.record.num}: attempt {earlier.attempt.attempt} ({earlier.attempt.job_id}) is still "
        f"{earlier.state} beside attempt {point.attempts[-1].attempt.attempt}"
        for point in points
        for earlier in point.attempts[:-1]
        if earlier.state in (PointState.QUEUED, PointState.RUNNING) and earlier.scheduler is not None
    ]


def _find_arrays(
    records: dict[int, PointRecord], sites: dict[str, SiteConfig], unreachable: dict[str, SlurmReply]
) -> tuple[dict[str, SlurmReply], dict[str, str]]:
    """Find arrays by job name whose launcher died, or timed out, in the sbatch call, and set their job ids.

    Returns the answers of the sites that were searched, and by site why it remains unconfirmed whether an array that
    was not found was submitted. Arrays that sbatch refused for certain are not searched for.
    """
    without_id: dict[str, list[Attempt]] = {}
    for record in records.values():
        last = record.last
        if not last or last.job_id or not last.job_name or last.refused_for_certain or not _by_own_sbatch(last, sites):
            continue
        without_id.setdefault(last.site, []).append(last)
    answers, unconfirmed = {}, {}
    for site, attempts in without_id.items():
        if site in unreachable:
            unconfirmed[site] = unreachable[site].no_answer_reason
            continue
        names = {attempt.job_name for attempt in attempts if attempt.job_name}
        arrays, reply = find_arrays(sites[site], sorted(names), min(attempt.planned_unix for attempt in attempts))
        answers[site] = reply
        if not reply.complete:
            unconfirmed[site] = reply.no_answer_reason
        for attempt in attempts:
            if array := arrays.get(attempt.job_name or ""):
                attempt.job_id = f"{array}_{attempt.task}"
    return answers, unconfirmed


def slowest_site(sites: Iterable[SiteConfig]) -> SiteConfig | None:
    """Return the site that may be polled least often (`limits.poll_s`); None if no Slurm is polled."""
    polled = (site for site in sites if site.connect.method in ("slurm", "ssh"))
    return max(polled, key=lambda site: site.limits.poll_s, default=None)


def cancellable(site: SiteConfig, attempts: Collection[Attempt]) -> tuple[list[Attempt], list[str]]:
    """Return the attempts whose jobs this machine's Slurm holds, and sentences on why others cannot be cancelled."""
    jobs = {attempt.job_id: attempt.job_name for attempt in attempts if attempt.job_id}
    complaints = []
    if unconfirmed := len(attempts) - len(jobs):
        points = pluralize(unconfirmed, "point")
        complaints.append(f"Slurm did not say whether {points} had been submitted; cancel again when it does")
    if not jobs:
        return [], complaints
    if not (reach := reachability(site)).ok:
        return [], [*complaints, f"its Slurm cannot be reached from here ({reach.reason}); cancel there"]
    job_ids, problems = stoppable_jobs(site, jobs)
    return [attempt for attempt in attempts if attempt.job_id in job_ids], complaints + problems


def sites_of(ledger: Ledger) -> dict[str, SiteConfig]:
    """Return the sites by name, as they were configured when the sweep was submitted."""
    result = {}
    for name, content in ledger.sweep.sites.items():
        site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), content))
        assert isinstance(site, SiteConfig)
        result[name] = site
    return result
