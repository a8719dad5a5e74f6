"""Our own commands at a site that is reached over ssh: `launch --plan -`, `status`, `cancel`, each with --json.

They run from the code snapshot that was sent there. The sweep's folder at the site is a sweep directory in its own
right, whose ledger records what was submitted there. So a broken connection loses nothing, and a repeated request
submits nothing twice. While a site does not answer, the state of its jobs is UNKNOWN, never LOST. Names, job ids and
paths of a reply end up in the ledger and in file names here, so every field is checked when it is decoded.
"""

import io
import logging
import shlex
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.config.site import SiteConfig
from inpaint_bench.core.console import pluralize, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import decode_record
from inpaint_bench.core.schema import CODE, SNAPSHOT
from launchers.points.point import Group, Point, SubmitOutcome, by_site
from launchers.points.site_catalog import Reachability
from launchers.slurm.blocks import step_name
from launchers.slurm.query import SlurmReply
from launchers.slurm.starts import COMMAND, VARIABLES, Start, read_start
from launchers.sweep.attempt import Attempt, AttemptKey
from launchers.sweep.events import Refused, Staged, Submitted
from launchers.sweep.ledger import Ledger, PointRecord
from launchers.sweep.private_dirs import other_owner

from . import plan_file
from .ssh import SshConnection, UnreachableError, one_line, shell

log = logging.getLogger(__name__)

SUBMIT_TIMEOUTS = 90  # times the site's timeout: a thousand points are composed there
DEFAULT_TIMEOUTS = 5  # the command starts, and squeue and sacct may take limits.command_timeout_s each

T = TypeVar("T")


class SweepReply(msgspec.Struct, kw_only=True):
    """What `status --json` prints of a sweep directory at a site, as far as it is used here."""

    sweep_id: str | None  # None: there is no sweep (any more)
    submitting: bool  # a command there holds the sweep's lock
    sources: dict[str, SlurmReply] = {}  # by queue, without states
    records: list[Attempt] = []  # without what they request


class PlanReply(msgspec.Struct, kw_only=True):
    """What `launch --plan - --json` prints: the outcome of each point."""

    attempts: list[Attempt]


class CancelReply(msgspec.Struct, kw_only=True):
    """What `cancel --json` prints: a sentence for each problem."""

    problems: list[str]


class RemoteError(Exception):
    """The site answered that it has not done what was requested."""


@dataclass(frozen=True, kw_only=True)
class RemoteSweep:
    """A sweep's folder at a site, and the code snapshot there that our commands run from."""

    site: SiteConfig
    root: str
    code: str

    @classmethod
    def of(cls, site: SiteConfig, ledger: Ledger) -> Self | None:
        """Return where the sweep lies at a site; None before its code was sent there, or if ssh is not used.

        None too for the sweep of another user, because its record says which ssh configuration is executed.
        """
        staged = [event for event in ledger.events(Staged) if event.site == site.name]
        if not site.connection.over_ssh or not staged or other_owner(ledger.folder):
            return None
        return cls(site=site, root=staged[-1].root, code=staged[-1].code)

    @property
    def connection(self) -> SshConnection:
        """Return the connection to the site's login node; its first command opens it."""
        return SshConnection(self.site.connect)

    def call(self, *arguments: str, reply: type[T], stdin: bytes = b"", timeouts: float = DEFAULT_TIMEOUTS) -> T:
        """Run a command of ours at the site and return its reply.

        Raises RemoteError if it refuses, UnreachableError if its outcome is unknown.
        """
        name, timeout_s = self.site.name, timeouts * self.site.connect.timeout_s
        command = [str(self.site.python), "-m", "inpaint_bench", *arguments, "--json"]
        script = shell(command, PYTHONPATH=f"{self.root}/{CODE}/{self.code}", PYTHONSAFEPATH="1")
        done = self.connection.run_login(script, stdin=stdin, timeout_s=timeout_s)
        # It prints its reply in one piece. A refusal has none, and its sentence is the last line of standard error.
        _, refused, sentence = (b"\n" + done.stderr).rpartition(b"\nerror: ")
        if done.returncode == UserError.exit_code and refused and not done.stdout.strip():
            raise RemoteError(f"{name}: {one_line(sentence.decode(errors='replace'))}")
        try:
            return decode_record(done.stdout, reply)
        except (ValueError, RecursionError) as error:
            why = one_line(str(error)) if done.stdout.strip() else self.connection.why_failed(done)
            raise UnreachableError(f"{name}: the reply of `{arguments[0]}` there cannot be read ({why})") from None


def root_of(site: SiteConfig, sweep_id: str) -> str:
    """Return the path of the sweep directory at the site."""
    assert site.connect.folder is not None
    return f"{site.connect.folder.rstrip('/')}/{sweep_id}"


def connect(points: Iterable[Point]) -> None:
    """Open the connections that these points need. Points of a site that does not answer become unreachable."""
    over_ssh = (point for point in points if point.reachable and point.site.connection.over_ssh)
    for members in by_site(over_ssh).values():
        try:
            SshConnection(members[0].site.connect).open()
        except UnreachableError as error:
            for point in members:
                point.reachability = Reachability(ok=False, reason=str(error))


