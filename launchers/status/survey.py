"""Poll a sweep: query Slurm for every attempt in its ledger, read the run directories, resolve each state."""

import errno
import stat
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from inpaint_bench.core.attempt_state import (
    DROPPED,
    GONE_S,
    LEFT_QUEUE,
    PROCESS_EXITED,
    AttemptState,
    RunArtifacts,
    SchedulerState,
    resolve_attempt_state,
)
from inpaint_bench.core.config.site import CONNECTIONS, SiteConfig, check_connect
from inpaint_bench.core.config.validation import without_removed
from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import UserError, first_line
from inpaint_bench.core.files import in_threads, try_twice
from inpaint_bench.core.records import read_record
from inpaint_bench.core.schema import JOBS, MANIFEST, SWEEP, PointState, Reason, Status
from launchers.points.site_catalog import own_site, reachability
from launchers.remote import client
from launchers.slurm import blocks
from launchers.slurm.blocks import Turn, state_of, step_name
from launchers.slurm.environment import other_conf
from launchers.slurm.local_executor import is_alive, process_id
from launchers.slurm.pending_reasons import PendingReason, explain
from launchers.slurm.query import (
    SlurmReply,
    cancel_jobs,
    cancellable_jobs,
    cancellable_steps,
    find_arrays,
    query_jobs,
)
from launchers.sweep import private_dirs
from launchers.sweep.attempt import Attempt, AttemptKey
from launchers.sweep.events import Cancelled
from launchers.sweep.ledger import RERUN_REFUSES, Ledger, PointRecord

T = TypeVar("T")
SUBMITTING = "a command is still submitting from this sweep, and has not recorded this job"
# slurmctld keeps an ended job in memory for MinJobAge, 300 s unless a site changes it: until then squeue lists a job.
MIN_JOB_AGE_S = 300.0
OPEN_STATES = frozenset({PointState.QUEUED, PointState.RUNNING, PointState.UNKNOWN})


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
    pending: PendingReason | None = None  # why the job is pending, if Slurm says

    @property
    def artifacts(self) -> RunArtifacts:
        return self.attempts[-1].artifacts if self.attempts else RunArtifacts()

    @property
    def run_dir(self) -> Path | None:
        """Return the run directory of the last attempt; None if there was none, or a link leads there."""
        run_dir = self.attempts[-1].run_dir if self.attempts else None
        return None if run_dir is None or self.artifacts.unreadable or is_linked(run_dir) else run_dir

    @property
    def scheduler(self) -> SchedulerState | None:
        """Return what Slurm reports about the last attempt; None: not queried, or no answer."""
        return self.attempts[-1].scheduler if self.attempts else None

    @property
    def is_open(self) -> bool:
        """Return whether the state may still change by itself."""
        return self.state in OPEN_STATES

    @property
    def is_collected(self) -> bool:
        """Return whether the manifest is in this sweep directory; `collect` copies those of other sites."""
        return self.run_dir is not None and (self.run_dir / MANIFEST).is_file()


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """Status of every point of a sweep at one time."""

    points: list[PointStatus]  # in order of their numbers
    sites: dict[str, SiteConfig]
    replies: dict[str, SlurmReply]  # by queue
    notes: list[str]  # problems that concern no single point's state
    can_rerun: bool = True  # else it is another user's, or its ledger lacks attempts
    polled_unix: float = field(default_factory=time.time)


def poll_sweep(ledger: Ledger) -> SweepStatus:
    """Query every site of the sweep once and resolve the state of every point."""
    notes: list[str] = []
    records, sites, owner = ledger.points(notes), sites_of(ledger), private_dirs.other_owner(ledger.folder)
    # Before the other sources: this sets the job ids that only the ledger at the site has.
    remote = client.query(ledger, sites, records)
    attempts = [attempt for record in records.values() for attempt in record.attempts]
    queues = by_queue(sites, attempts)
    if owner:
        notes.append(f"the sweep belongs to user {owner}: its sites are reached as your own site files say, or not")
    now_unix = time.time() if owner else ledger.now_unix()
    saved = _read_all(ledger.folder, attempts, SchedulerState.load, lambda *_: None)
    last = {record.last.key for record in records.values() if record.last}
    # Slurm is queried before the files are read, so that the files know of every end that Slurm reports.
    answers = in_threads(lambda queue: _query_site(*queues[queue], last, saved, owner), queues)
    answered = dict(zip(queues, answers, strict=True))
    artifacts = _read_all(ledger.folder, attempts, partial(RunArtifacts.read, now_unix=now_unix), RunArtifacts.of_error)
    sources = _Sources(
        folder=ledger.folder,
        sites=sites,
        replies={queue: reply for queue, (reply, _) in answered.items() if reply} | remote.replies,
        unconfirmed={queue: reason for queue, (_, reason) in answered.items() if reason} | remote.unconfirmed,
        saved=saved,
        turns=_read_turns(ledger.folder, attempts),
        artifacts=artifacts | remote.artifacts,
        launcher_active=not ledger.holds_lock and ledger.is_locked(),
        is_recent=ledger.age_s(now_unix) < MIN_JOB_AGE_S,
        now_unix=now_unix,
    )
    points = [sources.point_status(record) for _, record in sorted(records.items())]
    notes += [f"{queue}: {sentence}" for queue, reply in sources.replies.items() for sentence in reply.duplicates]
    if not owner:
        sources.save_states(attempt for point in points for attempt in point.attempts)
    return SweepStatus(
        points=points,
        sites=sites,
        replies=sources.replies,
        notes=[*notes, *_superseded(points)],
        can_rerun=not owner and not any(RERUN_REFUSES in note for note in notes),
    )


