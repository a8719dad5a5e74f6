"""Queued jobs run the code as it was when they were submitted, whatever is edited meanwhile."""

from __future__ import annotations

import hashlib
import shutil
import stat
from pathlib import Path

from inpaint_bench.core.environment import git_state
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.paths import ROOT, conf_dir, templates_dir
from inpaint_bench.core.schema import SNAPSHOT

PACKAGES = ("inpaint_bench", "launchers", "hydra_plugins")  # what a job may import


def take(folder: Path) -> Path:
    """Copy the running packages, conf/ and slurm_templates/ into a new folder below `folder`, and return it.

    Named after its content, so equal code is stored once however often a sweep is rerun. Nobody else can enter it: jobs
    run it as us. Raises UserError where what lies there under that name is something else.
    """
    files, digest = _content()
    target = folder / _name(digest)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # of a sweep from before; what it holds is compared below
        folder.chmod(0o700)
    if (target / SNAPSHOT).is_file():
        _compare(target, files)
        return target
    for relative, path in files:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    before = read_json(ROOT / SNAPSHOT)  # where this runs from a snapshot itself
    git = before["git"] if before and before["content_sha256"] == digest else git_state(ROOT)
    replace_json(target / SNAPSHOT, {"content_sha256": digest, "git": git})
    return target


def size() -> int:
    """How many files `take` leaves."""
    return len(_files()) + 1


def would_be(folder: Path) -> Path:
    """The folder that `take` would return now."""
    return folder / _name(_content()[1])


def _compare(target: Path, files: list[tuple[Path, Path]]) -> None:
    stored = {path.relative_to(target) for path in target.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    extra = stored - {relative for relative, _ in files} - {Path(SNAPSHOT)}
    same = not extra and all(relative in stored and _equal(target / relative, path) for relative, path in files)
    if not same:
        raise UserError(f"{target}: is not the code that it was named after; look who changed it, and remove it")


def _equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def _name(digest: str) -> str:
    return digest[:12]


def _files() -> list[tuple[Path, Path]]:
    """As (path in the snapshot, path here)."""
    sources = [ROOT / name for name in PACKAGES] + [conf_dir(), templates_dir()]
    return [
        (Path(source.name) / path.relative_to(source), path)
        for source in sources
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]


def _content() -> tuple[list[tuple[Path, Path]], str]:
    """The files, and the hash over names and contents."""
    files = _files()
    digest = hashlib.sha256()
    for relative, path in files:
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    return files, digest.hexdigest()
