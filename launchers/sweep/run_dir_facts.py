"""What the run directories of a sweep tell of its attempts, for where its ledger was deleted or cut short.

A run directory that nobody knows of would be sent into once more, and what it holds would be of two runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import JOBS, MANIFEST

UNKNOWN = "unknown"  # a run whose manifest does not say; a group whose folder is not there
READERS = 16  # folders read at once: on a network file system one waits for each

_POINT = re.compile(r"0|[1-9]\d{0,6}", re.ASCII)
_ATTEMPT = re.compile(r"attempt-([1-9]\d{0,6})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one run directory tells of its attempt."""

    run_id: str = UNKNOWN
    sweep_id: str | None = None
    site: str | None = None
    overrides: tuple[str, ...] | None = None
    started_unix: float = 0.0
    job_id: str | None = None  # a task of an array, "123_4"
    group: str = UNKNOWN

    @classmethod
    def of(cls, folder: Path, point: int, attempt: int) -> Trace:
        """Never raises: a manifest that cannot be read tells nothing."""
        manifest: Any = None
        with suppress(OSError, ValueError):
            manifest = read_json(folder / str(point) / f"attempt-{attempt}" / MANIFEST)
        if not isinstance(manifest, dict):
            return cls()
        slurm, overrides, started_ns = (manifest.get(key) for key in ("slurm", "overrides", "started_unix_ns"))
        job_id = _task(slurm) if isinstance(slurm, dict) else None
        return cls(
            run_id=str(manifest.get("run_id") or UNKNOWN),
            sweep_id=_text(manifest.get("sweep_id")),
            site=_text(manifest.get("site")),
            overrides=tuple(map(str, overrides)) if isinstance(overrides, list) else None,
            started_unix=started_ns / 1e9 if isinstance(started_ns, int) else 0.0,
            job_id=job_id,
            group=_group(folder, job_id) if job_id else UNKNOWN,
        )


def attempts(folder: Path) -> dict[int, set[int]]:
    """By point the attempts that have a run directory."""
    points = [name for name in _names(folder) if _POINT.fullmatch(name)]
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(lambda name: _names(folder / name), points))
    return {int(point): mine for point, names in zip(points, found, strict=True) if (mine := _numbers(names))}


def groups(folder: Path) -> list[str]:
    """Arrays that have a folder in `jobs`, whether or not they were ever sent."""
    return sorted(_names(folder / JOBS))


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:  # none, or a file
        return []


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))}


def _task(slurm: dict[str, Any]) -> str | None:
    array, task = slurm.get("array_job_id"), slurm.get("array_task_id")
    return f"{array}_{task}" if re.fullmatch(r"\d+_\d+", f"{array}_{task}", re.ASCII) else None


def _group(folder: Path, job_id: str) -> str:
    """The array whose folder holds the logs of this job."""
    return next((log.parent.name for log in (folder / JOBS).glob(f"*/{job_id}_*_log.out")), UNKNOWN)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
