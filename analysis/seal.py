"""What a merge wrote, so that a report of files that were changed since is refused.

dataset.json holds the SHA-256 of the small files and of itself; directories.json, one of them, holds size, modification
time and SHA-256 of every other file. The content decides: copying a dataset changes times, and an edit may keep them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core import records, schema
from inpaint_bench.core.console import list_some
from inpaint_bench.core.errors import UserError

from .columns import DEFINITIONS, SAMPLE_GRIDS
from .ingest.incremental import DIRECTORIES, INDEX, DirectoryRecord, index_hashes


def seal(metadata: dict[str, Any], dataset: Path) -> dict[str, Any]:
    """Return the content of dataset.json with the hashes of the files beside it and of itself."""
    metadata = {**metadata, "definitions": DEFINITIONS, "index": index_hashes(dataset)}
    return {**metadata, "seal": _digest(metadata)}


def check(dataset: Path, metadata: dict[str, Any]) -> list[str]:
    """Return what a reader has to know of how the dataset was merged: nothing, if by this code.

    Raises UserError where a file was changed, added or removed since.
    """
    notes = []
    if "seal" not in metadata:
        notes.append("Merged by older code, which did not record what it wrote: changes since cannot be seen.")
    elif found := list(changes(dataset, metadata)):
        raise UserError(f"{dataset} was changed after its merge: {list_some(found)}. Merge the run directories again.")
    return [*notes, *filter(None, [definitions_note(metadata)])]


def definitions_note(metadata: dict[str, Any]) -> str:
    """Return a sentence on the columns that the merge defined differently, empty if there are none."""
    definitions = metadata.get("definitions")
    known = definitions if isinstance(definitions, dict) else {}
    other = [name for name, version in DEFINITIONS.items() if known.get(name, 1) != version]
    verb = "was" if len(other) == 1 else "were"
    return (
        f"Merged by other code, in which {', '.join(other)} {verb} defined differently; merge again." if other else ""
    )


def files_of(dataset: Path) -> list[str]:
    """Return the names of the sealed files, without dataset.json."""
    directories = records.read_record(dataset / DIRECTORIES, list[DirectoryRecord]) or []
    return [*INDEX, *(file.name for record in directories for file in record.files)]


def changes(dataset: Path, metadata: dict[str, Any]) -> Iterator[str]:
    """Yield what was changed in a sealed dataset since its merge."""
    if metadata["seal"] != _digest(metadata):
        yield f"{schema.DATASET} was edited"
        return
    try:
        hashes = index_hashes(dataset)
    except OSError as error:
        yield f"{Path(str(error.filename)).name} cannot be read"
        return
    index = metadata.get("index")
    edited = [name for name, digest in hashes.items() if not isinstance(index, dict) or index.get(name) != digest]
    yield from (f"{name} was edited" for name in edited)
    if DIRECTORIES in edited:
        return
    try:
        directories = records.read_record(dataset / DIRECTORIES, list[DirectoryRecord]) or []
    except ValueError:
        yield f"{DIRECTORIES} is damaged"
        return
    listed = {file.name: file for record in directories for file in record.files}
    folders = (dataset / name for name in (*schema.TABLES, SAMPLE_GRIDS))
    present = {str(path.relative_to(dataset)) for folder in folders for path in folder.rglob("*") if not path.is_dir()}
    yield from (f"{name} is missing" for name in sorted(listed.keys() - present))
    yield from (f"{name} was added" for name in sorted(present - listed.keys()))
    kept = sorted(listed.keys() & present)
    yield from (f"{name} was edited" for name in kept if not listed[name].has_content(dataset))


def _digest(metadata: dict[str, Any]) -> str:
    content = {name: value for name, value in metadata.items() if name != "seal"}
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
