"""The ledger of a sweep, `ledger.jsonl`, which only grows, and the lock of its directory, which machines may share.

An event is on disk before what it announces happens: `planned` before sbatch is called, `submitted` right after. So a
sweep whose launcher died is not taken for one that was never submitted.
"""

import errno
import fcntl
import math
import os
import re
import time
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from filelock import SoftFileLock, Timeout

from inpaint_bench.core.console import list_some, sanitize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import in_threads, names_in, open_plain, read_plain, try_twice
from inpaint_bench.core.records import decode_record
from inpaint_bench.core.schema import JOBS, LEDGER, PLAN_PATTERN

from . import private_dirs
from .attempt import Attempt, AttemptKey, queue_name
from .events import Cancelled, Deferred, Event, Planned, Refused, Submitted
from .sweep_record import SweepRecord

E = TypeVar("E", bound=Event)
_RUN_DIR = re.compile(r"(\d+)/attempt-(\d+)")
_PLAN = re.compile(PLAN_PATTERN.format(site=r"[\w-]+"))
TIMEOUT_S = 1.0  # longer than `is_locked` can be in the way
POLL_S = 0.2
BUSY = "is submitting from this sweep or running its points"
LOCK = ".lock"
SOFT_LOCK = ".lock.owner"
_FLOCK_MISSING = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
RERUN_REFUSES = "`rerun` refuses this sweep"


@dataclass(kw_only=True)
class PointRecord:
    """A point of the sweep with its attempts, oldest first. Without attempts it waits in a plan file."""

    num: int
    overrides: list[str]
    gpu: str | None
    batch: int | str | None
    site: str
    plan: str | None = None  # plan file, if no reachable site has its GPU
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


class BusyError(UserError):
    """Another command holds the sweep's lock."""


