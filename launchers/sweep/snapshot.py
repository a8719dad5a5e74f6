"""A copy of the code in the sweep directory: queued jobs run it as it was when they were submitted."""

from __future__ import annotations

import hashlib
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from inpaint_bench.core.environment import git_state
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.paths import ROOT, conf_dir, templates_dir
from inpaint_bench.core.schema import SNAPSHOT

PACKAGES = ("inpaint_bench", "launchers", "hydra_plugins")  # what a job may import


def take(folder: Path) -> Path:
    """Copy the running packages, conf/ and slurm_templates/ into a new directory below `folder`, and return it.

    Named by content hash, so equal code is stored once however often a sweep is rerun. Only the user can enter it.
    Raises UserError where a stored copy of that name has other content.
    """
    files = _running_code()
    digest = _digest(files)
    target = folder / digest[:12]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # created before; its content is compared below
        folder.chmod(0o700)
    if (target / SNAPSHOT).is_file():
        stored = {path.relative_to(target): path for path in _files_below(target) if path != target / SNAPSHOT}
        if _digest(stored) != digest:  # also with a file more, which a job could import
            raise UserError(f"{target}: its content does not match its name; find out who changed it, and remove it")
        return target
    for relative, path in files.items():
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    parent = read_json(ROOT / SNAPSHOT)  # present where the running code is a snapshot itself
    git = parent["git"] if parent and parent["content_sha256"] == digest else git_state(ROOT)
    # Written last: a copy that was interrupted lacks this file, and the next call makes it anew.
    replace_json(target / SNAPSHOT, {"content_sha256": digest, "git": git})
    return target


def planned_path(folder: Path) -> Path:
    """Return the directory that `take` would return now."""
    return folder / _digest(_running_code())[:12]


def _running_code() -> dict[Path, Path]:
    """Return the files by their path in a snapshot."""
    sources = [ROOT / name for name in PACKAGES] + [conf_dir(), templates_dir()]
    return {Path(source.name) / path.relative_to(source): path for source in sources for path in _files_below(source)}


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _digest(files: Mapping[Path, Path]) -> str:
    """Return a hash over names and contents."""
    digest = hashlib.sha256()
    for relative, path in sorted(files.items()):
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