def by_queue(
    sites: Mapping[str, SiteConfig], attempts: Iterable[Attempt]
) -> dict[str, tuple[SiteConfig, list[Attempt]]]:
    """Return attempts by their queue, each with the site whose `cluster` Slurm's commands have to name for it."""
    queues: dict[str, tuple[SiteConfig, list[Attempt]]] = {}
    for attempt in attempts:
        site = replace(sites[attempt.site], cluster=attempt.cluster)
        queues.setdefault(attempt.queue, (site, []))[1].append(attempt)
    return queues


def _query_site(
    site: SiteConfig,
    attempts: Sequence[Attempt],
    last: Container[AttemptKey],
    saved: Mapping[AttemptKey, SchedulerState | None],
    owner: str | None,
) -> tuple[SlurmReply | None, str | None]:
    """Query all jobs of a site that this machine's sbatch submitted, those of another user if the sweep has an `owner`.

    Finds arrays by job name whose launcher died, or timed out, in the sbatch call, and sets their job ids; arrays that
    sbatch refused for certain are not searched for. Returns the reply, None if no Slurm was queried, and why it is not
    known whether the last array was submitted.
    """
    if site.connection.over_ssh and owner:
        return SlurmReply(error=f"only user {owner} can ask over ssh for these jobs"), None
    # The answers of another site's Slurm would be about other jobs.
    if not site.connection.submits_here:
        return None, None
    reach, reply, unconfirmed = reachability(site), None, None
    open_ = [attempt for attempt in attempts if not ((state := saved[attempt.key]) and state.final)]
    if not reach.ok:
        reply = SlurmReply(error=f"its Slurm cannot be queried from here ({reach.reason})")
    elif other := other_conf(site, (attempt.slurm_conf for attempt in open_ if attempt.key in last)):
        reply = SlurmReply(error=other)
    without_id = [a for a in attempts if a.key in last and a.job_name and a.is_unconfirmed]
    if without_id and owner and not reply:
        unconfirmed = f"user {owner} submits them"  # only the submitter's own jobs can be searched for by name
    elif without_id:
        if not reply:
            names = sorted({str(attempt.job_name) for attempt in without_id})
            arrays, reply = find_arrays(site, names, min(attempt.planned_unix for attempt in without_id))
            for attempt in without_id:
                if array := arrays.get(str(attempt.job_name)):
                    attempt.job_id = f"{array}_{attempt.task}"
        unconfirmed = None if reply.complete else reply.no_answer_reason
    jobs = {attempt.job_id: attempt.job_name for attempt in attempts if attempt.job_id}
    # A Slurm that hangs is waited for once.
    if jobs and (reply is None or reply.answered):
        settled = {str(a.job_id) for a in attempts} - {a.job_id for a in open_}
        blocks = {str(a.job_id) for a in attempts if a.block is not None}
        since_unix = min(attempt.planned_unix for attempt in attempts)
        reply = query_jobs(site, jobs, settled=settled, blocks=blocks, owner=owner, since_unix=since_unix)
    return reply, unconfirmed


def _read_all(
    folder: Path, attempts: Sequence[Attempt], read: Callable[[Path], T], failed: Callable[[OSError, Path], T]
) -> dict[AttemptKey, T]:
    """Read something from the run directory of every attempt; `failed` returns what stands for one with an error."""

    def read_unless_linked(attempt: Attempt) -> T:
        run_dir = folder / attempt.subdir
        try:
            if is_linked(run_dir):
                raise OSError(errno.ELOOP, "a link to its run directory is not followed")
            return read(run_dir)
        except OSError as error:
            return failed(error, run_dir)

    keys = (attempt.key for attempt in attempts)
    return dict(zip(keys, in_threads(read_unless_linked, attempts), strict=True))


