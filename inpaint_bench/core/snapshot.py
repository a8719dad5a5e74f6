"""A sweep's code snapshot: what it consists of, its hash, and whether this process runs it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import UserError
from .schema import SNAPSHOT

PACKAGES = ("inpaint_bench", "launchers", "hydra_plugins")  # what a job may import
NAME_DIGITS = 12  # of the content hash, in the name of a snapshot


def check_running(code: Path) -> None:
    """Raise UserError unless this process has imported our packages from the snapshot `code`, and it is unchanged."""
    # hydra_plugins is a namespace that other distributions share, so it has no file of its own.
    for name in ("inpaint_bench", "launchers", "hydra_plugins.inpaint_bench_launcher"):
        source = getattr(sys.modules.get(name), "__file__", None)
        if source is not None and not Path(source).resolve().is_relative_to(code.resolve()):
            raise UserError(
                f"{name} was imported from {Path(source).parent} and not from {code}, the code that was submitted: "
                "something in the job puts another folder before it in PYTHONPATH, for example the site's "
                "environment.setup"
            )
    if content_hash(snapshot_files(code))[:NAME_DIGITS] != code.name:
        raise UserError(f"{code}: the code was changed after it was submitted; `rerun` submits the point with a copy")


def snapshot_files(code: Path) -> dict[Path, Path]:
    """Return the files of a stored snapshot by their path in it."""
    return {path.relative_to(code): path for path in files_below(code) if path != code / SNAPSHOT}


def files_below(folder: Path) -> Iterator[Path]:
    """Return the files of a folder at any depth, without compiled Python."""
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def content_hash(files: Mapping[Path, Path]) -> str:
    """Return a hash over names and contents."""
    digest = hashlib.sha256()
    for relative, path in sorted(files.items()):
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
