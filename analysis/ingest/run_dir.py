"""Find, fingerprint and read run directories under any number of roots. Nothing is skipped silently."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from inpaint_bench.core import files, schema
from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState, resolve_attempt_state
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Manifest, Window, read_record
from inpaint_bench.core.schema import PointState, Reason, Status

from .parts import SkippedFile, TableFiles, open_table, skipped, version_problem

MAX_IMAGE_BYTES = 4 * 2**20  # of a run's grid of sample images
_PNG = b"\x89PNG\r\n\x1a\n"
SETTLED_S = 2  # some file systems keep whole seconds: a younger file may change and look the same


@dataclass(kw_only=True)
class Run:
    """One attempt on disk. The content hash covers the bytes of everything that would be merged."""

    folder: Path
    manifest: Manifest
    windows: list[Window]
    tables: dict[str, TableFiles] = field(default_factory=dict)
    sample_grid: Path | None = None
    content_hash: str = ""


def find_run_dirs(roots: list[Path]) -> Iterator[Path]:
    """Yield run directories below the roots, in order of path; never one inside another, each folder once.

    A folder counts when it has a manifest or a folder of parts. Hidden folders, merged datasets and the code snapshot
    of a sweep are not entered.
    """
    visited: set[Path] = set()
    for root in roots:
        # os.walk enters what is left in `folders`: clearing it ends the descent.
        for path, folders, names in os.walk(root):
            folder = Path(path)
            if schema.DATASET in names:
                folders.clear()
            elif schema.MANIFEST in names or any(table in folders for table in schema.TABLES):
                folders.clear()
                # Roots may overlap or be linked to each other.
                if folder.resolve() not in visited:
                    visited.add(folder.resolve())
                    yield folder
            else:
                snapshot = schema.CODE if schema.SWEEP in names else None
                folders[:] = sorted(name for name in folders if not name.startswith(".") and name != snapshot)


def check_roots(roots: list[Path]) -> None:
    """Raise UserError for a root that is missing or not a folder."""
    for root in roots:
        if not root.is_dir():
            problem = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"Root {root} {problem}; give folders that hold run directories.")


def fingerprint(folder: Path) -> str | None:
    """Return a digest of names, sizes and times of all files, which changes when the run directory changes.

    None where that cannot tell: a folder is linked from elsewhere, or a file is so young that a second write could
    have the same time and size. The change time (ctime) counts too, because a copy may carry old modification times.
    """
    digest = hashlib.sha256()
    newest_ns = 0
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            for entry in entries:
                name = entry.path.encode(errors="surrogateescape")
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
                    digest.update(name + b"\0")
                # What changes behind the link changes no time in this folder.
                elif entry.is_symlink() and entry.is_dir():
                    return None
                else:
                    stat = entry.stat()
                    newest_ns = max(newest_ns, stat.st_mtime_ns)
                    digest.update(name + f"\0{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\0".encode())
        except OSError:
            return None
    settled = newest_ns <= time.time_ns() - SETTLED_S * 1_000_000_000
    return digest.hexdigest() if settled else None


def read_run_id(folder: Path) -> str | None:
    """Return the run id of a directory whose manifest is usable."""
    manifest, _, _ = _read_manifest(folder / schema.MANIFEST)
    return manifest.run_id if manifest else None


def read_run(folder: Path) -> tuple[Run | None, list[SkippedFile]]:
    """Read one run directory; None where its manifest is unusable, and then all its parts are listed as skipped.

    Its parts stay in memory, compressed, until `parts.read_table` reads them.
    """
    manifest, code, problem = _read_manifest(folder / schema.MANIFEST)
    run_id = manifest.run_id if manifest else None
    tables: dict[str, TableFiles] = {}
    skips: list[SkippedFile] = []
    for table in schema.TABLES:
        tables[table], unusable = open_table(folder / table, table, run_id)
        skips += unusable
    if manifest is None:
        # Without a run id nothing of them can be merged, but each is listed.
        orphans = [path for files_ in tables.values() for path in (*files_.parts, *files_.journals)]
        skips += [skipped(path, code, f"part of a run without a usable manifest: {problem}") for path in orphans]
        return None, [skipped(folder / schema.MANIFEST, code, problem), *skips]
    windows: list[Window] = []
    path = folder / schema.WINDOWS
    try:
        stored = read_record(path, list[Window])
        # A recipe that is unavailable ends its run before any window opens: no file is as it should be.
        if stored is None and manifest.reason != Reason.UNAVAILABLE:
            skips.append(skipped(path, "missing", "no such file: no window to measure", run_id))
        windows = stored or []
    except (ValueError, OSError) as error:
        skips.append(skipped(path, "damaged", str(error), run_id))
    run = Run(folder=folder, manifest=_with_final_state(folder, manifest), windows=windows, tables=tables)
    if manifest.quality and manifest.quality.pictures:
        path = folder / manifest.quality.pictures
        if problem := _image_problem(folder, path):
            skips.append(skipped(path, "picture", problem, run_id))
        else:
            run.sample_grid = path
    run.content_hash = _content_hash(run)
    return run, skips


def _image_problem(folder: Path, path: Path) -> str:
    """Return why a sample image cannot be copied, an empty string where it can."""
    try:
        # The manifest may come from elsewhere: it must not make the merge copy a file of this machine.
        if folder.resolve() not in path.resolve().parents:
            return "the manifest names an image outside its run directory"
        if not path.is_file():
            return "the manifest names this image, and there is no such file"
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            return f"image of {size:,} bytes; the limit is {MAX_IMAGE_BYTES:,}"
        with path.open("rb") as raw:  # by the content, because a page embeds it under this type
            return "" if raw.read(len(_PNG)) == _PNG else "not a PNG by its content"
    except OSError as error:
        return f"cannot be read ({error})"


def _with_final_state(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest with a site and a GPU, and the scheduler's final state where that says more of the end.

    Whether telemetry suffices is not asked here: the audit of the windows decides that.
    """
    manifest.site, manifest.gpu = manifest.site or "unknown", manifest.gpu or "unknown"
    artifacts, scheduler = RunArtifacts.read(folder), SchedulerState.load(folder)
    state = resolve_attempt_state(
        submitted=True, refused=None, cancelled=False, scheduler=scheduler, artifacts=artifacts
    )
    if state.state is not PointState.FAILED or state.reason is Reason.TELEMETRY_INCOMPLETE:
        return manifest
    # From here on a failure, e.g. the manifest still says running, and Slurm that the node failed.
    known = manifest.status in (Status.FAILED, Status.INTERRUPTED)
    status = manifest.status if known else Status.FAILED
    return msgspec.structs.replace(manifest, status=status, reason=state.reason, message=state.message or None)


