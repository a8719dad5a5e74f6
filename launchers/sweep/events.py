"""The events of a sweep's ledger: one line of JSON each in `ledger.jsonl`, with its `kind`."""

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from .attempt import Attempt, AttemptKey, Cluster, Component

JobIds = Annotated[str, Meta(pattern=r"\A([0-9]{1,18}(_([0-9]{1,9}|%a))?|pid:[0-9]{1,10}@[A-Za-z0-9_.-]{1,255})\Z")]
UnixTime = Annotated[float, Meta(ge=0, lt=2**33)]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    t_unix: UnixTime = msgspec.field(default_factory=lambda: round(time.time(), 3))


class Planned(_Event, frozen=True, kw_only=True):
    """An array is about to be submitted. Written before sbatch is called."""

    group: Component
    job_name: Component | None  # in Slurm, unique: an array without a recorded id is found by it
    site: str
    partition: str | None = None
    carried: bool = False  # the sweep is from before 0.2: its results came here in an archive
    slurm_conf: Annotated[str, Meta(max_length=4096)] | None = None  # environment.shell_conf of the shell that submits
    attempts: list[Attempt]  # what they request, in order of array tasks


class Submitted(_Event, frozen=True, kw_only=True, omit_defaults=True):
    """The array, or the local job, was accepted."""

    group: Component
    job_id: JobIds  # "%a" stands for the array task; local: "pid:<process id>@<host>"
    attempts: list[AttemptKey]
    cluster: Cluster | None = None  # as sbatch named it; None: it named none


class Refused(_Event, frozen=True, kw_only=True):
    """The array was not accepted, or its sbatch call was not answered."""

    group: Component
    attempts: list[AttemptKey]
    message: str
    certain: bool = False  # True: no Slurm queue holds a job of it


class Cancelled(_Event, frozen=True, kw_only=True):
    """The user asked for these attempts to be stopped."""

    attempts: list[AttemptKey]


class Deferred(_Event, frozen=True, kw_only=True):
    """Points of a site that is out of reach wait in a plan file."""

    points: list[int]
    plan: Component  # file name, in the sweep directory


class Staged(_Event, frozen=True, kw_only=True):
    """The code was copied to a site that is reached over ssh."""

    site: str
    root: Annotated[str, Meta(pattern=r"\A/[\w.@:,=+/-]*\Z")]  # path of the sweep directory at the site
    code: Component  # name of the code snapshot there


Event = Planned | Submitted | Refused | Cancelled | Deferred | Staged
