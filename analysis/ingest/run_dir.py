"""Run directories under any number of roots: found, read, and nothing skipped silently."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inpaint_bench.core import files, schema
from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState, resolve_attempt_state
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import PointState, Reason, Status

from . import migrate, pictures
from .parts import Parts, Skip, probe

SETTLED_S = 2  # some file systems keep whole seconds: what is younger may change and look the same


@dataclass(kw_only=True)
class Run:
    """One attempt on disk. `hash` is over the bytes of everything that would be merged."""

    folder: Path
    manifest: dict[str, Any]
    windows: list[dict[str, Any]]
    telemetry: dict[str, Any]
    tables: dict[str, Parts] = field(default_factory=dict)
    hash: str = ""

    @property
    def run_id(self) -> str:
        return str(self.manifest["run_id"])

    @property
    def site(self) -> str:
        return str(self.manifest.get("site") or "unknown")

    @property
    def gpu(self) -> str:
        return str(self.manifest.get("gpu") or "unknown")


def find(roots: list[Path]) -> Iterator[Path]:
    """Run directories below the roots, in order of path; never one inside another, each folder once.

    A folder counts when it has a manifest or a folder of parts. Hidden folders, merged datasets and the
    code snapshot of a sweep are not entered.
    """
    seen: set[Path] = set()
    for root in roots:
        for here, folders, names in os.walk(root):
            folder = Path(here)
            if schema.DATASET in names:
                folders.clear()
                continue
            is_run = schema.MANIFEST in names or any(table in folders for table in schema.TABLES)
            if is_run:
                folders.clear()
                if folder.resolve() not in seen:
                    seen.add(folder.resolve())
                    yield folder
                continue
            snapshot = schema.CODE if schema.SWEEP in names else None
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != snapshot)


def check_roots(roots: list[Path]) -> None:
    """Refuse a root that is missing or not a folder."""
    if not roots:
        raise UserError("No root given: name at least one folder that holds run directories.")
    for root in roots:
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"Root {root} {what}; give folders that hold run directories.")


def fingerprint(folder: Path) -> tuple[str | None, int]:
    """What tells whether a run directory has changed, without reading it: names, sizes and times of all its files.

    None where that cannot tell: a folder is linked from elsewhere, or a file was written so recently that a second
    write could have the same time and size. The change time is in it too: a copy may carry old times.
    With it, the bytes that its parts and journals have.
    """
    digest = hashlib.sha256()
    newest_ns = size_bytes = 0
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                    digest.update(f"{entry.path}\0".encode(errors="surrogateescape"))
                    continue
                if entry.is_symlink() and entry.is_dir():
                    return None, size_bytes
                of = entry.stat()
                size_bytes += of.st_size if entry.name.endswith((".parquet", ".arrows")) else 0
                newest_ns = max(newest_ns, of.st_mtime_ns)
                facts = f"{entry.path}\0{of.st_size} {of.st_mtime_ns} {of.st_ctime_ns}\0"
                digest.update(facts.encode(errors="surrogateescape"))
        except OSError:
            return None, size_bytes
    settled = newest_ns <= time.time_ns() - SETTLED_S * 1_000_000_000
    return digest.hexdigest() if settled else None, size_bytes


def peek(folder: Path) -> str | None:
    """The run id of a directory whose manifest can be used."""
    manifest, _, _ = _manifest(folder / schema.MANIFEST)
    return str(manifest["run_id"]) if manifest else None


def read_run(folder: Path, *, keep: bool = True) -> tuple[Run | None, list[Skip]]:
    """One run directory. None when its manifest cannot be trusted; then each of its parts is listed.

    Its parts stay in memory until `parts.read` takes them; without `keep` only their hash does.
    """
    manifest, code, why = _manifest(folder / schema.MANIFEST)
    run_id = str(manifest["run_id"]) if manifest else None
    tables: dict[str, Parts] = {}
    skips: list[Skip] = []
    for table in schema.TABLES:
        tables[table], bad = probe(folder / table, table, run_id, keep=keep)
        skips += bad
    if (folder / schema.JOURNAL).is_file():
        why_not = f"a journal belongs beside its parts, in {', '.join(schema.TABLES)}"
        skips.append(_skip(folder / schema.JOURNAL, "unexpected", why_not, run_id))
    if manifest is None:
        orphans = [path for parts in tables.values() for path in (*parts.good, *parts.journals)]
        skips += [_skip(path, code, f"part of a run without a usable manifest: {why}") for path in orphans]
        return None, [_skip(folder / schema.MANIFEST, code, why), *skips]
    run = Run(folder=folder, manifest=_judged(folder, manifest), windows=[], telemetry={}, tables=tables)
    for name, kind in ((schema.WINDOWS, list), (schema.TELEMETRY, dict)):
        try:
            value: Any = files.read_json(folder / name)
            if value is None:
                if name == schema.WINDOWS and run.manifest.get("reason") != Reason.UNAVAILABLE:
                    skips.append(_skip(folder / name, "missing", "no such file: no window to measure", run_id))
                continue
            if not isinstance(value, kind) or (kind is list and not all(isinstance(w, dict) for w in value)):
                raise ValueError(f"{folder / name}: not the expected JSON {kind.__name__}")
        except (ValueError, OSError) as error:
            skips.append(_skip(folder / name, "damaged", str(error), run_id))
            continue
        if name == schema.WINDOWS:
            run.windows = list(value)
        else:
            run.telemetry = dict(value)
    run.hash = _content_hash(run)
    return run, skips


def _judged(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, corrected where the scheduler's last word knows better how the attempt ended.

    Whether telemetry suffices is not asked here: the audit of the windows decides that.
    """
    left, word = RunArtifacts.read(folder), SchedulerState.load(folder)
    found = resolve_attempt_state(submitted=True, refused=None, cancelled=False, scheduler=word, artifacts=left)
    if found.state is not PointState.FAILED or found.reason is Reason.TELEMETRY_INCOMPLETE:
        return manifest
    kept = manifest.get("status") in (Status.FAILED, Status.INTERRUPTED)
    status = manifest["status"] if kept else Status.FAILED.value
    return {**manifest, "status": status, "reason": str(found.reason), "message": found.message or None}