def _read_manifest(path: Path) -> tuple[Manifest | None, str, str]:
    """Return the manifest, or None with a code and the reason."""
    try:
        value: Any = files.read_json(path)
        if value is None:
            return None, "no_manifest", "no manifest: the worker never got far enough to write one, or it was lost"
        if not isinstance(value, dict) or not isinstance(value.get("run_id"), str) or not value["run_id"]:
            return None, "manifest_damaged", "manifest damaged: it has no run_id"
        if problem := version_problem(value.get("schema_version")):
            return None, "schema_version", f"manifest: {problem}"
        return msgspec.convert(value, Manifest), "", ""
    except (ValueError, OSError) as error:  # msgspec.ValidationError is a ValueError
        return None, "manifest_damaged", f"manifest damaged: {error}"


def _content_hash(run: Run) -> str:
    digest = hashlib.sha256()
    # Parts and journals were hashed when they were read; the other files are hashed here.
    known = {path: value for table in run.tables.values() for path, value in table.digests.items()}
    paths = [run.folder / name for name in (schema.MANIFEST, schema.WINDOWS, schema.TELEMETRY)]
    paths += [path for table in run.tables.values() for path in (*table.parts, *table.journals)]
    paths += [run.sample_grid] if run.sample_grid else []
    for path in paths:
        digest.update(str(path.relative_to(run.folder)).encode() + b"\0")
        if path in known:
            digest.update(known[path])
        elif path.is_file():
            with path.open("rb") as raw:
                digest.update(hashlib.file_digest(raw, "sha256").digest())
    return digest.hexdigest()