def _turns_file(folder: Path, attempt: Attempt) -> Path:
    return blocks.path(folder / JOBS / attempt.group, attempt.task)


def _read_turns(folder: Path, attempts: Iterable[Attempt]) -> dict[Path, list[Turn] | str]:
    """Read what became of the points of each job of several; an empty list for a job that has not started."""

    def read(file: Path) -> list[Turn] | str:
        try:
            if is_behind_link(folder, file):
                return f"{file.name}: a link to it is not followed"
            return read_record(file, list[Turn], follow_links=False) or []
        except (ValueError, OSError) as error:
            return f"{file}: cannot be read ({first_line(error)})"

    files = list(dict.fromkeys(_turns_file(folder, attempt) for attempt in attempts if attempt.block is not None))
    return dict(zip(files, in_threads(read, files), strict=True))


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """The sources of one poll, from which the states are resolved."""

    folder: Path
    sites: dict[str, SiteConfig]
    replies: dict[str, SlurmReply]  # by queue
    unconfirmed: dict[str, str]  # by queue why it is not known whether its last array was submitted
    saved: dict[AttemptKey, SchedulerState | None]
    turns: dict[Path, list[Turn] | str]  # by the file of a job of several points; a text: why it cannot be read
    artifacts: dict[AttemptKey, RunArtifacts]
    now_unix: float  # by the file server's clock
    is_recent: bool  # the last event of the ledger is: Slurm cannot have forgotten its job
    launcher_active: bool  # a command is submitting from this sweep, or running its points on this machine

    def point_status(self, record: PointRecord) -> PointStatus:
        if record.last is None:
            if self.launcher_active and not record.plan:
                return PointStatus(record=record, state=PointState.UNKNOWN, message=SUBMITTING)
            message = f"waits in {record.plan}" if record.plan else "never planned: its launcher died"
            return PointStatus(record=record, state=PointState.PLANNED, reason=Reason.NEVER_STARTED, message=message)
        attempts = tuple(self._attempt_status(attempt, last=attempt is record.last) for attempt in record.attempts)
        last, pending, message = attempts[-1], None, attempts[-1].message
        # A bare code such as QOSMaxJobsPerUserLimit becomes a sentence.
        in_queue = last.scheduler and not last.scheduler.detail.startswith(blocks.WAITS)
        if last.state is PointState.QUEUED and last.scheduler and in_queue and last.attempt.job_id:
            site = replace(self.sites[last.attempt.site], cluster=last.attempt.cluster)
            pending = explain(last.scheduler.detail, site, state=last.scheduler.state or "", jobs=[last.attempt.job_id])
            message = pending.sentence
        return PointStatus(
            record=record, state=last.state, reason=last.reason, message=message, attempts=attempts, pending=pending
        )

    def _attempt_status(self, attempt: Attempt, *, last: bool) -> AttemptStatus:
        artifacts, run_dir = _own_artifacts(attempt, self.artifacts[attempt.key]), self.folder / attempt.subdir
        scheduler: SchedulerState | None = None
        # Only the last attempt may still be waiting or unconfirmed: `rerun` makes no new one before that is settled.
        resolved = self._unsubmitted(attempt) if last and not attempt.job_id and not artifacts.manifest else None
        if resolved is None:
            scheduler, no_answer_reason = self._scheduler_state(attempt)
            # scancel was called, but Slurm does not say whether the job has ended: it may still run.
            submitted_here = attempt.job_id is not None and self.sites[attempt.site].connection.submits_here
            may_still_run = scheduler is None and submitted_here
            if scheduler and submitted_here and (scheduler.state in (None, DROPPED) or scheduler.unlisted):
                artifacts = self._with_newest_file(attempt)
            resolved = resolve_attempt_state(
                submitted=attempt.job_id is not None,
                refused=attempt.refused,
                cancelled=attempt.cancelled and not may_still_run,
                scheduler=scheduler,
                artifacts=artifacts,
                no_answer_reason=no_answer_reason,
            )
        return AttemptStatus(
            **vars(resolved), attempt=attempt, artifacts=artifacts, run_dir=run_dir, scheduler=scheduler
        )

    def _with_newest_file(self, attempt: Attempt) -> RunArtifacts:
        """Return the artifacts of an attempt with the newest of its files and logs, unless a link leads there."""
        artifacts = _own_artifacts(attempt, self.artifacts[attempt.key])
        run_dir, jobs = self.folder / attempt.subdir, self.folder / JOBS / attempt.group
        if any(is_behind_link(self.folder, path) for path in (run_dir, jobs)):
            return artifacts
        number = str(attempt.job_id).removeprefix("pid:").partition("@")[0]
        return artifacts.with_sign_of_life(run_dir, jobs.glob(f"{number}_*_log.*"), self.now_unix)

    def _unsubmitted(self, attempt: Attempt) -> AttemptState | None:
        """Return the state of an attempt without a job id that is queued here, or may have been submitted."""
        local = not self.sites[attempt.site].connection.has_slurm
        if local and self.launcher_active and not attempt.cancelled:
            return AttemptState(state=PointState.QUEUED, message="waits for its turn on this machine")
        if self.launcher_active and not attempt.refused and not attempt.cancelled:
            return AttemptState(state=PointState.UNKNOWN, message=SUBMITTING)
        if attempt.queue in self.unconfirmed and not attempt.refused_for_certain:
            refused = f"; {attempt.refused}" if attempt.refused else ""
            message = f"submission unconfirmed: {self.unconfirmed[attempt.queue]}{refused}"
            return AttemptState(state=PointState.UNKNOWN, message=message)
        return None

    def _scheduler_state(self, attempt: Attempt) -> tuple[SchedulerState | None, str]:
        """Return the scheduler's state of an attempt, or None and the reason why there is none."""
        job_id, saved = attempt.job_id, self.saved[attempt.key]
        if job_id is None:
            return None, "it was not submitted"
        if not job_id.startswith("pid:"):
            reply = self.replies.get(attempt.queue, SlurmReply())
            state, reason = reply.states.get(job_id), reply.missing_reason(job_id)
            if attempt.block is not None:
                state, reason = self._state_in_block(attempt, reply, state, reason)
            # One that was cancelled was in the queue: Slurm knew it, and it is gone.
            state = state and replace(state, unlisted=state.unlisted and not self.is_recent)
            if state and state.state is None and self.is_recent and not attempt.cancelled:
                state, reason = None, "neither squeue nor sacct lists it yet, minutes after the last submission"
        elif (pid := process_id(job_id)) is None:
            state, reason = None, f"its process is on {job_id.partition('@')[2]} and cannot be checked from here"
            manifest = self.artifacts[attempt.key].manifest
            is_open = manifest is None or manifest.status == Status.RUNNING  # all files are looked at, so only then
            if is_open and (age_s := self._with_newest_file(attempt).newest_age_s or 0.0) > GONE_S:
                state = SchedulerState(state=PROCESS_EXITED, raw=f"no file was written for {age_s / 3600:.0f} h")
        elif is_alive(pid):
            state, reason = SchedulerState(state="RUNNING", raw=f"process {pid} is running"), ""
        else:
            state, reason = SchedulerState(state=PROCESS_EXITED, raw=f"process {pid} has exited"), ""
        # A saved end outweighs that Slurm has purged the job, or does not answer now.
        if saved and (saved.final if state is None else state.state in (None, LEFT_QUEUE)):
            return saved, reason
        return state, reason

    def _state_in_block(
        self, attempt: Attempt, reply: SlurmReply, job: SchedulerState | None, reason: str
    ) -> tuple[SchedulerState | None, str]:
        steps = reply.steps.get(str(attempt.job_id), {})
        if not self.sites[attempt.site].connection.submits_here:  # the site has resolved it
            return steps.get(step_name(attempt.key)), reason
        turns = self.turns[_turns_file(self.folder, attempt)]
        return (None, turns) if isinstance(turns, str) else (state_of(attempt, job, turns, steps), reason)

    def save_states(self, attempts: Iterable[AttemptStatus]) -> None:
        """Save new final states beside the manifests, in parallel: after a night there are many."""
        readable = (a for a in attempts if not a.artifacts.unreadable)
        changed = (a for a in readable if a.scheduler and a.scheduler != self.saved[a.attempt.key])
        new = [(a.scheduler, a.run_dir) for a in changed if a.scheduler and not is_linked(a.run_dir)]
        in_threads(lambda pair: pair[0].save(pair[1]), new)