class Ledger:
    """Reads and writes the record and the ledger of one sweep directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holds_lock = False  # so no other command submits from this sweep, or runs its points on this machine

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open an existing sweep. Raises UserError if `folder` is not one."""
        ledger = cls(folder)
        _ = ledger.sweep
        return ledger

    @property
    def sweep(self) -> SweepRecord:
        """Read `sweep.json`. Raises UserError if it is missing or damaged."""
        return SweepRecord.read(self.folder)

    @contextmanager
    def lock(self, *, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
        """Let one command at a time submit from this sweep. Raises BusyError if another still does after `timeout_s`.

        A child process that inherits descriptors (sbatch) keeps the lock when this process is killed: until it has
        ended, nobody knows what it submits. Raises UserError for a folder that `private_dirs.check` refuses.
        """
        private_dirs.make(self.folder.resolve())
        try:
            # Without the file `_shared_flock` could not find out whether the file system has flock.
            handle = open_plain(self.folder / LOCK, os.O_RDWR | os.O_CREAT, mode=0o644)
        except OSError as error:
            raise UserError(f"{self.folder / LOCK}: {error.strerror}, so the sweep cannot be locked") from None
        with ExitStack() as stack:
            stack.callback(os.close, handle)  # and no unlock, which would also take it from a child
            if _shared_flock(self.folder) is None:
                stack.enter_context(_existence_lock(self.folder, timeout_s))
            else:
                _wait_for_flock(handle, self.folder, timeout_s)
            self.holds_lock = True
            try:
                yield
            finally:
                self.holds_lock = False

    def now_unix(self) -> float:
        """Return the time by the file server's clock if the lock may be written, else by this machine's."""
        lock = self.folder / LOCK
        with suppress(OSError):
            os.utime(lock, follow_symlinks=False)
            return lock.lstat().st_mtime
        return time.time()

    def age_s(self, now_unix: float | None = None) -> float:
        """Return how long ago the last event was written; infinite before the first."""
        now_unix = self.now_unix() if now_unix is None else now_unix
        with suppress(FileNotFoundError):
            return now_unix - try_twice((self.folder / LEDGER).stat).st_mtime
        return math.inf

    def is_locked(self) -> bool:
        """Return whether a command is submitting from this sweep, or running its points on this machine.

        False also for a sweep that this user may only read.
        """
        if (free := _shared_flock(self.folder)) is not None:
            return not free
        # Whether this lock is free can only be found out by taking it for a moment.
        try:
            with SoftFileLock(self.folder / SOFT_LOCK, timeout=0):
                return False
        except Timeout:
            return True

    def append(self, event: Event) -> None:
        """Write an event and wait until it is on the disk. Raises OSError, and then leaves nothing of it."""
        line = msgspec.json.encode(event) + b"\n"
        # In append mode every write goes to the end, wherever the file was read before.
        handle = open_plain(self.folder / LEDGER, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with os.fdopen(handle, "r+b", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            # A writer was killed in the last line, which must not spoil the next event.
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                written = out.write(line)
                if written != len(line):  # the disk became full within the line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / LEDGER))
                os.fsync(handle)
            except OSError as error:
                out.truncate(size)
                error.filename = str(self.folder / LEDGER)
                raise

    def events(self, kind: type[E]) -> list[E]:
        return [event for _, event in self._read_lines() if isinstance(event, kind)]

    def points(self, problems: list[str] | None = None) -> dict[int, PointRecord]:
        """Return every point by number. `problems` gets a sentence for each line and directory that does not fit."""
        points, skipped, gaps = self._replay()
        if problems is not None:
            problems += skipped
            if gaps:
                problems.append(f"{LEDGER} {list_some(gaps)}. {RERUN_REFUSES}: it could submit a point twice")
        return points

    def check_complete(self) -> None:
        """Raise UserError if the ledger lacks an attempt: what is unknown could be submitted a second time.

        Nothing is rebuilt from the other files of the sweep directory.
        """
        gaps, sweep_id = self._replay()[2], self.sweep.sweep_id
        for group, name in ((event.group, event.job_name) for event in self.events(Planned)):
            if name not in (None, job_name(group, sweep_id)):
                gaps.append(f"names job {name}, which is not of sweep {sweep_id}")
        if gaps:
            raise self.refusal(list_some(gaps))

    def refusal(self, contradiction: str) -> UserError:
        """Return the error of a command that would submit from a ledger that is not complete."""
        return UserError(
            f"{self.folder}: {sanitize(f'{LEDGER} {contradiction}')}. So a point could be submitted twice. Restore "
            f"{LEDGER} from a backup, or launch what is missing as a new sweep; `merge` reads the runs of this one"
        )

    def _replay(self) -> tuple[dict[int, PointRecord], list[str], list[str]]:
        """Apply all events. Returns the points, a sentence for each skipped line, and what contradicts the ledger.

        A line that its writer was killed in loses nothing: an event announces what has not happened yet, and an array
        whose `submitted` is missing is found by its job name.
        """
        # directories first: each of them is made after its event was written
        run_dirs = _run_dirs(self.folder)
        groups = {name for name in _names(self.folder / JOBS) if not name.startswith(".")}
        plans = {name for name in _names(self.folder) if _PLAN.fullmatch(name)}
        sweep = self.sweep
        points = {
            spec.point: PointRecord(
                num=spec.point, overrides=spec.overrides or [], gpu=spec.gpu, batch=spec.batch, site=spec.site
            )
            for spec in sweep.points
        }
        skipped, gaps, unrecorded = [], [], []
        for number, event in self._read_lines():
            if event is None:
                skipped.append(f"{self.folder / LEDGER}: line {number} is damaged and was skipped")
                continue
            try:
                _apply(event, points, sweep.sites)
            except LookupError:
                # For example `submitted` without `planned`, whose line is missing or damaged.
                unrecorded.append(f"the attempt of line {number}")
            except _ContradictionError as error:
                gaps.append(f"{error} in line {number}")
            if isinstance(event, Planned):
                groups.discard(event.group)
            if isinstance(event, Deferred):
                plans = {name for name in plans if Path(name).stem != Path(event.plan).stem}
        for record in points.values():  # results of an older attempt may arrive after a newer attempt was planned
            record.attempts.sort(key=lambda attempt: attempt.attempt)
        # What remains belongs to attempts that the ledger does not have.
        run_dirs -= {attempt.key for record in points.values() for attempt in record.attempts}
        unrecorded += [f"{point}/attempt-{attempt}" for point, attempt in sorted(run_dirs)]
        unrecorded += [f"{JOBS}/{group}" for group in sorted(groups)]
        unrecorded += [f"{name} (remove it if nobody has carried it away)" for name in sorted(plans)]
        if unrecorded:
            gaps.append(f"does not record {list_some(unrecorded)}")
        return points, skipped, [sanitize(gap) for gap in gaps]

    def _read_lines(self) -> Iterator[tuple[int, Event | None]]:
        """Yield line numbers and events; None for a line that is none."""
        try:
            lines = read_plain(self.folder / LEDGER).splitlines()
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, start=1):
            try:
                yield number, decode_record(line, Event)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield number, None


class _ContradictionError(Exception):
    """An event contradicts an earlier one."""


def _apply(event: Event, points: dict[int, PointRecord], sites: Container[str]) -> None:
    """Change the points as the event says.

    Raises LookupError for a point or site that the record lacks and an attempt that was never planned, and
    _ContradictionError for one that is planned twice or out of order, or gets a second job id.
    """

    def attempt(key: AttemptKey) -> Attempt:
        point, number = key
        return {attempt.attempt: attempt for attempt in points[point].attempts}[number]

    match event:
        case Deferred():
            for num in event.points:
                points[num].plan = event.plan
        case Planned():
            for task, spec in enumerate(event.attempts):
                record, last = points[spec.point], points[spec.point].last
                if event.site not in sites or spec.overrides is None or not (spec.attempt and spec.run_id):
                    raise LookupError(event.site)
                if any(known.attempt == spec.attempt for known in record.attempts):
                    raise _ContradictionError(f"plans {spec.subdir} a second time")
                # Results of an older attempt that was carried away may come back later.
                if last and last.attempt > spec.attempt and not event.carried:
                    raise _ContradictionError(f"plans {spec.subdir} after {last.subdir}")
                # The point no longer waits in a plan file, and the attempt may differ from the launch in its overrides.
                record.site, record.plan = event.site, None
                record.overrides, record.gpu, record.batch = spec.overrides, spec.gpu, spec.batch
                record.attempts.append(
                    msgspec.structs.replace(
                        spec,
                        site=event.site,
                        group=event.group,
                        planned_unix=event.t_unix,
                        job_name=event.job_name,
                        slurm_conf=event.slurm_conf,
                        task=task if spec.block is None else spec.block,
                    )
                )
        case Submitted():
            for key in event.attempts:
                # "123_%a" stands for a whole array; the ids of single jobs ("123_4", "pid:...") have no %a.
                known = attempt(key)
                job_id = event.job_id.replace("%a", str(known.task))
                cluster = event.cluster or known.cluster
                if known.job_id and (known.job_id, known.cluster) != (job_id, cluster):
                    other, job = queue_name(known.job_id, known.cluster), queue_name(job_id, cluster)
                    raise _ContradictionError(f"gives {known.subdir} job {job} beside {other}")
                known.job_id, known.cluster = job_id, cluster
        case Refused():
            for key in event.attempts:
                attempt(key).refused, attempt(key).refused_for_certain = event.message, event.certain
        case Cancelled():
            for key in event.attempts:
                attempt(key).cancelled = True


def job_name(group: str, sweep_id: str) -> str:
    """Return a Slurm job name that no other sweep on the cluster has."""
    return f"inpaint-{sweep_id}-{group}"


def _run_dirs(folder: Path) -> set[AttemptKey]:
    """Return the attempts that have a run directory."""
    points = [name for name in _names(folder) if name.isdecimal()]
    listings = zip(points, in_threads(lambda name: _names(folder / name), points), strict=True)
    paths = [f"{point}/{name}" for point, names in listings for name in names]
    return {(int(match[1]), int(match[2])) for path in paths if (match := _RUN_DIR.fullmatch(path))}


def _names(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except OSError:  # the state of its point is then unknown
        return []


# --- lock ----------------------------------------------------------------------------------------


def _wait_for_flock(handle: int, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BusyError(f"{folder}: another command {BUSY}; wait for it") from None
            time.sleep(POLL_S)
        else:
            os.set_inheritable(handle, True)
            return


def _existence_lock(folder: Path, timeout_s: float) -> AbstractContextManager[object]:
    """Take the lock of a file system without flock."""
    try:
        # It outlives a holder that is killed; filelock removes it only on the holder's own host.
        return SoftFileLock(folder / SOFT_LOCK).acquire(timeout=timeout_s, poll_interval=POLL_S)
    except Timeout:
        advice = f"wait for it, or remove {folder / SOFT_LOCK} if no command is running on any machine"
        raise BusyError(f"{folder}: another command {BUSY}; {advice}") from None


def _shared_flock(folder: Path) -> bool | None:
    """Try a shared lock for a moment: False if a command holds the lock, None if the file system has no flock."""
    try:
        with os.fdopen(open_plain(folder / LOCK)) as handle:
            # Shared, so that two commands that only ask do not take each other for the holder.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _FLOCK_MISSING:
            return None
    return True  # free, never locked, or not readable