def _skip(path: Path, code: str, reason: str, run_id: str | None = None) -> Skip:
    size = path.stat().st_size if path.is_file() else None
    return Skip(path=str(path), code=code, reason=reason, run_id=run_id, size_bytes=size)


def _manifest(path: Path) -> tuple[dict[str, Any] | None, str, str]:
    """The manifest, or None with a code and the reason."""
    try:
        value = files.read_json(path)
    except (ValueError, OSError) as error:
        return None, "manifest_damaged", f"manifest damaged: {error}"
    if value is None:
        return None, "no_manifest", "no manifest: the worker never got far enough to write one, or it was lost"
    if not isinstance(value, dict) or not isinstance(value.get("run_id"), str) or not value["run_id"]:
        return None, "manifest_damaged", "manifest damaged: it has no run_id"
    if why := migrate.objection(value.get("schema_version")):
        return None, "schema_version", f"manifest: {why}"
    return migrate.manifest(value), "", ""


def _content_hash(run: Run) -> str:
    digest = hashlib.sha256()
    known = {path: digested for parts in run.tables.values() for path, digested in parts.digests.items()}
    names = [schema.MANIFEST, schema.WINDOWS, schema.TELEMETRY]
    paths = [run.folder / name for name in names]
    paths += [path for parts in run.tables.values() for path in (*parts.good, *parts.journals)]
    if picture := pictures.usable(run.folder, run.manifest):
        paths.append(picture)
    for path in paths:
        digest.update(str(path.relative_to(run.folder)).encode() + b"\0")
        if path in known:
            digest.update(known[path])
        elif path.is_file():
            with path.open("rb") as raw:
                digest.update(hashlib.file_digest(raw, "sha256").digest())
    return digest.hexdigest()