def ask_start(site: SiteConfig, script: str) -> Start:
    """Ask the Slurm of a site over ssh when it would start a script."""
    # As of a submission there: sbatch reads nothing from the shell but which cluster is asked.
    conf = shlex.quote(site.connect.slurm_conf) if site.connect.slurm_conf else '"${SLURM_CONF-}"'
    clean = f'conf={conf}; unset ${{!SLURM_*}} ${{!SBATCH_*}}; test -z "$conf" || export SLURM_CONF="$conf"; date +%s'
    try:
        done = SshConnection(site.connect).run_login(f"{clean}; {shell(COMMAND, **VARIABLES)}", stdin=script.encode())
    except UnreachableError as error:
        return Start(reason=one_line(str(error)))
    now = done.stdout.partition(b"\n")[0]
    return read_start(done, int(now)) if now.isdigit() else Start(reason="the time there could not be read")


def submit(groups: Sequence[Group], ledger: Ledger, code: Path) -> SubmitOutcome:
    """Have the groups of one site submitted there, and record the outcome in the ledger.

    If no reply comes back, `status` finds out once the site answers.
    """
    site, sweep = groups[0].site, ledger.sweep
    points = [point for group in groups for point in group.points]
    number = pluralize(len(points), "point")
    remote = RemoteSweep(site=site, root=root_of(site, sweep.sweep_id), code=code.name)
    try:
        push_code(remote, code)
    except (UnreachableError, RemoteError) as error:
        log.error(f"{error}. {number} not submitted; `rerun` submits them.")
        return SubmitOutcome(not_accepted=len(points))
    # Recorded before the request: if its reply is lost, `status` knows where to ask.
    ledger.append(Staged(site=site.name, root=remote.root, code=remote.code))
    try:
        # JSON, which is YAML too: if the connection breaks, what arrived of it cannot be read.
        plan = msgspec.json.encode(plan_file.make_plan(sweep, site.name, points))
        command = ("launch", "--plan", "-", "--folder", remote.root)
        attempts = remote.call(*command, reply=PlanReply, stdin=plan, timeouts=SUBMIT_TIMEOUTS).attempts
    except UnreachableError as error:
        log.error(f"{error}. Whether it submitted {number} is unknown; `status` shows it once the site answers.")
        return SubmitOutcome(not_accepted=len(points), unanswered=True)
    except RemoteError as error:
        # The site refused the plan as a whole, so each point was refused for this reason.
        message = str(error).removeprefix(f"{site.name}: ")
        attempts = [Attempt(point=p.num, site=site.name, run_id=p.run_id, refused=message) for p in points]
    outcomes = {attempt.run_id: attempt for attempt in attempts}
    refused: dict[str, list[AttemptKey]] = {}
    for point in points:
        key, outcome = (point.num, point.attempt), outcomes.get(point.run_id)
        if outcome and outcome.job_id and outcome.in_slurm:
            ledger.append(Submitted(group=point.group, job_id=outcome.job_id, cluster=outcome.cluster, attempts=[key]))
        else:
            reason = (outcome and outcome.refused) or "no reason given"
            refused.setdefault(sanitize(reason), []).append(key)
    for message, keys in refused.items():
        ledger.append(Refused(group=groups[0].name, attempts=keys, message=f"{site.name}: {message}"))
        log.error(f"{site.name}: {message}. {pluralize(len(keys), 'point')} refused; correct it and `rerun`.")
    num_refused = sum(map(len, refused.values()))
    log.info(f"{site.name}: {pluralize(len(points) - num_refused, 'point')} submitted over ssh")
    return SubmitOutcome(not_accepted=num_refused)


def push_code(remote: RemoteSweep, code: Path) -> None:
    """Copy the code snapshot to the site, once, as a tar archive.

    It gets its name, a hash of its content, when it is complete. Raises UnreachableError, RemoteError.
    """
    connection, folder, partial = remote.connection, f"{remote.root}/{CODE}", f".{remote.code}.partial"
    root, cd, python = shlex.quote(remote.root), f"cd {shlex.quote(folder)}", shlex.quote(str(remote.site.python))
    # The folder is private, because jobs run the code as this user.
    prepare = f"umask 022 && mkdir -p {root} && umask 077 && mkdir -p {shlex.quote(folder)} && {cd}"
    check = f"{{ test -x {python} || {{ echo {python} is not a program there >&2; false; }}; }}"
    # One command makes the folders, checks the interpreter, and says whether the code is there already.
    done = connection.run_login(f"{prepare} && {check} && {{ test -e {remote.code}/{SNAPSHOT} || echo absent; }}")
    if done.returncode == 0 and done.stdout == b"absent\n":
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            archive.add(code, arcname=".")
        # -T: without it, mv would move the folder into an existing one of that name.
        unpack = f"rm -rf {partial} && mkdir {partial} && tar -xz -f - -C {partial} && mv -T {partial} {remote.code}"
        done = connection.run_login(f"{cd} && {unpack}", stdin=content.getvalue())
    if done.returncode:
        reason = connection.why_failed(done)
        raise RemoteError(f"{remote.site.name}: the code cannot be copied to {folder} ({reason})")


