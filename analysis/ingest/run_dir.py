"""Find and read run directories under any number of roots. Nothing is skipped silently.

The rows of a run's further nodes get the clock of rank 0. The monotonic clocks of two nodes have nothing to do with
each other: they are compared through the wall clocks, which sites keep in step by NTP, as each sidecar read both when
it started.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from analysis.columns import hive_value
from inpaint_bench.core import schema
from inpaint_bench.core.attempt_state import RunArtifacts, SchedulerState, resolve_attempt_state
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_plain
from inpaint_bench.core.records import Manifest, Window, decode_record, to_record
from inpaint_bench.core.schema import PointState, Reason, Status
from inpaint_bench.telemetry.report import TelemetryReport

from .parts import SkippedFile, TableFiles, describe, open_table, read_table, skipped

MAX_RECORD_BYTES = 64 * 2**20  # a manifest lists every skipped image, with some 100 bytes each
MAX_ID = 200  # bytes of a run id, a site, a GPU as folder names, of which a file system takes 255
MAX_IMAGE_BYTES = 4 * 2**20  # limit for a run's grid of sample images
_PNG = b"\x89PNG\r\n\x1a\n"
_HIDDEN = [f"{'*/' * depth}{schema.MANIFEST}" for depth in range(4)]  # where runs lie in a sweep that was renamed


class LeftOutError(Exception):
    """A run directory that is left out, with the code and the reason for skipped_files.parquet."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(kw_only=True)
class NodeFiles:
    """What one sidecar wrote: a run on several nodes has one for each."""

    folder: Path | None = None  # folder of the run
    name: str = ""  # name of the node's folder, if there are several nodes
    sidecar: TelemetryReport | None = None  # telemetry.json
    tables: dict[str, TableFiles] = field(default_factory=dict)
    incomplete: frozenset[str] = frozenset()  # tables of which a file was left out, which is listed elsewhere
    rows: Mapping[str, pl.DataFrame] = field(default_factory=dict)  # rows of one of several nodes, on rank 0's clock

    @cached_property
    def footers(self) -> dict[str, list[dict[str, str]]]:
        """Return the metadata in the footer of every usable part, by table."""
        opened = {table: files.parts.values() for table, files in self.tables.items()}
        return {table: [_metadata(part.schema_arrow) for part in parts] for table, parts in opened.items()}


@dataclass(kw_only=True)
class Run(NodeFiles):
    """One attempt on disk. The content hash covers the bytes of everything that would be merged."""

    folder: Path
    manifest: Manifest
    windows: list[Window]
    nodes: list[NodeFiles] = field(default_factory=list)  # without the node of rank 0
    sample_grid: bytes | None = None  # a PNG
    content_hash: str = ""


def find_run_dirs(roots: list[Path]) -> tuple[list[Path], list[Path], list[SkippedFile]]:
    """Return the run directories and the sweeps below the roots in order of path, each once, and what was not searched.

    A folder counts when it holds a manifest or a table, whatever lies beside it: a stray file or folder of such a name
    among run directories hides none of them. Hidden folders, the folders of a run's tables, the tables of a merged
    dataset and the code snapshot of a sweep are not entered; links to folders are not followed.
    """
    folders: dict[Path, Path] = {}  # by its resolved path: roots may overlap or be linked to each other
    sweeps: dict[Path, Path] = {}
    skips: list[SkippedFile] = []
    links: list[Path] = []
    resolved_roots = [root.resolve() for root in roots]
    for root in roots:
        pending = [root]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(folder) as scan:
                    entries = {entry.name: entry for entry in scan}
            except OSError as error:
                skips.append(skipped(folder, "unreadable", f"folder cannot be searched for runs ({describe(error)})"))
                continue
            is_run = schema.MANIFEST in entries
            is_dataset = schema.DATASET in entries and schema.RUNS in entries
            if is_run or (not is_dataset and any(table in entries for table in schema.TABLES)):
                folders.setdefault(folder.resolve(), folder)
            if schema.SWEEP in entries:
                sweeps.setdefault(folder.resolve(), folder)
                entries.pop(schema.CODE, None)
            own = {*schema.TABLES, *(name for name in entries if is_run and schema.NODE_NAME.fullmatch(name))}
            below = [folder / name for name in sorted(entries.keys() - own) if _is_folder(entries[name])]
            hidden = [path for path in below if path.name.startswith(".")]
            for path in (path for path in hidden if any(True for depth in _HIDDEN for _ in path.glob(depth))):
                reason = "hidden folder with runs, which is not searched: give it as a root of its own, or remove it"
                skips.append(skipped(path, "hidden", reason))
            enter = [path for path in below if path not in hidden]
            links += [path for path in enter if path.is_symlink()]
            pending += [path for path in reversed(enter) if not path.is_symlink()]
    for link in links:
        target = Path(os.path.realpath(link))
        if not any(target.is_relative_to(root) for root in resolved_roots):
            reason = "link to a folder, which is not followed: give its target as a root of its own"
            skips.append(skipped(link, "link", reason))
    return list(folders.values()), list(sweeps.values()), skips


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def check_roots(roots: list[Path]) -> None:
    """Raise UserError for a root that is missing or not a folder."""
    for root in roots:
        if not root.is_dir():
            problem = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"Root {root} {problem}; give folders that hold run directories.")


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """The manifest of a run directory, or why it is unusable."""

    folder: Path
    manifest: Manifest | None = None
    content: bytes = b""
    problem: LeftOutError | None = None


