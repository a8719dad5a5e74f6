"""What the last merge into the same folder left that need not be read again.

A run directory whose files have the names, sizes and times that they had then is taken over as it was merged:
its row, its windows, what was skipped, and its files, which are linked into the new dataset. Anything in doubt
is read: another version of this code, a dataset that somebody changed, a file that is too young to tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import polars as pl
import pyarrow as pa

from inpaint_bench.core import attempt_state, files, schema

from .parts import Skip

DIRECTORIES = "directories.parquet"  # one row per run directory that the merge saw
WINDOWS = "windows.parquet"
INDEX = (DIRECTORIES, schema.RUNS, WINDOWS)  # read back by the next merge
SCHEMA = {
    **dict.fromkeys(("folder", "fingerprint", "run_id", "content_hash"), pl.String),
    "merged": pl.Boolean,  # false: it has no usable manifest, or is the second one of its id
    **dict.fromkeys(("rows", "files", "skips", "late"), pl.String),  # JSON
}


@dataclass(kw_only=True)
class Outcome:
    """What became of one run directory. A twin of an earlier one has a hash, but no row."""

    folder: Path
    fingerprint: str | None = None
    run_id: str | None = None
    hash: str | None = None
    row: dict[str, Any] | None = None  # of runs.parquet
    windows: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)  # of each long table
    files: list[tuple[str, int, int]] = field(default_factory=list)  # name in the dataset, size, time in ns
    skips: list[Skip] = field(default_factory=list)  # known from names and footers
    late: list[Skip] = field(default_factory=list)  # known from reading its rows

    def entry(self) -> dict[str, Any]:
        """Its row of `directories.parquet`."""
        return {
            "folder": str(self.folder),
            "fingerprint": self.fingerprint,
            "run_id": self.run_id,
            "content_hash": self.hash,
            "merged": self.row is not None,
            "rows": json.dumps(self.rows),
            "files": json.dumps(self.files),
            "skips": json.dumps([asdict(skip) for skip in self.skips]),
            "late": json.dumps([asdict(skip) for skip in self.late]),
        }


@cache
def version() -> str:
    """What a merged row depends on besides its run directory: the code, and the libraries that write the files."""
    digest = hashlib.sha256(f"{schema.SCHEMA_VERSION} {schema.PRODUCER} {pl.__version__} {pa.__version__}".encode())
    sources = [Path(str(module.__file__)) for module in (schema, files, attempt_state)]
    for path in (*sorted(Path(__file__).parents[1].rglob("*.py")), *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def index_hashes(dataset: Path) -> dict[str, str]:
    """SHA-256 of the files that the next merge reads back."""
    return {name: hashlib.sha256((dataset / name).read_bytes()).hexdigest() for name in INDEX}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An older dataset; empty where there is none that this code wrote just so."""

    dataset: Path
    directories: pl.DataFrame
    runs: pl.DataFrame
    windows: pl.DataFrame
    at: dict[str, int]  # row of `directories` by folder
    run_at: dict[str, int]  # row of `runs` by run id
    windows_at: dict[str, tuple[int, int]]  # first row of `windows` and how many, by run id

    @classmethod
    def read(cls, dataset: Path) -> Self:
        try:
            account = files.read_json(dataset / schema.DATASET)
            written = account if isinstance(account, dict) else {}
            if written.get("analysis") == version() and written.get("index") == index_hashes(dataset):
                return cls._of(dataset, *(pl.read_parquet(dataset / name) for name in INDEX))
        except (OSError, ValueError, pl.exceptions.PolarsError):
            pass
        return cls._of(dataset, pl.DataFrame(schema=SCHEMA), *(pl.DataFrame(schema={"run_id": pl.String}),) * 2)

    @classmethod
    def _of(cls, dataset: Path, directories: pl.DataFrame, runs: pl.DataFrame, windows: pl.DataFrame) -> Self:
        windows_at: dict[str, tuple[int, int]] = {}
        for row, run_id in enumerate(windows["run_id"]):
            first, count = windows_at.get(run_id, (row, 0))
            windows_at[run_id] = (first, count + 1)
        return cls(
            dataset=dataset,
            directories=directories,
            runs=runs,
            windows=windows,
            at={folder: row for row, folder in enumerate(directories["folder"])},
            run_at={run_id: row for row, run_id in enumerate(runs["run_id"])},
            windows_at=windows_at,
        )

    def run_id(self, folder: Path, fingerprint: str | None) -> tuple[bool, str | None]:
        """Whether the directory is as it was, and the run id that it had."""
        entry = self._entry(folder, fingerprint)
        return entry is not None, entry["run_id"] if entry else None

    def outcome(self, folder: Path, fingerprint: str | None, *, twin: bool) -> Outcome | None:
        """What became of an unchanged directory; None where it must be read. `twin`: only its hash is asked for."""
        entry = self._entry(folder, fingerprint)
        if entry is None:
            return None
        found = Outcome(folder=folder, fingerprint=fingerprint, run_id=entry["run_id"], hash=entry["content_hash"])
        found.skips = [Skip(**skip) for skip in json.loads(entry["skips"])]
        if twin or found.run_id is None:
            return found
        if not entry["merged"]:
            return None
        found.files = [(name, size, time_ns) for name, size, time_ns in json.loads(entry["files"])]
        if not all(self._whole(*one) for one in found.files):
            return None
        found.row = self.runs.row(self.run_at[found.run_id], named=True)
        first, count = self.windows_at.get(found.run_id, (0, 0))
        found.windows = self.windows.slice(first, count).to_dicts()
        found.rows = json.loads(entry["rows"])
        found.late = [Skip(**skip) for skip in json.loads(entry["late"])]
        return found

    def _entry(self, folder: Path, fingerprint: str | None) -> dict[str, Any] | None:
        row = self.at.get(str(folder))
        if row is None or fingerprint is None:
            return None
        entry = self.directories.row(row, named=True)
        return entry if entry["fingerprint"] == fingerprint else None

    def _whole(self, name: str, size: int, time_ns: int) -> bool:
        try:
            found = (self.dataset / name).stat()
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (size, time_ns)

    def link(self, outcome: Outcome, into: Path) -> None:
        """The outcome's files in the new dataset: the same files, or copies where the file system has no links."""
        for name, _, _ in outcome.files:
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.dataset / name, target)
            except OSError:
                shutil.copy2(self.dataset / name, target)
