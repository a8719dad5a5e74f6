"""Run directories of any number of sites -> one dataset folder that says where everything came from.

The dataset is built under a temporary name beside its place and renamed at the end: an interrupted merge
leaves what was there before. Inputs are only read.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from inpaint_bench import contract, files
from inpaint_bench.errors import UserError

from . import parts, pictures, runs
from .load import Found, Run, check_roots, load

WINDOWS = "windows.parquet"
KEYS = ("site", "gpu", "run")  # hive folders; all of them strings
_SKIP_SCHEMA = {
    "path": pl.String,
    "code": pl.String,
    "reason": pl.String,
    "run_id": pl.String,
    "size_bytes": pl.Int64,
}
_WINDOW_SCHEMA = {
    **dict.fromkeys(("run_id", "site", "gpu", "window_id", "kind", "status", "reason"), pl.String),
    **dict.fromkeys(
        ("t_start_mono_ns", "t_end_mono_ns", "t_start_unix_ns", "t_end_unix_ns", "steps", "images"), pl.Int64
    ),
}
_OWN = {contract.DATASET, contract.RUNS, contract.SKIPPED, WINDOWS, pictures.FOLDER, *contract.TABLES}


def partition(run: Run) -> Path:
    """`site=grace/gpu=a40/run=r-01`. Values begin with a letter: readers turn bare digits into integers."""
    values = zip(KEYS, (run.site, run.gpu, run.run_id), strict=True)
    return Path(*(f"{key}={hive_value(value)}" for key, value in values))


def hive_value(value: str) -> str:
    """A value as a folder name may carry it, however the id was written."""
    lettered = value if value[:1].isascii() and value[:1].isalpha() else f"r-{value}"
    return quote(lettered, safe="")


def merge(roots: list[Path], dataset_dir: Path) -> dict[str, Any]:
    """Write the dataset and return the content of its dataset.json.

    Raises UserError where a root is missing, nothing is found, or `dataset_dir` holds anything that a merge
    did not write.
    """
    check_roots(roots)
    _check_target(roots, dataset_dir)
    found = load(roots)
    if not found.candidates:
        where = ", ".join(map(str, roots))
        raise UserError(f"No run directory below {where}: none holds {contract.MANIFEST} or folders of parts.")
    dataset_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = dataset_dir.with_name(f".{dataset_dir.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        account = _write(found, roots, temporary)
        _swap(temporary, dataset_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return account


def _check_target(roots: list[Path], target: Path) -> None:
    for root in roots:
        if target.resolve() == root.resolve() or target.resolve() in root.resolve().parents:
            raise UserError(f"Dataset folder {target} holds root {root}; put the dataset elsewhere.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is not a folder; give the name of a new or an older dataset folder.")
    if not target.exists():
        return
    names = {path.name for path in target.iterdir()}
    if names and contract.DATASET not in names:
        raise UserError(f"{target} is not a dataset (no {contract.DATASET}); it is left as it is.")
    if foreign := sorted(names - _OWN):
        raise UserError(
            f"{target} also holds {', '.join(foreign)}, which merging anew would delete; move it out first."
        )


def _swap(new: Path, target: Path) -> None:
    """Rename into place. An older dataset steps aside first, and comes back if the rename fails."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        if aside.exists():
            aside.rename(target)
        raise
    files.fsync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _write(found: Found, roots: list[Path], out: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    windows: list[dict[str, Any]] = []
    counts = dict.fromkeys(contract.TABLES, 0)
    skips = list(found.skips)
    for run in found.runs:
        tables: dict[str, pl.DataFrame] = {}
        for name in contract.TABLES:
            tables[name], late = parts.read(name, run.tables[name], run.run_id)
            skips += late
            counts[name] += tables[name].height
            _write_table(tables[name], run, out / name)
        picture, objection = pictures.copy(run.folder, run.manifest, out)
        skips += [objection] if objection else []
        rows.append({**_row(run, tables), "pictures": picture})
        windows += [_window(run, window) for window in run.windows]
    pl.DataFrame(rows, schema=runs.SCHEMA, strict=False).write_parquet(out / contract.RUNS)
    pl.DataFrame(windows, schema=_WINDOW_SCHEMA, strict=False).write_parquet(out / WINDOWS)
    skipped = [{name: getattr(skip, name) for name in _SKIP_SCHEMA} for skip in skips]
    pl.DataFrame(skipped, schema=_SKIP_SCHEMA).write_parquet(out / contract.SKIPPED)
    account = {
        "schema_version": contract.SCHEMA_VERSION,
        "producer": contract.PRODUCER,
        "merged_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "roots": [str(root) for root in roots],
        "run_directories": found.candidates,
        "runs": len(rows),
        "runs_valid": sum(bool(row["valid"]) for row in rows),
        "rows": counts,
        "skipped": len(skips),
        "conflicts": sum(skip.code == "conflict" for skip in skips),
        "run_hashes": {run.run_id: run.hash for run in found.runs},
        "content_hash": hashlib.sha256("".join(sorted(r.hash for r in found.runs)).encode()).hexdigest(),
    }
    files.replace_json(out / contract.DATASET, account)
    return account


def _write_table(frame: pl.DataFrame, run: Run, folder: Path) -> None:
    """The run's rows with the hive keys repeated as columns. No rows, no file."""
    if frame.is_empty():
        return
    target = folder / partition(run)
    target.mkdir(parents=True)
    keyed = frame.with_columns(pl.lit(run.site).alias("site"), pl.lit(run.gpu).alias("gpu"))
    keyed.write_parquet(target / contract.PART_PATTERN.format(0), compression="zstd", statistics=True)


def _row(run: Run, tables: dict[str, pl.DataFrame]) -> dict[str, Any]:
    try:
        row = runs.summarise(run.manifest, run.windows, tables["samples_fast"], tables["samples_slow"], tables["steps"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        # A manifest of the right version with fields of the wrong kind: one bad run must not stop the rest.
        row = dict.fromkeys(runs.SCHEMA)
        row.update(run_id=run.run_id, valid=False, demonstration=bool(run.manifest.get("demonstration")))
        row.update(status=str(run.manifest.get("status")))
        row["invalid_reason"] = f"cannot be summarised ({type(error).__name__}: {error})"
    row.update(site=run.site, gpu=run.gpu, run_dir=str(run.folder), content_hash=run.hash)
    return row


def _window(run: Run, window: dict[str, Any]) -> dict[str, Any]:
    row = {name: window.get(name) for name in _WINDOW_SCHEMA}
    row.update(run_id=run.run_id, site=run.site, gpu=run.gpu)
    return row
