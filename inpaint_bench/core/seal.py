"""What a merge wrote, so that a dataset whose files were changed since is refused.

dataset.json holds the SHA-256 of the small files and of itself; directories.json, one of them, holds size and SHA-256
of every other file.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import polars as pl

from . import files, records, schema
from .console import list_some
from .errors import UserError

DIRECTORIES = "directories.json"  # a Directory for each run directory that the merge saw
# Read back by a report.
INDEX = (DIRECTORIES, schema.RUNS, schema.RUN_WINDOWS, schema.SKIPPED)


class WrittenFile(msgspec.Struct, kw_only=True, frozen=True):
    """A file of the dataset as the merge wrote it."""

    name: str  # in the dataset
    size_bytes: int
    sha256: str

    @classmethod
    def read(cls, path: Path, dataset: Path) -> Self:
        """Describe a file that was just written."""
        name, digest = str(path.relative_to(dataset)), _file_sha256(path)
        return cls(name=name, size_bytes=path.stat().st_size, sha256=digest)

    def has_content(self, dataset: Path) -> bool:
        """Return whether the file has its content, which takes a read of all of it."""
        path = dataset / self.name
        try:
            return path.stat().st_size == self.size_bytes and _file_sha256(path) == self.sha256
        except OSError:
            return False


class Directory(msgspec.Struct):
    """A run directory that the merge saw, and what it wrote of it: nothing if the run is left out or a duplicate."""

    folder: str
    run_id: str | None
    files: list[WrittenFile]


def seal(metadata: dict[str, Any], dataset: Path) -> dict[str, Any]:
    """Return the content of dataset.json with the hashes of the files beside it and of itself."""
    metadata = {**metadata, "index": index_hashes(dataset)}
    return {**metadata, "seal": _digest(metadata)}


def read_runs(dataset: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    """Return dataset.json and the table of runs. Every command that uses a dataset begins here.

    Raises UserError for a folder without a dataset, one of another schema, and a small file that was changed since the
    merge.
    """
    if not dataset.is_dir():
        raise UserError(f"{dataset} does not exist; merge run directories into it first (`inpaint-bench merge`).")
    try:
        metadata = files.read_json(dataset / schema.DATASET)
    except (OSError, ValueError) as error:
        raise UserError(f"Dataset damaged: {error}. Merge again.") from None
    if not isinstance(metadata, dict):
        raise UserError(f"{dataset} is not a merged dataset (no {schema.DATASET}); use `inpaint-bench merge`.")
    if problem := schema.version_problem(metadata.get("schema_version")):
        raise UserError(f"{dataset}: {problem}. Merge again.")
    if "seal" not in metadata:
        raise UserError(f"{dataset} is not a complete dataset ({schema.DATASET} has no seal). Merge again.")
    refuse(dataset, index_changes(dataset, metadata))
    return metadata, read_table(dataset / schema.RUNS)


def read_table(path: Path) -> pl.DataFrame:
    """Read a Parquet file as a whole. Polars gets its bytes, because it takes a path for a pattern."""
    try:
        return pl.read_parquet(io.BytesIO(files.read_plain(path, follow_links=True, max_bytes=None)))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(f"{path.parent} is not a complete dataset ({path.name}: {error}). Merge again.") from None


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a Parquet file. Raises OSError: polars itself raises an error of its own for a full disk."""
    content = io.BytesIO()
    table.write_parquet(content)
    path.write_bytes(content.getvalue())


def refuse(dataset: Path, changes: Iterable[str]) -> None:
    """Raise UserError if there are changes."""
    if listed := list(changes):
        raise UserError(f"{dataset} was changed after its merge: {list_some(listed)}. Merge the run directories again.")


def index_hashes(dataset: Path) -> dict[str, str]:
    """Return the SHA-256 of the files of the index."""
    return {name: _file_sha256(dataset / name) for name in INDEX}


def index_changes(dataset: Path, metadata: dict[str, Any]) -> Iterator[str]:
    """Yield what was changed of dataset.json and of the small files since the merge."""
    if metadata["seal"] != _digest(metadata):
        yield f"{schema.DATASET} was edited"
        return
    try:
        hashes = index_hashes(dataset)
    except OSError as error:
        yield f"{Path(str(error.filename)).name} cannot be read"
        return
    known = index if isinstance(index := metadata.get("index"), dict) else {}
    yield from (f"{name} was edited" for name, digest in hashes.items() if known.get(name) != digest)


def table_changes(dataset: Path) -> Iterator[str]:
    """Yield what was changed since the merge of the files that directories.json lists."""
    try:
        directories = records.read_record(dataset / DIRECTORIES, list[Directory]) or []
    except ValueError:
        yield f"{DIRECTORIES} is damaged"
        return
    listed = {file.name: file for record in directories for file in record.files}
    folders = (dataset / name for name in (*schema.TABLES, schema.SAMPLE_GRIDS))
    present = {str(path.relative_to(dataset)) for folder in folders for path in folder.rglob("*") if not path.is_dir()}
    yield from (f"{name} is missing" for name in sorted(listed.keys() - present))
    yield from (f"{name} was added" for name in sorted(present - listed.keys()))
    kept = sorted(listed.keys() & present)
    yield from (f"{name} was edited" for name in kept if not listed[name].has_content(dataset))


def _digest(metadata: dict[str, Any]) -> str:
    content = {name: value for name, value in metadata.items() if name != "seal"}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()


def _file_sha256(path: Path) -> str:
    with os.fdopen(files.open_plain(path, follow_links=True), "rb") as raw:
        return hashlib.file_digest(raw, "sha256").hexdigest()