@dataclass(frozen=True, kw_only=True)
class RemoteStatus:
    """What the sites that are reached over ssh reported."""

    replies: dict[str, SlurmReply] = field(default_factory=dict)  # by queue
    artifacts: dict[AttemptKey, RunArtifacts] = field(default_factory=dict)
    unconfirmed: dict[str, str] = field(default_factory=dict)  # by queue, why its submissions are not confirmed

    def add(self, site: str, reply: SweepReply, attempts: Sequence[Attempt]) -> None:
        """Take over the reply of a site that has these attempts."""
        by_key = {(attempt.point, attempt.attempt): attempt for attempt in attempts}
        states: dict[str, dict[str, SchedulerState]] = defaultdict(dict)  # by queue and job id
        steps: dict[str, dict[str, dict[str, SchedulerState]]] = defaultdict(lambda: defaultdict(dict))
        for reported in reply.records:
            attempt = by_key.get(reported.key)
            # Another run id means another attempt, and processes of the site cannot be followed from here.
            if attempt is None or attempt.run_id != reported.run_id or not reported.in_slurm:
                continue
            attempt.job_id, attempt.cluster = reported.job_id or attempt.job_id, reported.cluster or attempt.cluster
            attempt.refused = attempt.refused or reported.refused
            attempt.cancelled = attempt.cancelled or reported.cancelled
            if attempt.job_id and reported.scheduler is not None:
                states[attempt.queue][attempt.job_id] = reported.scheduler
                steps[attempt.queue][attempt.job_id][step_name(attempt.key)] = reported.scheduler
            files = reported.artifacts
            if files and (files.manifest or files.unreadable or files.sign_of_life):
                self.artifacts[reported.key] = files
        # One of its clusters that did not answer counts for all.
        worst = min(reply.sources.values(), key=lambda answer: answer.complete, default=SlurmReply())
        error = f"the sweep directory at {site} does not exist (any more)" if reply.sweep_id is None else None
        # A command there may be inside sbatch at this moment.
        waits = reply.submitting and any(attempt.job_id is None and not attempt.refused for attempt in attempts)
        for queue in {attempt.queue for attempt in attempts}:
            self.replies[queue] = replace(worst, states=states[queue], steps=steps[queue], error=error)
            if waits:
                self.unconfirmed[queue] = f"{site} is still submitting"


def query(ledger: Ledger, sites: Mapping[str, SiteConfig], records: Mapping[int, PointRecord]) -> RemoteStatus:
    """Query each site that is reached over ssh and has open attempts, once.

    Attempts get the job ids that so far only the site's own ledger records.
    """
    status = RemoteStatus()
    for name, site in sites.items():
        attempts = [a for record in records.values() for a in record.attempts if a.site == name]
        remote = RemoteSweep.of(site, ledger)
        # Nothing was sent there, or all results are here with their final states: the site need not be asked.
        if remote is None or all(_was_collected(ledger.folder / attempt.subdir) for attempt in attempts):
            continue
        try:
            status.add(name, remote.call("status", remote.root, reply=SweepReply), attempts)
        except (UnreachableError, RemoteError) as error:
            queues = [attempt.queue for attempt in attempts]
            status.replies.update(dict.fromkeys(queues, SlurmReply(error=str(error))))
            status.unconfirmed.update(dict.fromkeys(queues, str(error)))
            # Only the site knows whether they have a run directory.
            missing = [attempt for attempt in attempts if not (ledger.folder / attempt.subdir).is_dir()]
            status.artifacts.update({(attempt.point, attempt.attempt): RunArtifacts() for attempt in missing})
    return status


def _was_collected(run_dir: Path) -> bool:
    """Return whether files that were collected say how the attempt ended."""
    state = SchedulerState.load(run_dir)
    return state is not None and state.final and RunArtifacts.read(run_dir).manifest is not None


def cancel(site: SiteConfig, ledger: Ledger, points: Iterable[int], *, timeout_s: float) -> str | None:
    """Cancel what is queued or running of these points at a site and return what went wrong, or None.

    `timeout_s` is how long the site may wait for a command there that is still submitting.
    """
    remote = RemoteSweep.of(site, ledger)
    if remote is None:  # nothing was ever sent there
        return None
    try:
        timeouts = DEFAULT_TIMEOUTS + timeout_s / site.connect.timeout_s
        chosen = [f"--point={point}" for point in points]
        problems = remote.call("cancel", remote.root, *chosen, reply=CancelReply, timeouts=timeouts).problems
    except (UnreachableError, RemoteError) as error:
        return str(error)
    return f"{site.name}: {sanitize('; '.join(problems))}" if problems else None