def is_behind_link(folder: Path, path: Path) -> bool:
    """Return whether a link leads from `folder` to `path`: what lies behind it is not part of the sweep."""
    return path.resolve() != folder.resolve() / path.relative_to(folder)


def is_linked(run_dir: Path) -> bool:
    """Return whether a link leads from the sweep directory to this run directory; such a link is never followed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return any(stat.S_ISLNK(try_twice(path.lstat).st_mode) for path in (run_dir.parent, run_dir))
    return False


def _own_artifacts(attempt: Attempt, artifacts: RunArtifacts) -> RunArtifacts:
    """Return the artifacts, or the contradiction if another run has written into the attempt's directory."""
    owner = artifacts.manifest.run_id if artifacts.manifest else None
    if not owner or owner == attempt.run_id:
        return artifacts
    return RunArtifacts(damage=f"{attempt.subdir}/{MANIFEST} belongs to run {owner}, not to {attempt.run_id}")


def _superseded(points: Iterable[PointStatus]) -> list[str]:
    """Describe earlier attempts that Slurm still holds beside a later one."""
    return [
        f"point {point.record.num}: attempt {earlier.attempt.attempt} ({earlier.attempt.job_id}) is still "
        f"{earlier.state} at {earlier.attempt.queue} beside attempt {point.attempts[-1].attempt.attempt}"
        for point in points
        for earlier in point.attempts[:-1]
        if earlier.state in (PointState.QUEUED, PointState.RUNNING) and earlier.scheduler is not None
    ]


