"""A copy of the code in the sweep directory: queued jobs run it as it was when they were submitted."""

import shutil
import stat
from pathlib import Path

from inpaint_bench.core.environment import (
    NAME_DIGITS,
    OUR_PACKAGES,
    content_hash,
    files_below,
    git_state,
    snapshot_files,
)
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json, replace_json
from inpaint_bench.core.paths import ROOT, conf_dir, templates_dir
from inpaint_bench.core.schema import SNAPSHOT


def take(folder: Path) -> Path:
    """Copy the running packages, conf/ and slurm_templates/ into a new directory below `folder`, and return it.

    Named by content hash, so equal code is stored once however often a sweep is rerun. Only the user can enter it.
    Raises UserError if a stored copy of that name has other content.
    """
    files = _running_code()
    digest = content_hash(files)
    target = folder / digest[:NAME_DIGITS]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:  # created before; its content is compared below
        folder.chmod(0o700)
    if (target / SNAPSHOT).is_file():
        if content_hash(snapshot_files(target)) != digest:  # also with a file more, which a job could import
            raise UserError(f"{target}: its content does not match its name; find out who changed it, and remove it")
        return target
    for relative, path in files.items():
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / relative)
    # Every job compares the content with the name, so a checkout that changed meanwhile would fail all of them.
    if content_hash(snapshot_files(target)) != digest:
        raise UserError(f"{target}: the code changed while it was copied, or a file was added; remove it and try again")
    parent = read_json(ROOT / SNAPSHOT)  # present if the running code is a snapshot itself
    git = parent["git"] if parent and parent["content_sha256"] == digest else git_state(ROOT)
    # Written last: a copy that was interrupted lacks this file, and the next call makes it anew.
    replace_json(target / SNAPSHOT, {"content_sha256": digest, "git": git})
    return target


def planned_path(folder: Path) -> Path:
    """Return the directory that `take` would return now."""
    return folder / content_hash(_running_code())[:NAME_DIGITS]


def _running_code() -> dict[Path, Path]:
    """Return the files by their path in a snapshot."""
    sources = [ROOT / name for name in OUR_PACKAGES] + [conf_dir(), templates_dir()]
    return {Path(source.name) / path.relative_to(source): path for source in sources for path in files_below(source)}
