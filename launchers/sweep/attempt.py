"""One record of an attempt: as it was planned, submitted and reported. The sweep's files and messages embed it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState

AttemptKey = tuple[int, int]  # point, attempt

# What becomes an argument of a command or a part of a path has only characters that mean nothing to either. A record
# or a line of the ledger with another value is damaged.
Component = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,254}\Z")]
Number = Annotated[int, Meta(ge=0, lt=10**7)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.:@%+-]{1,200}\Z")]
JobId = Annotated[str, Meta(pattern=r"\A([0-9]{1,18}_[0-9]{1,9}|pid:[0-9]{1,10}@[A-Za-z0-9_.-]{1,200})\Z")]
Cluster = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")]


def queue_name(site: str, cluster: str | None) -> str:
    """Return a site's name, with the cluster if Slurm's commands have to name one."""
    return f"{site} (cluster {cluster})" if cluster else site


class Attempt(Struct, kw_only=True, omit_defaults=True):
    """One execution of a point; attempt 0 is the point as it was launched."""

    point: Number
    # what it requests from the site
    overrides: list[str] | None = None  # None: left out of the reply of a site
    gpu: str | None = None
    batch: int | str | None = None
    site: str
    total_time_min: int | None = None  # time limit for all starts of its job
    service_units: float | None = None  # at that limit; None: the site's charging rule is not known
    likely_min: float | None = None  # likely time of its run, as predicted; None: not predicted
    attempt: Number = 0
    run_id: Name = ""
    # what the events after its plan say
    group: Component = ""
    planned_unix: float = 0.0
    job_name: Component | None = None  # in Slurm, unique: an array without a recorded id is found by it
    slurm_conf: str | None = None  # by which the shell chose the cluster; None: it did not, or that is not recorded
    task: int = 0  # index in the array
    block: Number | None = None  # the same, of a task that runs several points one after another; None: of its own
    job_id: JobId | None = None  # Slurm: "<array>_<task>"; local: "pid:<process id>@<host>"
    cluster: Cluster | None = None  # cluster that sbatch was sent to or named (`-M`); None: the local one
    refused: str | None = None  # why it was not submitted
    refused_for_certain: bool = False  # no Slurm queue holds a job of it
    cancelled: bool = False
    # what a site over ssh reports
    is_open: bool = False  # it has not ended
    scheduler: SchedulerState | None = None  # None: Slurm did not answer
    artifacts: RunArtifacts | None = None

    @property
    def key(self) -> AttemptKey:
        return self.point, self.attempt

    @property
    def subdir(self) -> str:
        """Return the run directory below the sweep directory."""
        return f"{self.point}/attempt-{self.attempt}"

    @property
    def queue(self) -> str:
        """Return the name of the queue that has its job: job ids of two clusters may coincide."""
        return queue_name(self.site, self.cluster)

    @property
    def is_unconfirmed(self) -> bool:
        """Return whether its sbatch call may have submitted it, as far as is known."""
        return self.job_id is None and not self.refused_for_certain

    @property
    def in_slurm(self) -> bool:
        """Return False for a process of the site's machine: `cancel` would look for its id on this one."""
        return not (self.job_id or "").startswith("pid:")

    def reported(self, **content: Any) -> Attempt:
        """Return it for a reply: with `content`, and without what it requests, which the asking machine knows."""
        return structs.replace(self, overrides=None, gpu=None, batch=None, **content)
