"""What a sweep directory remembers of itself: `sweep.json`, and `ledger.jsonl`, which only grows.

A record is on disk before what it announces happens: `planned` before sbatch is called, `submitted` right
after. So a sweep whose launcher died can still be told apart from one that was never sent.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import BooleanNode, OmegaConf
from omegaconf.errors import ValidationError

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.schema import LEDGER, MULTIRUN, SCHEMA_VERSION, SWEEP

from . import lock
from . import run_dir_facts as found
from .launch_context import Surroundings
from .sweep_record import wrong

BROUGHT = (
    "ssh",
    "bundle",
)  # ways by which run directories come from elsewhere: what they ask for is not sent from here


@dataclass(kw_only=True)
class Attempt:
    """One try at a point, as the ledger tells it."""

    point: int
    attempt: int
    run_id: str
    site: str
    group: str
    planned_unix: float
    job_name: str | None = None  # Slurm's, unique: an array whose id was never written down is found by it
    task: int = 0  # place in the array
    job_id: str | None = None  # Slurm: "<array>_<task>"; local: "pid:<n>@<host>"
    refused: str | None = None  # what sbatch said
    refused_for_certain: bool = False  # no job of it is in any queue
    cancelled: bool = False
    carried: bool = False  # made elsewhere from a plan: only what was brought back tells of it

    @property
    def subdir(self) -> str:
        return f"{self.point}/attempt-{self.attempt}"


@dataclass(kw_only=True)
class PointRecord:
    """A point of the sweep with its attempts, oldest first. No attempt: it waits in a plan."""

    num: int
    overrides: list[str]
    gpu: str | None
    batch: int | None
    site: str
    plan: str | None = None  # plan file, where no reachable site served it
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


class Ledger:
    """`instead`: what stands for `sweep.json` where there is none (any more)."""

    def __init__(self, folder: Path, instead: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self._instead = instead

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """An existing sweep. Raises UserError where `folder` is none, or none yet."""
        if (folder / SWEEP).is_file():
            return cls(folder)
        if (folder / MULTIRUN).is_file() and not _was_dry(folder / MULTIRUN):
            raise UserError(_record_is_gone(folder) if found.attempts(folder) else nothing_sent(folder))
        why = f"no {SWEEP}; a dry run leaves only scripts" if folder.is_dir() else "no such folder"
        why = "it is a file" if folder.is_file() else why
        raise UserError(f"{folder}: not a sweep directory ({why}); give the folder that `launch -m` printed")

    @property
    def sweep(self) -> dict[str, Any]:
        if self._instead is not None and not (self.folder / SWEEP).is_file():
            return self._instead
        try:
            value = read_json(self.folder / SWEEP)
        except (ValueError, OSError) as error:
            raise UserError(f"{error}; what the runs measured is untouched, and `merge` reads it without") from None
        if why := wrong(value):
            raise UserError(f"{self.folder / SWEEP}: not a sweep's record ({why}); `merge` reads the runs without it")
        assert isinstance(value, dict)
        return value

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings.recorded(self.sweep.get("surroundings"))

    def create(self, **content: Any) -> None:
        """What a study sweeps beside the command line is kept too: a later launch here overwrites Hydra's record."""
        head = {"schema_version": SCHEMA_VERSION, "sites": {}, "points": [], "overrides": []}
        replace_json(self.folder / SWEEP, head | {"params": sweeper_params(self.folder)} | content)

    def know(self, points: list[dict[str, Any]], sites: dict[str, Any]) -> None:
        """Add points not yet known, and the sites as they are now."""
        sweep = self.sweep
        known = {entry["point"] for entry in sweep["points"]}
        sweep["points"] += [entry for entry in points if entry["point"] not in known]
        sweep["sites"] |= sites
        replace_json(self.folder / SWEEP, sweep)

    def locked(self, *, patience_s: float = lock.GLANCE_S) -> AbstractContextManager[None]:
        """One submitter at a time: a second one is told so, and submits nothing. Raises BusyError."""
        return lock.held(self.folder, patience_s=patience_s)

    def busy(self) -> bool:
        """Somebody is submitting from this sweep, or running its points on this machine, as far as one may see."""
        return lock.busy(self.folder)

    def append(self, kind: str, **content: Any) -> None:
        line = json.dumps({"t_unix": round(time.time(), 3), "kind": kind, **content}).encode()
        with (self.folder / LEDGER).open("a+b") as out:
            # a writer that was killed in mid-line must not spoil the next record
            if out.tell() and not _ends_line(out):
                line = b"\n" + line
            out.write(line + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def points(self, problems: list[str] | None = None) -> dict[int, PointRecord]:
        """Every point by number. A line that cannot be read (its writer was killed) is left out; `problems` hear of it.

        Nothing is lost by it: what a record announces happens after it was written, an array whose `submitted` is
        missing is found by its job name, and an attempt of which no line tells by its run directory.
        """
        there = found.attempts(self.folder)  # before the ledger is read, which tells of each before it is begun
        sweep = self.sweep
        points = {
            entry["point"]: PointRecord(
                num=entry["point"],
                overrides=entry["overrides"],
                gpu=entry["gpu"],
                batch=entry["batch"],
                site=entry["site"],
            )
            for entry in sweep["points"]
        }
        for number, line in enumerate(self._lines(), start=1):
            try:
                self._apply(json.loads(line), points, sweep["sweep_id"])
            except (ValueError, LookupError, TypeError, StopIteration):
                if problems is not None:
                    where = f"{self.folder / LEDGER}: line {number}"
                    problems.append(f"{where} cannot be read ({len(line)} bytes) and was left out")
        adopted = sum(self._adopt(record, there.get(record.num, set()), sweep) for record in points.values())
        if adopted and problems is not None:
            problems.append(
                f"{self.folder / LEDGER} does not tell of {pluralize(adopted, 'attempt')} whose run directories do"
            )
        for record in points.values():  # an attempt that was made at its site may be heard of after a later one
            record.attempts.sort(key=lambda attempt: attempt.attempt)
        return points

    def _adopt(self, record: PointRecord, there: set[int], sweep: dict[str, Any]) -> int:
        """Attempts that have a run directory and no `planned`. Returns how many those are."""
        known = {attempt.attempt: attempt for attempt in record.attempts}
        strange = sorted(k for k in there if k not in known or known[k].run_id == found.UNKNOWN)
        for k in strange:
            trace = found.Trace.of(self.folder, record.num, k)
            attempt = known.get(k) or Attempt(
                point=record.num,
                attempt=k,
                run_id=trace.run_id,
                site=trace.site if trace.site and trace.site in sweep["sites"] else record.site,
                group=trace.group,
                planned_unix=trace.started_unix,
                job_name=None if trace.group == found.UNKNOWN else job_name(trace.group, sweep["sweep_id"]),
                job_id=trace.job_id,
            )
            attempt.run_id = trace.run_id
            if k not in known:
                record.attempts.append(attempt)
            ours = sweep["sites"].get(attempt.site, {}).get("connect", {}).get("method") not in BROUGHT
            if ours and trace.overrides is not None and k >= max(known, default=0):
                record.overrides, record.plan = list(trace.overrides), None
        return len(strange)

    def _apply(self, record: dict[str, Any], points: dict[int, PointRecord], sweep_id: str) -> None:
        match record["kind"]:
            case "elsewhere":
                for num in record["points"]:
                    points[num].plan = record["plan"]
            case "planned":
                for task, (num, attempt, run_id) in enumerate(record["points"]):
                    asked = record["asked"][task]
                    points[num].plan = None
                    points[num].site, points[num].overrides = record["site"], asked["overrides"]
                    points[num].gpu, points[num].batch = asked["gpu"], asked["batch"]
                    points[num].attempts.append(
                        Attempt(
                            point=num,
                            attempt=attempt,
                            run_id=run_id,
                            site=record["site"],
                            group=record["group"],
                            planned_unix=record["t_unix"],
                            job_name=record["job_name"],
                            task=task,
                            carried=record.get("carried", False),
                        )
                    )
            case "submitted":
                for task, (num, attempt) in enumerate(record["points"]):
                    if not any(known.attempt == attempt for known in points[num].attempts):  # its `planned` is lost
                        points[num].plan = None
                        points[num].attempts.append(
                            Attempt(
                                point=num,
                                attempt=attempt,
                                run_id=found.UNKNOWN,
                                site=points[num].site,
                                group=record["group"],
                                planned_unix=record["t_unix"],
                                job_name=job_name(record["group"], sweep_id),
                                task=task,
                            )
                        )
                    job_id = record["job_id"].replace("%a", str(task))
                    self._attempt(points, num, attempt).job_id = job_id
            case "refused":
                for num, attempt in record["points"]:
                    mine = self._attempt(points, num, attempt)
                    mine.refused, mine.refused_for_certain = record["message"], record.get("certain") is True
            case "cancelled":
                for num, attempt in record["points"]:
                    self._attempt(points, num, attempt).cancelled = True

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Records that say nothing of a point's attempts, oldest first; what cannot be read is left out."""
        found = []
        for line in self._lines():
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and record.get("kind") == kind:
                    found.append(record)
        return found

    @staticmethod
    def _attempt(points: dict[int, PointRecord], num: int, attempt: int) -> Attempt:
        return next(a for a in points[num].attempts if a.attempt == attempt)

    def _lines(self) -> list[bytes]:
        try:
            return (self.folder / LEDGER).read_bytes().splitlines()
        except FileNotFoundError:
            return []


def job_name(group: str, sweep_id: str) -> str:
    """Unique on the cluster, so that no tool that selects by name takes one sweep for another."""
    return f"inpaint-{sweep_id}-{group}"


def nothing_sent(folder: Path) -> str:
    """Of a launch that composes its points, or was ended while it did."""
    return (
        f"{folder}: its launch has not written down or sent a single point. If it does not run any more, it was ended "
        f"before that, and `inpaint-bench rerun {shlex.quote(str(folder))}` sends all of them"
    )


def _record_is_gone(folder: Path) -> str:
    again = f"`inpaint-bench rerun {shlex.quote(str(folder))}`"
    return f"{folder}: {SWEEP} is gone; {again} writes it again and sends what no run directory tells of"


def _was_dry(record: Path) -> bool:
    """By its command line, however it says so there."""
    for override in OmegaConf.select(OmegaConf.load(record), "hydra.overrides.task") or []:
        key, _, value = str(override).partition("=")
        if key.strip().lstrip("+") == "dry_run":
            with suppress(ValidationError):
                return bool(BooleanNode(None).validate_and_convert(value.strip()))
    return False


def sweeper_params(folder: Path) -> list[str]:
    """`hydra.sweeper.params` of Hydra's record, as overrides: the recipes and seeds of a study. A plan has none."""
    record = folder / MULTIRUN
    if not record.is_file():
        return []
    register()  # the record holds a study's recipes as calls of our resolvers
    params = OmegaConf.select(OmegaConf.load(record), "hydra.sweeper.params") or {}
    return [f"{key}={value}" for key, value in params.items()]


def _ends_line(handle: BinaryIO) -> bool:
    handle.seek(-1, os.SEEK_END)
    return handle.read(1) == b"\n"