def find_manifest(folder: Path) -> ManifestFile:
    """Read the manifest of a run directory. A merge reads it only here, so later changes of the run have no effect."""
    try:
        content = read_plain(folder / schema.MANIFEST, max_bytes=MAX_RECORD_BYTES)
        value = decode_record(content, Any)
        version = value.get("schema_version") if isinstance(value, dict) else None
        if isinstance(value, dict) and (problem := schema.version_problem(version)):
            raise LeftOutError("schema_version", f"manifest: {problem}")
        manifest = to_record(value, Manifest)
        if not manifest.run_id:
            raise ValueError("it has no run_id")
        # They become folders of the dataset.
        for name in ("run_id", "site", "gpu"):
            if (length := len(hive_value(getattr(manifest, name) or ""))) > MAX_ID:
                raise ValueError(f"{name} takes {length:,} characters as a folder name; the limit is {MAX_ID}")
        return ManifestFile(folder=folder, manifest=manifest, content=content)
    except FileNotFoundError:
        left_out = LeftOutError(
            "no_manifest", "no manifest: the worker never got far enough to write one, or it was lost"
        )
    except OSError as error:
        left_out = LeftOutError("manifest_damaged", f"manifest cannot be read ({describe(error)})")
    except LeftOutError as error:
        left_out = error
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        left_out = LeftOutError("manifest_damaged", f"manifest damaged: {error}")
    return ManifestFile(folder=folder, problem=left_out)


def read_run(source: ManifestFile) -> tuple[Run | None, list[SkippedFile]]:
    """Read one run directory; None if its manifest is unusable, and then all its parts are listed as skipped.

    Its parts stay in memory, compressed, until `parts.read_table` reads them.
    """
    folder, manifest = source.folder, source.manifest
    contents = {schema.MANIFEST: source.content}
    run_id = manifest.run_id if manifest else None
    tables: dict[str, TableFiles] = {}
    skips: list[SkippedFile] = []
    for table in schema.TABLES:
        tables[table], unusable = open_table(folder / table, table, run_id)
        skips += unusable
    if manifest is None:
        problem = source.problem or LeftOutError("no_manifest", "no manifest")
        # Without a run id nothing of them can be merged, but each is listed.
        orphans = [path for files_ in tables.values() for path in files_.digests]
        text = f"part of a run without a usable manifest: {problem.reason}"
        skips += [skipped(path, problem.code, text) for path in orphans]
        return None, [skipped(folder / schema.MANIFEST, problem.code, problem.reason), *skips]
    # A recipe that is unavailable ends its run before any window opens, and none opens if kernels are counted.
    counted = manifest.profile is not None and manifest.profile.counts
    if not (folder / schema.WINDOWS).exists() and manifest.reason != Reason.UNAVAILABLE and not counted:
        skips.append(skipped(folder / schema.WINDOWS, "missing", "no such file: no window to measure", run_id))
    windows: list[Window] = _read_record(folder, schema.WINDOWS, list[Window], contents, skips, run_id) or []
    sidecar = _read_record(folder, schema.TELEMETRY, TelemetryReport, contents, skips, run_id)
    nodes = []
    for path in sorted(folder.glob(schema.NODE.format("*"))):
        if path.is_symlink() or not schema.NODE_NAME.fullmatch(path.name):
            continue
        report = _read_record(folder, f"{path.name}/{schema.TELEMETRY}", TelemetryReport, contents, skips, run_id)
        nodes.append(NodeFiles(folder=folder, name=path.name, sidecar=report))
        for table in schema.NODE_TABLES:
            nodes[-1].tables[table], unusable = open_table(path / table, table, run_id)
            skips += unusable
    run = Run(
        folder=folder,
        manifest=_with_final_state(folder, manifest),
        windows=windows,
        sidecar=sidecar,
        tables=tables,
        nodes=nodes,
    )
    if manifest.quality and manifest.quality.pictures:
        try:
            run.sample_grid = contents[manifest.quality.pictures] = _read_image(folder, manifest.quality.pictures)
        except ValueError as error:
            skips.append(skipped(folder / manifest.quality.pictures, "picture", str(error), run_id))
    run.content_hash = _content_hash(run, contents)
    return run, skips


