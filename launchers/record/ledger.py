"""What a sweep directory remembers of itself: `sweep.json`, and `ledger.jsonl`, which only grows.

A record is on disk before what it announces happens: `planned` before sbatch is called, `submitted` right
after. So a sweep whose launcher died can still be told apart from one that was never sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from omegaconf import OmegaConf

from inpaint_bench.contract import LEDGER, MULTIRUN, SCHEMA_VERSION, SWEEP
from inpaint_bench.errors import UserError
from inpaint_bench.files import read_json, replace_json
from inpaint_bench.schema import register


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
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> Ledger:
        """An existing sweep. Raises UserError where `folder` is none."""
        if not (folder / SWEEP).is_file():
            why = f"no {SWEEP}; a dry run leaves only scripts" if folder.is_dir() else "no such folder"
            raise UserError(f"{folder}: not a sweep directory ({why}); give the folder that `launch -m` printed")
        return cls(folder)

    @property
    def sweep(self) -> dict[str, Any]:
        try:
            value = read_json(self.folder / SWEEP)
        except (ValueError, OSError) as error:
            raise UserError(f"{error}; what the runs measured is untouched, and `merge` reads it without") from None
        if not isinstance(value, dict) or not {"sites", "points"} <= value.keys():
            raise UserError(f"{self.folder / SWEEP}: not a sweep's record (it needs sites and points)")
        return value

    def create(self, **content: Any) -> None:
        """What a study sweeps beside the command line is kept too: a later launch here overwrites Hydra's record."""
        head = {"schema_version": SCHEMA_VERSION, "sites": {}, "points": [], "params": sweeper_params(self.folder)}
        replace_json(self.folder / SWEEP, head | content)

    def know(self, points: list[dict[str, Any]], sites: dict[str, Any]) -> None:
        """Add points not yet known, and the sites as they are now."""
        sweep = self.sweep
        known = {entry["point"] for entry in sweep["points"]}
        sweep["points"] += [entry for entry in points if entry["point"] not in known]
        sweep["sites"] |= sites
        replace_json(self.folder / SWEEP, sweep)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One submitter at a time: a second one is told so, and submits nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.folder}: another command is submitting from this sweep or running its points here; "
                    "wait for it"
                ) from None
            yield

    def busy(self) -> bool:
        """Somebody is submitting from this sweep, or running its points on this machine, as far as one may see."""
        try:
            with self.locked():
                return False
        except UserError:
            return True
        except OSError:  # somebody else's sweep, which one may only read
            return False

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

        Nothing is lost by it: what a record announces happens after it was written, and an array whose
        `submitted` is missing is found by its job name.
        """
        points = {
            entry["point"]: PointRecord(
                num=entry["point"],
                overrides=entry["overrides"],
                gpu=entry["gpu"],
                batch=entry["batch"],
                site=entry["site"],
            )
            for entry in self.sweep["points"]
        }
        for number, line in enumerate(self._lines(), start=1):
            try:
                self._apply(json.loads(line), points)
            except (ValueError, LookupError, TypeError, StopIteration):
                if problems is not None:
                    where = f"{self.folder / LEDGER}: line {number}"
                    problems.append(f"{where} cannot be read ({len(line)} bytes) and was left out")
        for record in points.values():  # an attempt that was made at its site may be heard of after a later one
            record.attempts.sort(key=lambda attempt: attempt.attempt)
        return points

    def _apply(self, record: dict[str, Any], points: dict[int, PointRecord]) -> None:
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
                    job_id = record["job_id"].replace("%a", str(task))
                    self._attempt(points, num, attempt).job_id = job_id
            case "refused":
                for num, attempt in record["points"]:
                    self._attempt(points, num, attempt).refused = record["message"]
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
