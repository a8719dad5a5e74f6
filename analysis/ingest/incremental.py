"""Reuse of the last merge into the same folder: run directories that have not changed are not read again.

A run directory whose files have the names, sizes and times that they had then is taken over as it was merged: its row,
its windows, what was skipped, and its files, which are hard-linked into the new dataset. In case of doubt it is read:
another version of this code, a dataset that was changed since, a file that is too young to tell.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

import msgspec
import polars as pl
import pyarrow as pa

from inpaint_bench.core import attempt_state, files, records, schema, workloads
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.seal import DIRECTORIES, WrittenFile, index_hashes, read_table

from . import untrusted
from .parts import SkippedFile


class DirectoryRecord(msgspec.Struct, kw_only=True):
    """What the merge made of one run directory, besides its row and windows."""

    folder: str
    fingerprint: str | None = None
    run_id: str | None = None
    content_hash: str | None = None
    left_out: bool = False  # with the reason among the skips; its run id is not merged
    row_counts: dict[str, int] = {}  # of each long table; empty: not merged, by its manifest or as a duplicate
    row_digests: dict[str, list[int]] = {}  # across_runs.row_digests of all tables
    files: list[WrittenFile] = []
    file_skips: list[SkippedFile] = []  # known from names and footers
    row_skips: list[SkippedFile] = []  # known from reading the rows


@dataclass(kw_only=True)
class MergeOutcome:
    """What becomes of one run directory in the dataset. A duplicate has a content hash, but no row."""

    record: DirectoryRecord
    reused: bool = False  # unchanged since the last merge
    row: dict[str, Any] | None = None  # of runs.parquet
    windows: list[dict[str, Any]] = field(default_factory=list)  # rows of windows.parquet


@cache
def code_version() -> str:
    """Return a digest of all that a merged row depends on besides its run directory: this code and its libraries."""
    digest = hashlib.sha256(f"{schema.SCHEMA_VERSION} {schema.PRODUCER} {pl.__version__} {pa.__version__}".encode())
    sources = [Path(str(module.__file__)) for module in (schema, records, files, attempt_state)]
    sources += sorted(Path(str(workloads.__file__)).parent.glob("*.py"))  # columns of the results
    sources += sorted((conf_dir() / "gpu").glob("*.yaml"))  # what a board is compared with
    # All of this package, although not every module affects a row: a needless re-read is cheap, a stale row is not.
    for path in (*sorted(Path(__file__).parents[1].rglob("*.py")), *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PreviousDataset:
    """An older dataset; empty where there is none that this version of the code wrote exactly so."""

    dataset: Path
    records: dict[str, DirectoryRecord] = field(default_factory=dict)  # by folder
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # by run id
    windows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by run id

    @classmethod
    def read(cls, dataset: Path) -> Self:
        """Read the index of a dataset. Anything missing or unexpected gives an empty one."""
        try:
            metadata = files.read_json(dataset / schema.DATASET)
            written = metadata if isinstance(metadata, dict) else {}
            # Other code could compute other rows, and a damaged index would be carried on.
            if written.get("analysis") != code_version() or written.get("index") != index_hashes(dataset):
                return cls(dataset=dataset)
            directories = records.read_record(dataset / DIRECTORIES, list[DirectoryRecord]) or []
            rows = read_table(dataset / schema.RUNS).rows_by_key("run_id", named=True, include_key=True, unique=True)
            windows = read_table(dataset / schema.RUN_WINDOWS).rows_by_key("run_id", named=True, include_key=True)
        except (OSError, ValueError, UserError, pl.exceptions.PolarsError):
            return cls(dataset=dataset)
        return cls(
            dataset=dataset, records={record.folder: record for record in directories}, rows=rows, windows=windows
        )

    def find(self, folder: Path, fingerprint: str | None) -> DirectoryRecord | None:
        """Return the record of a directory that has not changed since."""
        record = self.records.get(untrusted.path_text(folder))
        return record if record and fingerprint is not None and record.fingerprint == fingerprint else None

    def reuse(self, record: DirectoryRecord, target: Path, *, duplicate: bool) -> MergeOutcome | None:
        """Return the outcome of an unchanged directory, None where it must be read. Its files are linked into `target`.

        Of a duplicate, i.e. of a run id that another directory has already, only the content hash is needed.
        """
        if record.left_out:  # for a reason that lies in its files
            return None if duplicate else MergeOutcome(record=record, reused=True)
        # No row to take over: a duplicate is only compared by its hash, and without a run id there are only skips.
        if duplicate or record.run_id is None:
            record = msgspec.structs.replace(record, row_counts={}, files=[], row_skips=[])
            return MergeOutcome(record=record, reused=True)
        # Last time it was a duplicate and was not merged, or a file of it was changed or deleted in the dataset.
        if not record.row_counts or not all(file.is_untouched(self.dataset) for file in record.files):
            return None
        row = dict(self.rows[record.run_id])
        if (across := row["invalid_across_runs"]) is not None:  # beside runs that may be gone now
            own = row["invalid_reason"].removesuffix(across).removesuffix("; ") or None
            row |= {"invalid_across_runs": None, "invalid_reason": own, "valid": own is None}
        self._link(record.files, target)
        return MergeOutcome(record=record, reused=True, row=row, windows=self.windows.get(record.run_id, []))

    def _link(self, files: list[WrittenFile], target: Path) -> None:
        """Link files into the new dataset, or copy them where the file system has no hard links."""
        for name in (file.name for file in files):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.dataset / name, path)
            except FileNotFoundError:
                raise UserError("The older dataset was changed while it was merged into; merge again.") from None
            except OSError:
                shutil.copy2(self.dataset / name, path)
