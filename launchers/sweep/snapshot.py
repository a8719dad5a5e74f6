"""A copy of the code in the sweep directory: queued jobs run it as it was when they were submitted."""

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
    """Copy the running packages, conf/ and slurm_templates/ into a new directory below `folder`, and return it.

    Named by content hash, so equal code is stored once however often a sweep is rerun. Only the user can enter it.
    Raises UserError where a stored copy of that name has other content.
    """
    files, digest = _content()
    target = folder / _name(digest)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # made by somebody else; its content is compared below
        folder.chmod(0o700)
    if (target / SNAPSHOT).is_file():
        _compare(target, files)
        return target
    for relative, path in files:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    parent = read_json(ROOT / SNAPSHOT)  # present where the running code is a snapshot itself
    git = parent["git"] if parent and parent["content_sha256"] == digest else git_state(ROOT)
    replace_json(target / SNAPSHOT, {"content_sha256": digest, "git": git})
    return target


def planned_path(folder: Path) -> Path:
    """Return the directory that `take` would return now."""
    return folder / _name(_content()[1])


def _compare(target: Path, files: list[tuple[Path, Path]]) -> None:
    """Raise UserError unless the stored files are these, byte for byte."""
    stored = {path.relative_to(target) for path in target.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    expected = {relative for relative, _ in files}
    if stored - {Path(SNAPSHOT)} != expected or any(
        (target / relative).read_bytes() != path.read_bytes() for relative, path in files
    ):
        raise UserError(f"{target}: its content does not match its name; find out who changed it, and remove it")


def _name(digest: str) -> str:
    return digest[:12]


def _content() -> tuple[list[tuple[Path, Path]], str]:
    """Return the files as (path in the snapshot, path here), and the hash over their names and contents."""
    sources = [ROOT / name for name in PACKAGES] + [conf_dir(), templates_dir()]
    files = [
        (Path(source.name) / path.relative_to(source), path)
        for source in sources
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]
    digest = hashlib.sha256()
    for relative, path in files:
        digest.update(f"{relative}\0".encode() + path.read_bytes() + b"\0")
    return files, digest.hexdigest()
