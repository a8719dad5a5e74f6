"""Requests to the agent at a site and its replies: JSON, with every field checked when it is decoded.

Names, job ids and paths end up in the ledger and in file names here, so they may only hold characters that
mean nothing to a path or a shell.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState
from inpaint_bench.core.records import to_record
from launchers.sweep.ledger import Attempt

MARKER = b"inpaint-bench: "  # begins the line of a reply: a login shell may print lines of its own
ARCHIVE_FOLLOWS = MARKER + b"archive\n"
_COMPONENT = r"\.*[A-Za-z0-9_+=,@-][A-Za-z0-9_.+=,@-]*"  # of a path: neither empty nor only dots

Number = Annotated[int, Meta(ge=0, lt=10**7)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.:@%+-]{1,200}\Z")]
FolderName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,200}\Z")]
ArrayTask = Annotated[str, Meta(pattern=r"\A[0-9]{1,18}_[0-9]{1,9}\Z")]
JobId = Annotated[str, Meta(pattern=r"\A([0-9]{1,18}_[0-9]{1,9}|pid:[0-9]{1,10}@[A-Za-z0-9_.-]{1,200})\Z")]
RelativePath = Annotated[str, Meta(max_length=240, pattern=rf"\A({_COMPONENT}/)*{_COMPONENT}\Z")]


class Reply(Struct, kw_only=True):
    """Envelope of every reply."""

    error: str | None = None
    result: Raw = Raw(b"null")


class SubmitReply(Struct, kw_only=True):
    """Outcome of each requested point, by run id: a job, or the reason why there is none."""

    jobs: dict[str, ArrayTask] = {}
    refused: dict[str, str] = {}


class CancelRequest(Struct, kw_only=True):
    """Attempts to be cancelled; the reply is a list of errors."""

    attempts: list[tuple[Number, Number]]
    timeout_s: float  # how long to wait for a command at the site that is still submitting


class ResultFile(Struct, kw_only=True, frozen=True):
    """A file that may be copied, as it was when it was listed."""

    path: RelativePath  # in the sweep directory that it is copied to
    size: Annotated[int, Meta(ge=0)]
    mtime_s: Annotated[int, Meta(ge=0, lt=10**11)]  # whole seconds, as rsync compares them


class AttemptReply(Struct, kw_only=True):
    """An attempt as the ledger at the site records it, with the sources of its state or its files."""

    point: Number
    attempt: Number
    run_id: Name
    site: Name
    group: FolderName
    job_name: Name | None
    job_id: JobId | None
    refused: str | None
    cancelled: bool
    is_open: bool = False  # it has not ended
    scheduler: SchedulerState | None = None  # None: Slurm did not answer
    artifacts: RunArtifacts | None = None
    files: list[ResultFile] = []

    @classmethod
    def of(cls, attempt: Attempt, **content: Any) -> AttemptReply:
        """Return what this ledger records of an attempt, with `content` for the other fields."""
        names = [name for name in cls.__struct_fields__ if hasattr(attempt, name)]
        return to_record({name: getattr(attempt, name) for name in names} | content, cls)

    @property
    def key(self) -> tuple[int, int]:
        """Return point and attempt."""
        return self.point, self.attempt

    @property
    def in_slurm(self) -> bool:
        """Return False for a process of the site's machine: `cancel` would look for its id on this one."""
        return not (self.job_id or "").startswith("pid:")


class SweepReply(Struct, kw_only=True):
    """A sweep directory at a site; also the first member of an archive of results."""

    sweep_id: str | None  # None: there is no sweep (any more)
    submitting: bool = False  # a command there holds the sweep's lock
    squeue: str = ""  # "ok", or why it did not answer
    sacct: str = ""
    attempts: list[AttemptReply] = []
    skipped: list[str] = []  # what is not copied, a sentence each