def _read_record(
    folder: Path, name: str, kind: Any, contents: dict[str, bytes], skips: list[SkippedFile], run_id: str | None
) -> Any:
    """Return a record of the run directory, None if there is none that can be read, which is added to the skips."""
    path = folder / name
    try:
        contents[name] = read_plain(path, max_bytes=MAX_RECORD_BYTES)
        return decode_record(contents[name], kind)
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        skips.append(skipped(path, "damaged", f"damaged: {error}", run_id))
    except OSError as error:
        skips.append(skipped(path, "unreadable", f"cannot be read ({describe(error)})", run_id))
    return None


def _metadata(part: pa.Schema) -> dict[str, str]:
    return {key.decode(errors="replace"): text.decode(errors="replace") for key, text in (part.metadata or {}).items()}


def _read_image(folder: Path, name: str) -> bytes:
    """Return a sample image. Raise ValueError with the reason if it cannot be copied."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):  # no file of this machine is copied
        raise ValueError("the manifest names an image outside its run directory")
    try:
        content = read_plain(path, max_bytes=MAX_IMAGE_BYTES)
    except FileNotFoundError:
        raise ValueError("the manifest names this image, and there is no such file") from None
    except OSError as error:
        raise ValueError(f"cannot be read ({describe(error)}); the limit is {MAX_IMAGE_BYTES:,} bytes") from None
    if not content.startswith(_PNG):  # by the content, because a page embeds it under this type
        raise ValueError("not a PNG by its content")
    return content


def _with_final_state(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest with a site and a GPU, and the scheduler's final state if that says more of the end.

    Whether telemetry suffices is not asked here: the audit of the windows decides that.
    """
    manifest.site, manifest.gpu = manifest.site or schema.UNKNOWN, manifest.gpu or schema.UNKNOWN
    artifacts = RunArtifacts(manifest=manifest, sidecar_status="complete")
    state = resolve_attempt_state(
        submitted=True, refused=None, cancelled=False, scheduler=SchedulerState.load(folder), artifacts=artifacts
    )
    if state.state is not PointState.FAILED or state.reason is Reason.TELEMETRY_INCOMPLETE:
        return manifest
    # From here on a failure, e.g. the manifest still says running, and Slurm that the node failed.
    known = manifest.status in (Status.FAILED, Status.INTERRUPTED)
    status = manifest.status if known else Status.FAILED
    return msgspec.structs.replace(manifest, status=status, reason=state.reason, message=state.message or None)


def _content_hash(run: Run, contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    hashes = {name: hashlib.sha256(content).digest() for name, content in contents.items()}
    for table in [*run.tables.values(), *(table for node in run.nodes for table in node.tables.values())]:
        hashes |= {str(path.relative_to(run.folder)): value for path, value in table.digests.items()}
    for name, value in sorted(hashes.items()):
        digest.update(os.fsencode(name) + b"\0" + value)
    return digest.hexdigest()


def read_node(run: Run, node: NodeFiles) -> tuple[dict[str, pa.Table], TelemetryReport | None, list[SkippedFile]]:
    """Return the rows of a node's sidecar, its report, and what was skipped.

    Without the reports of this node and of rank 0's the times cannot be placed, and no row is taken.
    """
    run_id, ahead_ns = run.manifest.run_id, _ahead_ns(node.sidecar, run.sidecar)
    if node.sidecar is None or ahead_ns is None:
        reason = "without telemetry.json of both nodes the clocks cannot be compared: no row is taken from this folder"
        return {}, None, [skipped(run.folder / node.name, "no_clock", reason, run_id)]
    skips: list[SkippedFile] = []
    tables: dict[str, pa.Table] = {}
    for name, files in node.tables.items():
        rows, row_skips = read_table(name, files, run_id)
        skips += row_skips
        index = rows.schema.get_field_index("t_mono_ns")
        tables[name] = rows.set_column(index, rows.schema.field(index), pc.subtract(rows["t_mono_ns"], ahead_ns))
    times = {name: getattr(node.sidecar, name) for name in ("started_mono_ns", "ended_mono_ns")}
    placed = {name: None if time_ns is None else time_ns - ahead_ns for name, time_ns in times.items()}
    return tables, msgspec.structs.replace(node.sidecar, **placed), skips


def _ahead_ns(node: TelemetryReport | None, leader: TelemetryReport | None) -> int | None:
    """Return how far a node's monotonic clock is ahead of that of rank 0's node."""
    if node is None or leader is None:
        return None
    if node.boot_id is not None and node.boot_id == leader.boot_id:  # one kernel
        return 0
    differences = [
        report.started_mono_ns - report.started_unix_ns
        for report in (node, leader)
        if report.started_mono_ns is not None and report.started_unix_ns is not None
    ]
    return differences[0] - differences[1] if len(differences) == 2 else None