def slowest_site(sites: Iterable[SiteConfig]) -> SiteConfig | None:
    """Return the site that may be polled least often (`limits.poll_s`); None if no Slurm is polled."""
    polled = (site for site in sites if site.connection.is_polled)
    return max(polled, key=lambda site: site.limits.poll_s, default=None)


def cancel_in_slurm(
    site: SiteConfig, ledger: Ledger, attempts: Sequence[Attempt], kept: Collection[str | None] = ()
) -> tuple[int, list[str]]:
    """Cancel attempts of one queue of this machine's Slurm. Returns how many, and sentences on why others were not.

    The jobs `kept` have other points that go on: only the steps of the attempts are cancelled, or never started.
    """
    jobs = {attempt.job_id: attempt.job_name for attempt in attempts if attempt.job_id}
    problems = []
    if unconfirmed := sum(attempt.job_id is None for attempt in attempts):
        points = pluralize(unconfirmed, "point")
        problems.append(f"Slurm did not say whether {points} had been submitted; cancel again when it does")
    if not jobs:
        return 0, problems
    if not (reach := reachability(site)).ok:
        return 0, [*problems, f"its Slurm cannot be reached from here ({reach.reason}); cancel there"]
    if other := other_conf(site, (attempt.slurm_conf for attempt in attempts)):
        return 0, [*problems, other]
    job_ids, foreign = cancellable_jobs(site, jobs)
    problems += foreign
    cancellable = [attempt for attempt in attempts if attempt.job_id in job_ids]
    if cancellable:
        # Recorded first: a job that ends in the meantime is then known to have been cancelled.
        try:
            ledger.append(Cancelled(attempts=[attempt.key for attempt in cancellable]))
        except OSError as error:  # on a full disk jobs are cancelled all the same
            problems.append(f"the cancellation is not recorded ({error.filename}: {error.strerror})")
        # A job of several reads that record before each point, so a step that it starts later is none of these.
        steps = {(str(attempt.job_id), step_name(attempt.key)) for attempt in cancellable if attempt.job_id in kept}
        running, unknown = cancellable_steps(site, steps) if steps else (set(), [])
        whole = (job_ids & {str(attempt.job_id) for attempt in cancellable}) - set(kept)
        # Without a signal, scancel kills a step at once, where it lets a job end.
        ends = [
            cancel_jobs(site, running, "--signal=TERM") if running else None,
            cancel_jobs(site, whole) if whole else None,
        ]
        problems += [*unknown, *filter(None, ends)]
        if any(ends):
            return 0, problems  # how many were cancelled is not known
    return len(cancellable), problems


def sites_of(ledger: Ledger) -> dict[str, SiteConfig]:
    """Return the sites by name, as they were configured when the sweep was submitted.

    If the sweep is another user's, only the names of its sites are used: the sites are those of this installation,
    without a connection if it has no file of that name. Raises UserError if the record cannot be used to connect.
    """
    if private_dirs.other_owner(ledger.folder):
        return {name: own_site(name) or SiteConfig(name=name) for name in ledger.sweep.sites}
    result = {}
    for name, content in ledger.sweep.sites.items():
        try:
            site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SiteConfig), without_removed(content)))
            assert isinstance(site, SiteConfig)
            if site.connect.method not in CONNECTIONS:
                raise UserError(f"connect.method={site.connect.method!r}")
            if site.connection.over_ssh:  # its values become arguments of ssh
                check_connect(site)
        except (OmegaConfBaseException, ValueError, UserError) as error:
            message = sanitize(first_line(error))
            raise UserError(f"{ledger.folder / SWEEP}: damaged (sites.{name}: {message})") from None
        result[name] = site
    return result
